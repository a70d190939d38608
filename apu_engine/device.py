"""Which device runs the model, and why: hip where there is an AMD GPU with kernels for it, else cpu.

"auto" asks the HIP runtime only where the kernel shows an AMD GPU, so that other machines load no library. A GPU that
is there but cannot be used is never passed over for the CPU: GpuError says what is missing and how to get it, and
`--device cpu` goes on without. Which copy of the runtime is opened is runtime.py's choice, and part of the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apu_engine.access import Distro, Rights, container, node, tier
from apu_engine.access import runtime as package
from apu_engine.config import hip_library_wanted
from apu_engine.errors import ConfigError, GpuError
from apu_engine.memory.machine import AmdGpu, Machine

if TYPE_CHECKING:
    from apu_engine._native import Device
    from apu_engine.runtime import Chosen

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

    Raises ConfigError when the request is no device's name, GpuError when it names one that this build or machine
    cannot offer, or "auto" finds an AMD GPU that cannot be used.
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


def kind_and_index(request: str) -> tuple[str, int]:
    """("hip", 1) for "hip:1", ("auto", 0) for "auto". Raises ConfigError for what is no device's name."""
    match = _REQUEST.fullmatch(request)
    if match is None or (match[2] is not None and match[1] in ("auto", "cpu")):
        raise ConfigError(f"--device {request}: expected auto, cpu, hip[:N] or cuda[:N]", "device")
    return match[1], int(match[2] or 0)


def _find(request: str, kernels: str | None) -> tuple[Device | None, Choice]:
    """An open GPU, or None for the cpu."""
    kind, index = kind_and_index(request)
    if kind == "cpu":
        return None, Choice("cpu", 0, "as asked")
    if kind == "auto":
        return _find_any(kernels)
    machine = Machine()
    gpus = machine.amd_gpus() if kind == "hip" else ()
    gpu = gpus[index] if index < len(gpus) else None
    device, problem, runtime = _open(kind, index, kernels, gpu, machine)
    if device is None:
        hint = _what_helps(machine, gpu, runtime) if gpu is not None else ""
        raise GpuError(f"--device {request}: {problem}{hint and '; ' + hint}")
    return device, Choice(kind, index, f"as asked{_with(runtime)}")


def _find_any(kernels: str | None) -> tuple[Device | None, Choice]:
    machine = Machine()
    gpus = machine.amd_gpus()
    if not gpus:
        absent = "none in /sys/class/kfd" if machine.has_kfd else "/dev/kfd is absent"
        return None, Choice("cpu", 0, f"no AMD GPU: {absent}")
    gpu = next((gpu for gpu in gpus if tier(gpu.gfx) != "not supported"), None)
    if gpu is None:
        return None, Choice("cpu", 0, f"{gpus[0].gfx} is present, but there are no kernels for it")
    problem, runtime = _locked_out(machine, gpu), None
    if not problem:
        device, problem, runtime = _open("hip", 0, kernels, gpu, machine)
        if device is not None:
            return device, Choice("hip", 0, f"the first GPU that the runtime shows{_with(runtime)}")
        hint = _what_helps(machine, gpu, runtime)
        problem += f"; {hint}" if hint else ""
    raise GpuError(f"{gpu.gfx} is present, but {problem}; or go on without it: --device cpu")


def _open(
    kind: str, index: int, kernels: str | None, gpu: AmdGpu | None, machine: Machine
) -> tuple[Device | None, str, Chosen | None]:
    """The device, or what keeps it from being used, and the copy of the runtime that was tried."""
    from apu_engine import _native
    from apu_engine.runtime import choose

    runtime = choose(gpu.gfx if gpu is not None else None, machine) if kind == "hip" else None
    library = runtime.copy.path if runtime is not None else None
    try:
        return _native.Device(kind, index, kernels=kernels, runtime=library), "", runtime
    except (_native.UnsupportedError, _native.DeviceError) as error:
        problem = re.sub(r"^device (hip|cuda): ", "", str(error))
    if kind == "hip" and (named := hip_library_wanted()) and named in problem:
        problem += "; APU_HIP_LIBRARY names that file: correct or unset it"
    if runtime is not None:
        problem += "".join(f"; {copy.path}: {why}" for copy, why in runtime.refused)
    return None, problem, runtime


def _with(runtime: Chosen | None) -> str:
    return "" if runtime is None else f", with {runtime}"


def _locked_out(machine: Machine, gpu: AmdGpu) -> str:
    """Which of the GPU's devices is absent or closed to this user, and the remedy; "" where none is."""
    for path in (machine.path("dev/kfd"), gpu.render_node):
        if path is not None and (found := node(machine, Rights(), container(machine), path)).remedy:
            return f"{found.value}: {', then '.join(found.remedy)}"
    return ""


def _what_helps(machine: Machine, gpu: AmdGpu, runtime: Chosen | None) -> str:
    """Rights that are missing, or the package of a runtime that is not there."""
    locked = _locked_out(machine, gpu)
    if locked or runtime is not None:
        return locked
    return ", ".join(package(Distro.of(machine)))
