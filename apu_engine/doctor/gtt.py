"""Who holds GTT: the sum over processes of what DRM's fdinfo and KFD say, to find what nobody holds.

A process that died in a GPU call can leave its memory allocated until the next boot. Other users' descriptors cannot
be read; for their compute processes KFD's counters can, which are used instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from apu_engine.memory.fdinfo import drm_files, pids, size
from apu_engine.memory.machine import Machine


@dataclass(frozen=True, slots=True)
class User:
    """A process and the bytes of GTT that it holds."""

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Users:
    """Processes by bytes, most first. `hidden` counts those that could not be looked at."""

    found: tuple[User, ...]
    hidden: int
    finished: bool

    @property
    def complete(self) -> bool:
        return self.finished and not self.hidden


def users(machine: Machine, pci: str, gpu_id: int | None, deadline_s: float) -> Users:
    """Processes that hold GTT of the GPU at `pci` ("" for any), KFD's `gpu_id`, found within `deadline_s` seconds."""
    end = time.monotonic() + deadline_s
    proc = machine.path("proc")
    compute = _compute(machine, gpu_id)
    found: list[User] = []
    hidden = 0
    seen: set[str] = set()  # clients: a descriptor that was handed on counts once
    for pid in [*sorted(compute), *sorted(set(pids(proc)) - compute.keys())]:  # the likely ones first
        if time.monotonic() > end:
            return Users(tuple(found), hidden, False)
        held = _held(proc / str(pid), pci, seen)
        if held is None:
            held = compute.get(pid, 0)
            hidden += not held and not _is_kernel_thread(proc / str(pid))
        if held:
            found.append(User(pid, _name(proc / str(pid)), held))
    return Users(tuple(sorted(found, key=lambda user: -user.bytes)), hidden, True)


def _held(process: Path, pci: str, seen: set[str]) -> int | None:
    """Bytes of GTT by the process's open DRM files; None where they may not be looked at."""
    total = 0
    try:
        for fields in drm_files(process):
            if pci and fields.get("drm-pdev", pci) != pci:
                continue
            if (client := fields["drm-client-id"]) not in seen:
                seen.add(client)
                total += size(fields.get("drm-memory-gtt", "0")) or 0
    except PermissionError:
        return None
    return total


def _is_kernel_thread(process: Path) -> bool:
    """Those have no command line, which everyone may read, and no files."""
    try:
        return not (process / "cmdline").read_bytes()
    except OSError:
        return False


def _compute(machine: Machine, gpu_id: int | None) -> dict[int, int]:
    """PID -> bytes that KFD counts for each live compute process: on an APU they are GTT."""
    folder = machine.path("sys/class/kfd/kfd/proc")
    return {pid: machine.number(f"sys/class/kfd/kfd/proc/{pid}/vram_{gpu_id}") or 0 for pid in pids(folder)}


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text(errors="replace").strip()[:40] or "?"
    except OSError:
        return "?"
