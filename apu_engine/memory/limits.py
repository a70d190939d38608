"""How many bytes a device can be given, and which limit says so.

File pages in place count against KFD's limit and MemAvailable, and need no kernel parameter. Device allocations of an
APU come from GTT, or from the carve-out where that is the larger one (the kernel's apu_prefer_gtt); the runtime's own
figure lies in some versions, so the least of all counts. GTT is not charged to a memory cgroup, file pages are. The
numbers are of this machine, of one below another root, or of a preset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from apu_engine.errors import ConfigError
from apu_engine.memory.machine import GIB, Machine, kfd_limit

if TYPE_CHECKING:
    from apu_engine._native import Device


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of one machine and device. None: there is no such limit, or it is not known."""

    name: str  # "this machine", or the preset's
    kind: str  # "cpu", "hip", "cuda"
    device: str  # "hip, AMD Radeon 8060S"; "gfx1151"
    memory_total: int
    memory_available: int
    unified: bool = True  # the device's memory is the machine's
    cgroup_available: int | None = None
    cgroup_cached: int = 0  # file pages charged to the cgroup
    unevictable: int = 0  # locked file pages of all processes, which MemAvailable leaves out
    kfd_limit: int | None = None
    gtt_total: int | None = None
    gtt_used: int = 0
    vram_total: int = 0
    vram_used: int = 0
    driver_free: int | None = None
    driver_total: int | None = None
    ttm_module: str = "ttm"

    @property
    def headroom(self) -> int:
        """Part of MemAvailable that is left alone: what a GPU maps cannot be reclaimed."""
        return self.memory_total // 64

    @property
    def carve_out(self) -> bool:
        """Whether an APU allocates from its carve-out: only where that is at least as large as GTT."""
        return self.unified and self.gtt_total is not None and self.vram_total >= self.gtt_total

    @property
    def shares_memory(self) -> bool:
        """Whether device allocations take memory of the machine."""
        return self.kind != "cpu" and self.unified and not self.carve_out

    @property
    def allocatable(self) -> tuple[tuple[str, int], ...]:
        """(what it is, bytes) of each limit on device allocations but MemAvailable."""
        found: list[tuple[str, int]] = []
        if self.carve_out or not self.unified:
            if self.vram_total:
                name = "carve-out" if self.unified else "device memory"
                found.append((f"free {name}", max(0, self.vram_total - self.vram_used)))
        elif self.gtt_total is not None:
            found.append(("free GTT", max(0, self.gtt_total - self.gtt_used)))
        if self.driver_free is not None and not self.driver_lies:
            found.append(("what the runtime reports as free", self.driver_free))
        return tuple(found)

    @property
    def driver_lies(self) -> bool:
        """Whether the runtime reports more free memory than it has in all."""
        free, total = self.driver_free, self.driver_total
        return free is not None and bool(total) and free > (total or 0)


def of_machine(machine: Machine | None = None, device: Device | None = None) -> Limits:
    """The limits of an open device, or, without one, of the machine's first AMD GPU as sysfs shows it, else its CPU."""
    machine = machine or Machine()
    gpus = machine.amd_gpus()
    meminfo = machine.meminfo()
    kind = device.props.kind if device is not None else "hip" if gpus else "cpu"
    gpu = gpus[0] if gpus and kind == "hip" else None
    name, free, total, unified = "cpu", None, None, True
    if device is not None and kind != "cpu":
        name = f"{kind}, {device.props.name}"
        unified = device.props.integrated
        free, total = device.free_memory(), device.props.memory_bytes
        gpu = next((item for item in gpus if item.gfx == device.props.arch), None) if kind == "hip" else None
    elif gpu is not None:
        name, unified = f"hip, {gpu.gfx}", gpu.integrated
    return Limits(
        name="this machine" if machine.real else machine.root.name,
        kind=kind,
        device=name,
        memory_total=machine.memory_total,
        memory_available=machine.memory_available,
        unified=unified,
        cgroup_available=machine.cgroup_available,
        cgroup_cached=machine.cgroup_cached,
        unevictable=min(meminfo.get("Unevictable", 0), meminfo.get("Mlocked", 0)),
        kfd_limit=machine.kfd_limit if kind == "hip" else None,
        gtt_total=gpu.gtt_total if gpu else None,
        gtt_used=(gpu.gtt_used or 0) if gpu else 0,
        vram_total=(gpu.vram_total or 0) if gpu else 0,
        vram_used=(gpu.vram_used or 0) if gpu else 0,
        driver_free=free,
        driver_total=total,
        ttm_module=machine.ttm_module,
    )


# target, RAM in GiB, GTT in GiB (None: as installed, half of the memory)
_PRESETS: dict[str, tuple[str, int, int | None]] = {
    "strix-halo-128": ("gfx1151", 128, None),
    "strix-halo-128-tuned": ("gfx1151", 128, 120),
    "strix-halo-96": ("gfx1151", 96, None),
    "strix-halo-64": ("gfx1151", 64, None),
    "strix-halo-32": ("gfx1151", 32, None),
    "strix-point-64": ("gfx1150", 64, None),
    "strix-point-32": ("gfx1150", 32, None),
}
PRESETS = tuple(_PRESETS)


def preset(name: str) -> Limits:
    """A typical machine: 512 MiB of carve-out, 98.4% of the rest managed by Linux, 4 GiB in use by others, GTT empty.

    Raises ConfigError for an unknown name.
    """
    if name not in _PRESETS:
        raise ConfigError(f"--machine {name}: expected one of {', '.join(PRESETS)}", "machine")
    gfx, ram, gtt = _PRESETS[name]
    total = (ram * GIB - GIB // 2) * 63 // 64
    return Limits(
        name=name,
        kind="hip",
        device=f"hip, {gfx}",
        memory_total=total,
        memory_available=total - 4 * GIB,
        kfd_limit=kfd_limit(total),
        gtt_total=total // 2 if gtt is None else gtt * GIB,
        vram_total=GIB // 2,
    )
