"""Which device runs the model, and why: hip where it is usable, else cpu."""

from __future__ import annotations

import os
from pathlib import Path

from apu_engine.errors import ConfigError

_KFD = Path("/dev/kfd")
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def pick_device(request: str = "auto") -> tuple[str, str]:
    """(device, reason) for "auto", "cpu" or "hip[:N]".

    Raises ConfigError when the request names a device that this build or machine cannot offer.
    """
    kind = request.partition(":")[0]
    if kind == "cpu":
        return "cpu", "as asked"
    gpu = amd_gpu()
    missing = "this build has no GPU backend yet"
    if kind == "auto":
        if gpu is None:
            return (
                "cpu",
                "no AMD GPU: /dev/kfd is absent" if not _KFD.exists() else "no AMD GPU in /sys/class/kfd",
            )
        return "cpu", f"{gpu} is present, but {missing}"
    if kind in ("hip", "cuda"):
        raise ConfigError(f"--device {request}: {missing}; use --device cpu or auto")
    raise ConfigError(f"--device {request}: expected auto, cpu or hip[:N]")


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
            rights = "" if os.access(_KFD, os.R_OK | os.W_OK) else " (no access to /dev/kfd: join group render)"
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}{rights}"
    return None
