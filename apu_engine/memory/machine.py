"""What this machine has: memory, limits and AMD GPUs, as /proc, /sys and /dev show them, and nothing else.

A fact that the kernel does not show is None or empty, never an error: the machine may have no GPU, be a container, or
run another kernel. Every path lies below `root`, so that a folder of small text files stands for a machine; the
environment variable APU_SYSROOT sets the default root and is for tests only. Values are read when they are asked for
and not kept: free memory changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from apu_engine.config import sysroot_wanted

GIB = 1 << 30
_APUS = ("902", "909", "90c", "1013", "1033", "1035", "1036", "1037", "1103", "1150", "1151", "1152", "1153")
APUS = frozenset(f"gfx{name}" for name in _APUS)  # targets whose memory is the machine's
PAGE = 4096  # of the kernel's counts
PAGES_PER_GIB = GIB // PAGE  # what ttm.pages_limit counts
AMD = 0x1002  # PCI vendor
_DMI = "sys/class/dmi/id"


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """One AMD GPU of the kernel's topology. Sizes in bytes, None where the kernel does not show them."""

    node: int  # of /sys/class/kfd/kfd/topology/nodes
    gfx: str  # "gfx1151"
    pci: str  # "0000:c5:00.0", "" where unknown
    render_node: Path | None  # root/dev/dri/renderD128, whether it exists or not
    device: Path | None  # its folder in /sys, such as root/sys/class/drm/card1/device
    compute_units: int = 0
    local_bytes: int = 0  # memory that KFD counts as the GPU's own
    vram_total: int | None = None  # on an APU: the carve-out
    vram_used: int | None = None
    gtt_total: int | None = None
    gtt_used: int | None = None
    firmware: dict[str, int] = field(default_factory=dict)  # {"mes": 0x83, ...} from fw_version/*_fw_version

    @property
    def integrated(self) -> bool:
        """Whether its memory is the machine's: an APU has at most a carve-out of its own, smaller than GTT may be."""
        return self.gfx in APUS


class Machine:
    """The machine below `root`: the real one, or a folder with proc, sys, dev and etc of another."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = Path(sysroot_wanted() or "/") if root is None else root

    @property
    def real(self) -> bool:
        """Whether this is the machine that this process runs on."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """The place of `name`, such as "dev/kfd" or "/dev/kfd", on this machine."""
        return self.root / name.lstrip("/")

    def shown(self, path: Path) -> str:
        """A path as the machine's users write it, without the root of a test."""
        return f"/{path.relative_to(self.root)}" if path.is_relative_to(self.root) else str(path)

    def text(self, name: str) -> str | None:
        """Contents of a small file without surrounding white space; None where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The integer, decimal or 0x, that a file holds; None where there is none."""
        return _number(self.path(name))

    # ---- memory

    def meminfo(self) -> dict[str, int]:
        """/proc/meminfo in bytes. Raises OSError where it cannot be read."""
        return dict(_meminfo(self.path("proc/meminfo").read_text(errors="replace")))

    @property
    def memory_total(self) -> int:
        """RAM that the kernel manages: without the carve-out. Raises OSError without /proc."""
        return self._memory("MemTotal")

    @property
    def memory_available(self) -> int:
        """The kernel's MemAvailable: what can be had without swapping, page cache included."""
        return self._memory("MemAvailable")

    def _memory(self, name: str) -> int:
        try:
            return self.meminfo()[name]
        except KeyError:
            raise OSError(f"{self.path('proc/meminfo')} has no {name}; is /proc mounted?") from None

    @property
    def cgroup_available(self) -> int | None:
        """Bytes left in the tightest memory cgroup that this process is in, its cached file pages counted as free;
        None without a limit. Both cgroup versions; in a container the path may not exist below the mount point.
        """
        return min((limit - used for limit, used, _ in self._cgroups()), default=None)

    @property
    def cgroup_cached(self) -> int:
        """Bytes of file pages that are charged to the limited memory cgroups that this process is in."""
        return max((cached for *_, cached in self._cgroups()), default=0)

    @property
    def cgroup_limit(self) -> int | None:
        """The lowest limit of the memory cgroups that this process is in; None without one."""
        return min((limit for limit, *_ in self._cgroups()), default=None)

    @property
    def available(self) -> int:
        """Bytes that this process can still use, page cache included, before the machine or its cgroup runs short."""
        machine, group = self.memory_available, self.cgroup_available
        return max(0, machine if group is None else min(machine, group))

    def _cgroups(self) -> Iterator[tuple[int, int, int]]:
        """(limit, usage that cannot be reclaimed, file pages) of each limited cgroup above this process."""
        mount, total = self.path("sys/fs/cgroup"), self.memory_total
        for line in (self.text("proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "unknown", "")
            if not controllers:  # version 2
                root, names = mount, ("memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            else:
                continue
            here = root / path.lstrip("/")
            for folder in (here, *here.parents):
                if not folder.is_relative_to(root):
                    break
                found = _cgroup(folder, *names)
                if found is not None and found[0] < total:  # version 1 writes "no limit" as a number above all memory
                    yield found

    @property
    def memlock_limit(self) -> int | None:
        """The hard RLIMIT_MEMLOCK, up to which a process may raise its own; None: unlimited or unknown."""
        found = re.search(r"^Max locked memory\s+\S+\s+(\d+)", self.text("proc/self/limits") or "", re.M)
        return int(found[1]) if found else None

    # ---- kernel

    @property
    def kernel_release(self) -> str:
        """`uname -r`, "" where unknown."""
        return self.text("proc/sys/kernel/osrelease") or ""

    @property
    def cmdline(self) -> str:
        """The kernel's command line."""
        return self.text("proc/cmdline") or ""

    @property
    def product(self) -> str:
        """Maker and model from the firmware's tables, "" where hidden."""
        names = (self.text(f"{_DMI}/sys_vendor"), self.text(f"{_DMI}/product_name"))
        return " ".join(name for name in names if name)

    @property
    def kfd_limit(self) -> int | None:
        """Most bytes of system memory that KFD lets GPUs map, of all processes together; None: it is switched off."""
        if (self.text("sys/module/amdgpu/parameters/no_system_mem_limit") or "").upper() in ("Y", "1"):
            return None
        return kfd_limit(self.memory_total)

    @property
    def ttm_module(self) -> str:
        """The module that owns GTT's limits: "amdttm" with AMD's packaged driver (amdgpu-dkms), else "ttm"."""
        return "amdttm" if self.path("sys/module/amdttm").is_dir() else "ttm"

    @property
    def ttm_pages_limit(self) -> int | None:
        """ttm.pages_limit in pages of 4 KiB: the ceiling of all GPUs' GTT together."""
        return self.number(f"sys/module/{self.ttm_module}/parameters/pages_limit")

    # ---- GPUs

    @property
    def has_kfd(self) -> bool:
        """Whether /dev/kfd is there."""
        return self.path("dev/kfd").exists()

    def amd_gpus(self) -> tuple[AmdGpu, ...]:
        """AMD GPUs in the order of KFD's nodes, which is the runtime's."""
        nodes = self.path("sys/class/kfd/kfd/topology/nodes")
        try:
            folders = sorted((int(entry.name), entry) for entry in nodes.iterdir() if entry.name.isdigit())
        except OSError:
            return ()
        found = (self._gpu(number, folder) for number, folder in folders)
        return tuple(gpu for gpu in found if gpu is not None)

    def _gpu(self, number: int, folder: Path) -> AmdGpu | None:
        fields = _properties(folder / "properties")
        version = fields.get("gfx_target_version", 0)
        if not version:  # a CPU
            return None
        location, minor = fields.get("location_id"), fields.get("drm_render_minor", 0)
        pci = "" if location is None else _pci_name(fields.get("domain", 0), location)
        device = self._drm_device(pci, minor)
        simds = fields.get("simd_per_cu", 0)
        sizes: dict[str, int | None] = {}
        firmware: dict[str, int] = {}
        if device is not None:
            for name in ("vram_total", "vram_used", "gtt_total", "gtt_used"):
                sizes[name] = _number(device / f"mem_info_{name}")
            for file in sorted((device / "fw_version").glob("*_fw_version")):
                if (value := _number(file)) is not None:
                    firmware[file.name.removesuffix("_fw_version")] = value
        return AmdGpu(
            node=number,
            gfx=gfx_name(version),
            pci=pci,
            render_node=self.path(f"dev/dri/renderD{minor}") if minor else None,
            device=device,
            compute_units=fields.get("simd_count", 0) // simds if simds else 0,
            local_bytes=fields.get("local_mem_size", 0),
            firmware=firmware,
            **sizes,
        )

    def _drm_device(self, pci: str, minor: int) -> Path | None:
        """The GPU's folder in sysfs, by its PCI address, else by its render node, else as the only AMD card."""
        drm = self.path("sys/class/drm")
        cards = [card / "device" for card in sorted(drm.glob("card*")) if re.fullmatch(r"card\d+", card.name)]
        cards = [card for card in cards if _number(card / "vendor") in (AMD, None)]
        for card in cards:
            if pci and f"PCI_SLOT_NAME={pci}" in _lines(card / "uevent"):
                return card
        for card in cards:
            if minor and (card / "drm" / f"renderD{minor}").exists():
                return card
        render = drm / f"renderD{minor}" / "device"
        if minor and render.exists():
            return render
        return cards[0] if len(cards) == 1 else None

    # ---- users

    @property
    def groups(self) -> dict[int, str]:
        """Names of groups by their number, from /etc/group."""
        found = {}
        for line in (self.text("etc/group") or "").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split(":")[1:2]
            if number and number[0].isdigit():
                found[int(number[0])] = name
        return found


def kfd_limit(memory_total: int) -> int:
    """KFD's limit on system memory in bytes: RAM - RAM/64 - 1.5 GiB, or half where that leaves less than 1.5 GiB
    (amdgpu_amdkfd_gpuvm_init_mem_limits of Linux 6.12 to 7.x).
    """
    most, reserve = memory_total - (memory_total >> 6), 3 * GIB // 2
    return most // 2 if most < 2 * reserve else most - reserve


def gfx_name(version: int) -> str:
    """The target's name of KFD's gfx_target_version: 110501 -> "gfx1151"."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _pci_name(domain: int, location: int) -> str:
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 0)
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _properties(path: Path) -> dict[str, int]:
    """KFD's `name value` lines; what is no number is left out."""
    found = {}
    for line in _lines(path):
        name, _, value = line.strip().partition(" ")
        if value.strip().isdecimal():
            found[name] = int(value)
    return found


def _meminfo(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdecimal():
            yield name, int(value[0]) * (1024 if value[1:] == ["kB"] else 1)


def _cgroup(folder: Path, limit_name: str, usage_name: str, prefix: str) -> tuple[int, int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" when there is none
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        reclaimable = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    except (OSError, ValueError):
        return None
    return limit, usage - min(reclaimable, usage), reclaimable
