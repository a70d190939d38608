"""How much memory this process may still use: the least of MemAvailable and every memory cgroup above it.

MemAvailable counts page cache as available, so a model that is cached already does not count against
itself; the same credit is given inside a cgroup, whose usage includes the file pages it has read. Both
cgroup versions and containers, where the path in /proc/self/cgroup may not exist below the mount point, are
handled.
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def human_bytes(count: int) -> str:
    """Decimal units with three digits, as sizes of models are given: 98362432 -> "98.4 MB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def memory_available(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be used, page cache included, before the machine or this cgroup runs short."""
    return max(0, min([_mem_available(proc), *_cgroup_headroom(proc, cgroup)]))


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{proc / 'meminfo'} has no MemAvailable; is /proc mounted?")


def _cgroup_headroom(proc: Path, cgroup: Path) -> list[int]:
    """Limit minus usage plus reclaimable file pages, for each limited cgroup this process is in."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            names = ("memory.max", "memory.current", "")
            root = cgroup
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            root = cgroup / "memory"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in [here, *here.parents]:
            if not folder.is_relative_to(root):
                break
            found += _headroom(folder, *names)
    return found


def _headroom(folder: Path, limit_name: str, usage_name: str, prefix: str) -> list[int]:
    try:
        limit = int((folder / limit_name).read_text())  # "max" when there is none
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    reclaimable = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    return [limit - usage + min(reclaimable, usage)]
