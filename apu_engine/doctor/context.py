"""What the checks look at: the machine, its distribution and container, who we are, and what was asked.

Everything comes from files below the machine's root, except for rights and free disk space, which only the running
kernel knows; `Rights` is the place where tests put another user.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from apu_engine.memory.machine import AmdGpu, Machine

if TYPE_CHECKING:
    from apu_engine.weights.model_file import ModelFile

_FAMILIES = {
    "ubuntu": "ubuntu",
    "debian": "debian",
    "fedora": "fedora",
    "rhel": "fedora",
    "centos": "fedora",
    "arch": "arch",
    "suse": "suse",
    "opensuse": "suse",
    "nixos": "nixos",
}
_KERNEL_MAKERS = (  # /proc/version names who built the kernel: in a container, that is the host
    (r"\bubuntu\b", "ubuntu"),
    (r"\bdebian\b|-pve\b", "debian"),
    (r"\.fc\d+\.|\.el\d+|red hat", "fedora"),
    (r"-arch\d|archlinux|cachyos", "arch"),
    (r"\bsuse\b", "suse"),
    (r"\bnixos?\b|nixbld", "nixos"),
)


@dataclass(frozen=True, slots=True)
class Distro:
    """A distribution: `family` is debian, ubuntu, fedora, arch, suse, nixos or "" for any other."""

    family: str
    name: str
    codename: str = ""

    @classmethod
    def of(cls, machine: Machine) -> Distro:
        """From /etc/os-release, by ID and then ID_LIKE."""
        fields: dict[str, str] = {}
        for line in (machine.text("etc/os-release") or "").splitlines():
            key, _, value = line.partition("=")
            fields[key.strip()] = value.strip().strip("\"'")
        names = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
        family = next((_FAMILIES[n.split("-")[0]] for n in names if n.split("-")[0] in _FAMILIES), "")
        return cls(family, fields.get("PRETTY_NAME") or fields.get("ID", ""), fields.get("VERSION_CODENAME", ""))

    @classmethod
    def of_kernel(cls, machine: Machine) -> Distro:
        """Of the kernel's maker, from /proc/version."""
        text = f"{machine.text('proc/version') or ''} {machine.kernel_release}".lower()
        family = next((family for pattern, family in _KERNEL_MAKERS if re.search(pattern, text)), "")
        return cls(family, family)


class Rights:
    """What this process may open, and who it is."""

    def may_use(self, path: Path) -> bool:
        """Whether `path` can be opened for reading and writing."""
        return os.access(path, os.R_OK | os.W_OK)

    def owner(self, path: Path) -> int:
        """Number of the group that `path` belongs to. Raises OSError."""
        return path.stat().st_gid

    @property
    def user(self) -> str:
        """Login name, or the number of a nameless user."""
        import pwd

        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return str(os.geteuid())


@dataclass(slots=True)
class Request:
    """What was asked of doctor."""

    model: Path | None = None
    folder: Path = field(default_factory=Path.cwd)  # where models lie: that of `model`, else of the catalog
    device: str = "auto"
    kernels: Path | None = None  # folder of code objects
    full: bool = False
    quick: bool = False  # of a start: what looks into the model is left out
    deadline_s: float = 5.0  # for looking through all processes


class Context:
    """One look at a machine. Values that several checks need are read once."""

    def __init__(self, machine: Machine, request: Request, rights: Rights | None = None) -> None:
        self.machine = machine
        self.request = request
        self.rights = rights or Rights()

    @cached_property
    def distro(self) -> Distro:
        return Distro.of(self.machine)

    @cached_property
    def container(self) -> str:
        """Kind of container that this process runs in: docker, podman, lxc, ..., "container", or "" for none."""
        return _container(self.machine)

    @cached_property
    def host(self) -> Distro:
        """The distribution whose kernel, boot loader and firmware these are."""
        return Distro.of_kernel(self.machine) if self.container else self.distro

    @cached_property
    def on_host(self) -> str:
        """Begins a remedy that has to be done outside of the container."""
        return "on the host: " if self.container else ""

    @cached_property
    def wanted(self) -> bool:
        """Whether an AMD GPU may be used at all."""
        return self.request.device.partition(":")[0] in ("auto", "hip")

    @cached_property
    def gpus(self) -> tuple[AmdGpu, ...]:
        """The AMD GPUs; none with a --device of another kind."""
        return self.machine.amd_gpus() if self.wanted else ()

    @cached_property
    def gpu(self) -> AmdGpu | None:
        """The GPU that is meant: that of `--device hip:N`, else the first."""
        index = re.fullmatch(r"hip:(\d{1,4})", self.request.device)
        number = int(index[1]) if index else 0
        return self.gpus[number] if number < len(self.gpus) else None

    @cached_property
    def no_gpu(self) -> str:
        """Why the GPU's checks are absent."""
        if not self.wanted:
            return f"not used with --device {self.request.device}"
        return "no AMD GPU" if not self.gpus else f"no GPU {self.request.device} among {len(self.gpus)}"

    @cached_property
    def strix(self) -> bool:
        """Whether the GPU is one that the advice on kernel and firmware was written for."""
        return any(gpu.gfx.startswith("gfx115") for gpu in self.gpus)

    @cached_property
    def kernel(self) -> tuple[int, int, int]:
        """Version of the kernel; zeros where unknown."""
        found = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", self.machine.kernel_release)
        return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)

    @cached_property
    def parameters(self) -> dict[str, str]:
        """The kernel's command line: name -> value, "" for a switch; of a repeated name the last."""
        words = self.machine.cmdline.split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    @cached_property
    def opened(self) -> ModelFile | str:
        """The model's header, or why there is none."""
        if self.request.model is None:
            return "none was named"
        if self.request.quick:
            return "not looked at"
        from apu_engine.errors import ApuError
        from apu_engine.weights.opening import open_model

        try:
            return open_model(self.request.model)
        except (ApuError, OSError) as error:
            return str(error).partition("\n")[0]

    @cached_property
    def model_bytes(self) -> int:
        """Size of the model's files; 0 when none was named or it cannot be read."""
        files = model_files(self.request.model)
        return sum(size for _, size in files)


def model_files(model: Path | None) -> list[tuple[Path, int]]:
    """(path, bytes) of a model's files, without reading them: the file, or the GGUF files of a folder."""
    if model is None:
        return []
    try:
        paths = sorted(model.glob("*.gguf")) if model.is_dir() else [model]
        return [(path, path.stat().st_size) for path in paths if path.is_file()]
    except OSError:
        return []


def _container(machine: Machine) -> str:
    if machine.path(".dockerenv").exists():
        return "docker"
    if machine.path("run/.containerenv").exists():
        return "podman"
    if named := machine.text("run/systemd/container"):
        return named.split()[0][:40]
    if machine.path("run/secrets/kubernetes.io").exists():
        return "kubernetes"
    try:
        found = re.search(rb"(?:^|\0)container=([\w.-]+)", machine.path("proc/1/environ").read_bytes())
    except OSError:
        found = None
    if found:
        return found[1].decode()[:40]
    root = next((mount for mount in mounts(machine) if mount.point == "/"), None)
    return "container" if root is not None and root.kind == "overlay" else ""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str  # "ext4"
    source: str  # "/dev/nvme0n1p2"
    options: str


def mounts(machine: Machine) -> list[Mount]:
    """All mounts in the order in which they were made; a line that cannot be read is left out."""
    found = []
    for line in (machine.text("proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        first, last = left.split(), right.split()
        if len(first) >= 6 and len(last) >= 2:
            point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8) & 0xFF), first[4])
            found.append(Mount(point, last[0], last[1], f"{first[5]},{last[2] if len(last) > 2 else ''}"))
    return found


def mount_of(machine: Machine, folder: Path) -> Mount | None:
    """The mount that `folder`, an absolute path, lies on; the last one of a point hides those before it."""
    best: Mount | None = None
    for mount in mounts(machine):
        inside = mount.point == "/" or folder == Path(mount.point) or Path(mount.point) in folder.parents
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best
