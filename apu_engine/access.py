"""Who we are on which system, what of the GPU is open to us, and what helps where it is not.

A start and doctor ask the same: the distribution, the container, the GPU's nodes, how well a target is supported, and
how the runtime is installed or locked memory allowed. Everything comes from files below the machine's root, except for
rights, which only the running kernel knows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apu_engine.memory.machine import Machine

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


BUILT_FOR = ("gfx1151", "gfx1150", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1200", "gfx1201", "gfx90a")
SIMULATED = ("gfx1151", "gfx1150")


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


def host(machine: Machine) -> Distro:
    """The distribution whose kernel, boot loader and firmware these are."""
    return Distro.of_kernel(machine) if container(machine) else Distro.of(machine)


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


def container(machine: Machine) -> str:
    """Kind of container that this process runs in: docker, podman, lxc, ..., "container", or "" for none."""
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


# ---- the GPU


def tier(target: str) -> str:
    """As in the README's support table."""
    if target in SIMULATED:
        return "kernels simulated, not reported on AMD yet"
    if target in BUILT_FOR:
        return "kernels compiled, not run"
    return "kernels of the family, not run" if re.fullmatch(r"gfx1[12]\d[0-9a-f]", target) else "not supported"


class Node(NamedTuple):
    """A device node: what is to be said of it, its group ("" where it is absent), and what helps where it is closed."""

    value: str
    group: str
    remedy: tuple[str, ...]


def node(machine: Machine, rights: Rights, container: str, path: Path) -> Node:
    """Whether a node is there, and open to this user."""
    shown = machine.shown(path)
    if not path.exists():
        loaded = ("sudo modprobe amdgpu", "where that fails: sudo dmesg | grep -i -e amdgpu -e kfd")
        return Node(f"{shown} is absent", "", devices(container) if container else loaded)
    number = rights.owner(path)
    group = machine.groups.get(number, str(number))
    if rights.may_use(path):
        return Node(f"{shown}, group {group}", group, ())
    value = f"{shown}: {rights.user} may not open it; it belongs to group {group}"
    if container:
        return Node(value, group, devices(container, str(number)))
    if rights.user in _members(machine, group):
        return Node(value, group, (f"log out and in again: {rights.user} was put into group {group} after this login",))
    groups = "render,video" if group in ("render", "video") else group
    return Node(value, group, (f"sudo usermod -aG {groups} {rights.user}", "log out and in again"))


def _members(machine: Machine, group: str) -> list[str]:
    for line in (machine.text("etc/group") or "").splitlines():
        fields = line.split(":")
        if fields[0] == group and len(fields) == 4:
            return fields[3].split(",")
    return []


# ---- what helps


def devices(container: str, group: str = "") -> tuple[str, ...]:
    """Flags that give a container the GPU."""
    if container == "podman":
        return ("start the container with --device /dev/kfd --device /dev/dri --group-add keep-groups",)
    if container == "lxc":
        return (
            "on the host, in the container's configuration: lxc.mount.entry = /dev/kfd dev/kfd none bind,create=file",
            "and: lxc.mount.entry = /dev/dri dev/dri none bind,create=dir",
        )
    if container == "kubernetes":
        return ("request amd.com/gpu: 1 in the pod's resources (needs AMD's device plugin on the node)",)
    if not group:
        group = "$(getent group render | cut -d: -f3)"  # by number, which needs no entry in the container
    return (f"start the container with --device /dev/kfd --device /dev/dri --group-add {group}",)


def runtime(distro: Distro) -> tuple[str, ...]:
    """How AMD's HIP runtime is installed."""
    commands = {
        "ubuntu": "sudo apt install libamdhip64-dev",
        "debian": "sudo apt install libamdhip64-dev",
        "fedora": "sudo dnf install rocm-hip",
        "arch": "sudo pacman -S hip-runtime-amd",
        "suse": "install hip-runtime-amd from AMD's repository",
        "nixos": "in configuration.nix: hardware.amdgpu.opencl.enable = true; and rocmPackages.clr in systemPackages",
    }
    line = commands.get(distro.family, "install hip-runtime-amd of ROCm")
    return line, "or in this environment: pip install rocm-sdk-core"


def memlock(container: str, family: str) -> tuple[str, ...]:
    """Unlimited locked memory, as needed to keep file pages resident."""
    if container:
        flag = "--ulimit memlock=-1:-1"
        if container == "lxc":
            flag = "lxc.prlimit.memlock = unlimited (in the container's configuration)"
        return (f"start the container with {flag}",)
    if family == "nixos":
        entry = '{ domain = "*"; type = "-"; item = "memlock"; value = "unlimited"; }'
        return f"in configuration.nix: security.pam.loginLimits = [ {entry} ];", "sudo nixos-rebuild switch"
    return (
        "echo '*  -  memlock  unlimited' | sudo tee /etc/security/limits.d/99-memlock.conf",
        "log out and in again",
        "for a systemd service: LimitMEMLOCK=infinity in its [Service] section",
    )
