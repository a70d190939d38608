"""What the checks look at: the machine, its distribution and container, who we are, and what was asked.

Everything comes from files below the machine's root, except for rights and free disk space, which only the running
kernel knows; `Rights` (access.py) is the place where tests put another user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from apu_engine.access import Distro, Rights, container, host
from apu_engine.memory.machine import AmdGpu, Machine

if TYPE_CHECKING:
    from apu_engine.weights.model_file import ModelFile


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
        return container(self.machine)

    @cached_property
    def host(self) -> Distro:
        """The distribution whose kernel, boot loader and firmware these are."""
        return host(self.machine)

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
    """(path, bytes) of a model's files, without reading them: the file, or the GGUF files of a folder, or its
    safetensors.
    """
    if model is None:
        return []
    try:
        inside = sorted(model.glob("*.gguf")) or sorted(model.glob("*.safetensors"))
        paths = inside if model.is_dir() else [model]
        return [(path, path.stat().st_size) for path in paths if path.is_file()]
    except OSError:
        return []
