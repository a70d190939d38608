"""Memory available: MemAvailable and every cgroup above this process, on both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from apu_engine.memory.budget import human_bytes, memory_available

GIB = 1 << 30


def machine(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> tuple[Path, Path]:
    """A fake /proc with 16 of 32 GiB available, and a fake /sys/fs/cgroup."""
    proc, sys = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    if cgroup:
        (proc / "self/cgroup").write_text(cgroup)
    for folder, files in groups.items():
        (sys / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (sys / folder / name).write_text(content)
    return proc, sys


def v2(limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {cache}\nactive_file 0\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}


def v1(limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": f"cache 1\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}\n",
    }


CASES = {
    "no cgroups": ("", {}, 16 * GIB),
    "unlimited": ("0::/a\n", {"a": v2("max", 1)}, 16 * GIB),
    "v2 limit": ("0::/a/b\n", {"a/b": v2(str(8 * GIB), 3 * GIB)}, 5 * GIB),
    "v2 limit of a parent": ("0::/a/b\n", {"a": v2(str(4 * GIB), 3 * GIB), "a/b": v2("max", 1)}, GIB),
    "v2 limit above MemAvailable": ("0::/a\n", {"a": v2(str(30 * GIB), GIB)}, 16 * GIB),
    "v2 cached pages count as available": ("0::/a\n", {"a": v2(str(8 * GIB), 7 * GIB, 6 * GIB)}, 7 * GIB),
    "v2 in a container": ("0::/\n", {"": v2(str(2 * GIB), GIB)}, GIB),
    "v2 over its limit": ("0::/a\n", {"a": v2(str(GIB), 2 * GIB)}, 0),
    "v1 limit": ("5:cpu:/a\n4:memory:/a\n", {"memory/a": v1(8 * GIB, 3 * GIB)}, 5 * GIB),
    "v1 cached pages": ("4:memory:/a\n", {"memory/a": v1(8 * GIB, 8 * GIB, 5 * GIB)}, 5 * GIB),
    "v1 path of the host, seen in a container": ("4:cpuset,memory:/docker/x\n", {"memory": v1(2 * GIB, GIB)}, GIB),
    "v1 no limit": ("4:memory:/\n", {"memory": v1(9223372036854771712, GIB)}, 16 * GIB),
}


@pytest.mark.parametrize("name", CASES)
def test_available(name: str, tmp_path: Path) -> None:
    cgroup, groups, expected = CASES[name]
    assert memory_available(*machine(tmp_path, cgroup, groups)) == expected


def test_this_machine() -> None:
    assert memory_available() > 0


def test_no_meminfo_line(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(OSError, match="has no MemAvailable"):
        memory_available(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98.4 MB"),
        (184_000_000, "184 MB"),
        (999_499_999, "999 MB"),
        (999_600_000, "1 GB"),
        (86_720_000_000, "86.7 GB"),
        (1_234_567_890_123, "1.23 TB"),
        (-8_388_608, "-8.39 MB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
