"""Which device runs the model, and why: hip where it is usable, else cpu.

"auto" asks the HIP runtime only where the kernel shows an AMD GPU, so that other machines load no library. A GPU that
is there but cannot be used is never passed over in silence: the reason says what is missing and how to get it.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apu_engine.errors import ConfigError

if TYPE_CHECKING:
    from apu_engine._native import Device

_KFD = Path("/dev/kfd")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_REQUEST = re.compile(r"(auto|cpu|hip|cuda)(?::(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Choice:
    """A device and why it was chosen."""

    kind: str
    index: int
    reason: str

    @property
    def name(self) -> str:
        """As --device takes it: "cpu", "hip:0"."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def open_device(
    request: str = "auto",
    *,
    kernels: str | None = None,
    threads: int = 0,
    isa: str = "auto",
    pin: bool = False,
) -> tuple[Device, Choice]:
    """The open device for "auto", "cpu", "hip[:N]" or "cuda[:N]". `kernels` is a GPU's, the other options the cpu's.

    Raises ConfigError when the request names a device that this build or machine cannot offer.
    """
    device, choice = _find(request, kernels)
    if device is None:
        from apu_engine import _native

        device = _native.Device("cpu", threads=threads, isa=isa, pin=pin)
    return device, choice


def pick_device(request: str = "auto", kernels: str | None = None) -> Choice:
    """What `open_device` would open; a GPU is opened for that, and closed again."""
    device, choice = _find(request, kernels)
    if device is not None:
        device.close()
    return choice


def _find(request: str, kernels: str | None) -> tuple[Device | None, Choice]:
    """An open GPU, or None for the cpu."""
    match = _REQUEST.fullmatch(request)
    if match is None or (match[2] is not None and match[1] in ("auto", "cpu")):
        raise ConfigError(f"--device {request}: expected auto, cpu, hip[:N] or cuda[:N]", "device")
    kind, index = match[1], int(match[2] or 0)
    if kind == "cpu":
        return None, Choice("cpu", 0, "as asked")
    if kind == "auto":
        return _find_any(kernels)
    device, problem = _open(kind, index, kernels)
    if device is None:
        hint = _rights() if kind == "hip" else ""
        raise ConfigError(f"--device {request}: {problem}{hint and '; ' + hint}", "device")
    return device, Choice(kind, index, "as asked")


def _find_any(kernels: str | None) -> tuple[Device | None, Choice]:
    gpu = amd_gpu()
    if gpu is None:
        absent = "/dev/kfd is absent" if not _KFD.exists() else "none in /sys/class/kfd"
        return None, Choice("cpu", 0, f"no AMD GPU: {absent}")
    device, problem = (None, rights) if (rights := _rights()) else _open("hip", 0, kernels)
    if device is None:
        return None, Choice("cpu", 0, f"{gpu} is present, but {problem}")
    return device, Choice("hip", 0, "the first GPU that the runtime shows")


def _open(kind: str, index: int, kernels: str | None) -> tuple[Device | None, str]:
    """The device, or what keeps it from being used."""
    from apu_engine import _native

    if kind == "hip":
        _load_wheel()
    try:
        return _native.Device(kind, index, kernels=kernels), ""
    except (_native.UnsupportedError, _native.DeviceError) as error:
        return None, re.sub(r"^device (hip|cuda): ", "", str(error))


def _load_wheel() -> None:
    """Loads the runtime of ROCm's Python packages, where they are installed: the dynamic linker does not look there,
    but finds a library by its versioned name once it is loaded.
    """
    package = importlib.util.find_spec("_rocm_sdk_core")
    for folder in (package.submodule_search_locations or []) if package else []:
        for library in sorted(Path(folder, "lib").glob("libamdhip64.so.*"), reverse=True):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))
                return


def amd_gpu() -> str | None:
    """The first AMD GPU's target name, such as gfx1151, from the kernel's topology; None without one."""
    if not _KFD.exists() or not _NODES.is_dir():
        return None
    for node in sorted(_NODES.iterdir(), key=lambda p: p.name):
        try:
            fields = dict(line.split() for line in (node / "properties").read_text().splitlines() if line.strip())
            version = int(fields.get("gfx_target_version", "0"))
        except (OSError, ValueError):
            continue
        if version:
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return None


def _rights() -> str:
    """What keeps this user from the GPU; "" where nothing does or there is none."""
    if not _KFD.exists() or os.access(_KFD, os.R_OK | os.W_OK):
        return ""
    owner = _KFD.stat().st_gid
    try:
        group = grp.getgrgid(owner).gr_name
    except KeyError:
        group = str(owner)
    return (
        f"this user may not open {_KFD}, which belongs to group {group}: "
        f"`sudo usermod -aG {group} $USER`, then log in again (in a container: --group-add {group})"
    )
