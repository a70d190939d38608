"""Readahead and locking: parallel, reported, interruptible, and modest about what does not fit."""

from __future__ import annotations

import ctypes
import errno
import io
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_double import NativeDouble

from apu_engine.errors import MappingError
from apu_engine.memory import mapping as module
from apu_engine.memory import progress
from apu_engine.memory.mapping import Mapping, Progress, mlock, prefetch
from apu_engine.memory.progress import ProgressPrinter, describe


class Libc:
    """Fails as told; counts calls."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> int:
            self.calls.append(name)
            code = self.codes.get(name, 0)
            ctypes.set_errno(code)
            return -1 if code else 0

        return call


@pytest.fixture
def mappings(native: NativeDouble, file: Path, tmp_path: Path) -> Iterator[list[Mapping]]:
    other = tmp_path / "second.gguf"
    other.write_bytes(file.read_bytes()[: 1 << 20])
    opened = [Mapping.open(file), Mapping.open(other)]
    yield opened
    for mapping in opened:
        mapping.close()


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 64 << 10)


def rss(path: Path) -> int:
    from apu_engine.memory.footprint import footprint

    return footprint(files=[path]).files[0].rss


@pytest.mark.usefixtures("slices")
def test_everything_is_read_and_reported(mappings: list[Mapping]) -> None:
    reports: list[Progress] = []
    outcome = prefetch(mappings, 3, reports.append)
    total = sum(mapping.nbytes for mapping in mappings)
    assert outcome.done_bytes == total and not outcome.notice
    assert rss(mappings[0].path) >= mappings[0].nbytes
    last = reports[-1]
    assert (last.stage, last.done_bytes, last.total_bytes) == ("readahead", total, total)
    assert last.gib_per_s > 0 and last.eta_s == 0
    assert [report.done_bytes for report in reports] == sorted(report.done_bytes for report in reports)


@pytest.mark.usefixtures("slices")
def test_an_old_kernel_reads_through_the_file(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Libc(madvise=errno.EINVAL)
    monkeypatch.setattr(module, "_libc", libc)
    assert prefetch(mappings).done_bytes == sum(mapping.nbytes for mapping in mappings)
    assert libc.calls.count("madvise") == 64 + 1  # 49 slices and 16 of the second file


@pytest.mark.usefixtures("slices")
def test_cancel(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = threading.Event()
    populate = Mapping.populate

    def slow(self: Mapping, offset: int, nbytes: int) -> None:
        cancel.set()
        cancelled.wait(5)
        populate(self, offset, nbytes)

    cancelled = threading.Event()
    monkeypatch.setattr(Mapping, "populate", slow)
    outcome = prefetch(mappings, 2, lambda _: cancelled.set() if cancel.is_set() else None, cancel)
    assert outcome.done_bytes <= 4 * module.SLICE
    assert "cancelled" in outcome.notice


@pytest.mark.usefixtures("slices")
def test_interrupt_ends_the_threads(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(Mapping, "populate", lambda self, offset, nbytes: release.wait(5))

    def interrupt(_: Progress) -> None:
        release.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefetch(mappings, 2, interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "readahead"]


def test_a_truncated_file_is_an_error_not_a_signal(mappings: list[Mapping], file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(MappingError, match=f"{file}: was truncated"):
        prefetch(mappings)


@pytest.mark.parametrize("code", [errno.EFAULT, 133])
def test_a_failing_disk(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(module, "_libc", Libc(madvise=code))
    with pytest.raises(MappingError, match=r"readahead of .* failed"):
        prefetch(mappings)


def test_larger_than_memory(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Libc(mincore=errno.EPERM)
    monkeypatch.setattr(module, "_libc", libc)
    monkeypatch.setattr(module, "memory_available", lambda: 2 << 20)
    outcome = prefetch(mappings)
    assert outcome.done_bytes == 0
    assert outcome.notice.startswith("no readahead: the weights (4.0 MiB) exceed the memory available (2 MiB)")
    assert mlock(mappings).notice.startswith("not locked: the weights (4.0 MiB) exceed")
    assert "madvise" not in libc.calls and "mlock" not in libc.calls


def test_resident_pages_are_no_new_demand(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have locked them: then they are not available, and need not be."""
    monkeypatch.setattr(module, "memory_available", lambda: 2 << 20)
    assert not prefetch(mappings).notice


def test_mlock(mappings: list[Mapping]) -> None:
    """4 MiB are under the usual limit."""
    outcome = mlock(mappings)
    assert outcome.done_bytes == sum(mapping.nbytes for mapping in mappings) and not outcome.notice
    locked = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    assert int(locked[0].split()[1]) >= 4096


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EPERM])
def test_mlock_refused(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "_libc", Libc(mlock=code))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 16, 8 << 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setenv("APU_SYSROOT", str(Path(__file__).parents[1] / "fixtures/machines/strix-halo-128-stock"))
    outcome = mlock(mappings)
    assert outcome.done_bytes == 0 and raised == [(8 << 20, 8 << 20)]
    assert "locked 0 of 4.0 MiB: the limit on locked memory is 8 MiB" in outcome.notice
    assert "'*  -  memlock  unlimited'" in outcome.notice and "/etc/security/limits.d/" in outcome.notice


def test_mlock_fails_otherwise(mappings: list[Mapping], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_libc", Libc(mlock=errno.ENOSYS))
    assert "mlock failed: Function not implemented" in mlock(mappings).notice


# ---------------------------------------------------------------- what a person sees


def report(done: int, eta: float | None = 23.4) -> Progress:
    return Progress("readahead", done, 80_800_000_000, 2.314, eta)


def test_lines() -> None:
    assert describe(report(27_500_000_000)) == "readahead 34% of 75.3 GiB, 2.31 GiB/s, 23 s left"
    assert describe(report(0, None)) == "readahead 0% of 75.3 GiB, 2.31 GiB/s"


def test_plain_lines() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream, interval=0) as printer:
        printer(report(0))
        printer(report(40_400_000_000))
        printer(report(80_800_000_000))
    assert stream.getvalue().splitlines() == [
        "readahead 0% of 75.3 GiB, 2.31 GiB/s, 23 s left",
        "readahead 50% of 75.3 GiB, 2.31 GiB/s, 23 s left",
        "readahead: 75.3 GiB, 2.31 GiB/s",
    ]


def test_a_quick_stage_is_one_line() -> None:
    stream = io.StringIO()
    with ProgressPrinter(stream) as printer:
        printer(report(0))
        printer(report(40_400_000_000))
        printer(report(80_800_000_000))
    assert stream.getvalue() == "readahead: 75.3 GiB, 2.31 GiB/s\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "_BAR_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressPrinter(stream) as printer:
        printer(report(40_400_000_000))
        printer(report(41_000_000_000))
        printer(report(80_800_000_000))
    assert "readahead 50% of 75.3 GiB" in stream.getvalue()
    assert stream.getvalue().endswith("readahead: 75.3 GiB, 2.31 GiB/s\n")


def test_rich_is_imported_only_for_a_bar() -> None:
    code = "import sys, apu_engine.memory.progress; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
