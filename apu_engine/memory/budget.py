"""How much memory this process may still use: the least of MemAvailable and every memory cgroup above it.

MemAvailable counts page cache as available, so a model that is cached already does not count against
itself; the same credit is given inside a cgroup, whose usage includes the file pages it has read.
"""

from __future__ import annotations

from apu_engine.memory.machine import Machine


def human_bytes(count: int) -> str:
    """Decimal units with three digits, as sizes of models are given: 98362432 -> "98.4 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def memory_available() -> int:
    """Bytes that can be used, page cache included, before the machine or this cgroup runs short."""
    return Machine().available
