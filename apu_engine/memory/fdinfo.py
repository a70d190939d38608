"""Processes, and what DRM drivers say of each in /proc/PID/fdinfo: one descriptor of a GPU's file, `drm-` fields.

Fields are those of the kernel's Documentation/gpu/drm-usage-stats.rst. Many processes are looked at in one go, at a
start too, so folders are read without an object for each name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def pids(folder: Path) -> list[int]:
    """The entries of a folder such as /proc that are numbers; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [int(entry.name) for entry in entries if entry.name.isascii() and entry.name.isdigit()]
    except OSError:
        return []


def drm_files(process: Path) -> Iterator[dict[str, str]]:
    """Fields of each open DRM file of `process`, such as /proc/1, in the order of descriptors. Without a drm-client-id
    of the driver's each file is a client of its own.

    Raises PermissionError where the process may not be looked at; of one that ended, nothing more comes.
    """
    try:
        with os.scandir(process / "fd") as entries:
            numbers = [entry.name for entry in entries if _is_drm(entry.path)]
    except PermissionError:
        raise
    except OSError:
        return
    for number in sorted(numbers, key=lambda name: (len(name), name)):
        try:
            text = (process / "fdinfo" / number).read_text(errors="replace")
        except PermissionError:
            raise
        except OSError:  # that file was closed
            continue
        if fields := dict(re.findall(r"^(drm-[\w-]+):\s*(.*?)\s*$", text, re.M)):
            fields.setdefault("drm-client-id", f"{process.name}/{number}")
            yield fields


def size(text: str) -> int | None:
    """A field's `1048576 KiB` in bytes; None for what is no size."""
    match = re.fullmatch(r"(\d{1,18})\s*(\w*)", text)
    return int(match[1]) * _UNITS.get(match[2], 0) if match else None


def _is_drm(descriptor: str) -> bool:
    try:
        return os.readlink(descriptor).startswith("/dev/dri/")  # noqa: PTH115 (a Path for each takes three times as long)
    except PermissionError:
        raise
    except OSError:  # it was closed
        return False
