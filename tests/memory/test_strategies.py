"""Registered, direct and staged over a device double: what is given to the device, checked, and left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_double import Memory

from apu_engine._native import DeviceError, OutOfMemoryError
from apu_engine.errors import LoadCancelled, MappingError
from apu_engine.memory import strategies
from apu_engine.memory.mapping import Progress
from apu_engine.memory.placement import PAGE
from apu_engine.memory.strategies import Job, Refused, open_weights
from apu_engine.memory.verify import anonymous_bytes, anonymous_in, checksum
from apu_engine.weights.model_file import TensorRef

SIZES = ((3 << 20) + 77, (1 << 20) + 5)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(3)
    out = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path, size in zip(out, SIZES, strict=True):
        path.write_bytes(rng.bytes(size))
    return out


REFS = [
    TensorRef("first", 0, (500, 100), 0, 96, 200_000),
    TensorRef("second", 0, (700, 1000), 0, 200_096, 2_800_000),
    TensorRef("third", 0, (100, 1000), 1, 32, 400_000),
]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory()
    yield memory
    assert not memory.regions and not memory.stagers


def job(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Job:
    return Job(memory.install(monkeypatch), files, SIZES, REFS, **options)


def read(memory: Memory, weights: Any, ref: TensorRef) -> bytes:
    """A tensor's bytes as the device sees them."""
    import ctypes

    out = b""
    for segment in weights.segments(ref):
        region = memory.find(segment.address)
        host = segment.address - region.device + region.host
        out += ctypes.string_at(host, segment.row_count * segment.row_stride)
    return out


@pytest.mark.parametrize("shift", [0, 1 << 32])
@pytest.mark.parametrize(("strategy", "way"), [("registered", "svm"), ("registered", "register"), ("staged", None)])
@pytest.mark.parametrize("limit", [1 << 30, 5 << 16])
def test_tensors_are_the_files(
    memory: Memory,
    files: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    way: str | None,
    limit: int,
    shift: int,
) -> None:
    memory.shift = shift
    monkeypatch.setattr(strategies, "REGISTERED_BYTES", limit)
    monkeypatch.setattr(strategies, "STAGED_BYTES", limit)
    monkeypatch.setattr(strategies, "PIECE", 1 << 16)
    reports: list[Progress] = []
    opened: list[str] = []
    before = anonymous_bytes()
    weights = (
        strategies.registered(
            job(memory, files, monkeypatch, progress=reports.append, mapped=lambda: opened.append("map")), way, limit
        )
        if way
        else open_weights(
            job(memory, files, monkeypatch, progress=reports.append, mapped=lambda: opened.append("map")), strategy
        )
    )
    for ref in REFS:
        assert read(memory, weights, ref) == files[ref.shard].read_bytes()[ref.offset : ref.offset + ref.nbytes]
    assert opened == ["map"]
    assert weights.nbytes >= sum(ref.nbytes for ref in REFS)
    stage = "staging" if strategy == "staged" else "registering"
    done = [report for report in reports if report.stage == stage]
    assert done[-1].done_bytes == done[-1].total_bytes == weights.nbytes and done[-1].eta_s == 0
    assert [report.done_bytes for report in done] == sorted(report.done_bytes for report in done)
    if strategy == "staged":
        assert weights.copied_bytes == weights.nbytes and not weights.mappings
        assert all(item.address % 256 == item.part.begin % 256 for item in weights.placed)
    else:
        assert weights.copied_bytes == 0
        ranges = [(mapping.address, mapping.address + mapping.nbytes) for mapping in weights.mappings]
        assert anonymous_in(ranges) == 0 and anonymous_bytes() - before < 16 << 20
        weights.check()
    weights.close()
    weights.close()


def test_staging_drops_the_files_pages(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from apu_engine.memory.mapping import cached_bytes

    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        assert cached_bytes(fd, path, path.stat().st_size) == path.stat().st_size
        os.close(fd)
    weights = open_weights(job(memory, files, monkeypatch), "staged")
    assert weights.kept_bytes == 0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        assert cached_bytes(fd, path, path.stat().st_size) == 0
        os.close(fd)
    weights.close()


def test_direct(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pageable = True
    weights = open_weights(job(memory, files, monkeypatch), "direct")
    for ref in REFS:
        assert read(memory, weights, ref) == files[ref.shard].read_bytes()[ref.offset : ref.offset + ref.nbytes]
    assert [line for line in memory.log if line.startswith("register")] == [f"register direct {n}" for n in SIZES]
    weights.close()


def test_regions_go_before_mappings(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from apu_engine.memory.mapping import Mapping

    release = Mapping.release

    def note(self: Mapping) -> None:
        memory.log.append("unmap")
        release(self)

    weights = open_weights(job(memory, files, monkeypatch), "registered", "svm")
    monkeypatch.setattr(Mapping, "release", note)
    memory.log.clear()
    weights.close()
    assert memory.log == ["free", "free", "unmap", "unmap"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"wrong": {"svm"}}, r"a\.gguf: the device reads other bytes at \d+ than the file holds: expected sum 0x"),
        ({"shift": 512}, "at device address 0x.*, expected whole pages"),
    ],
)
def test_what_the_runtime_did_is_checked(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], text: str
) -> None:
    for name, value in fault.items():
        setattr(memory, name, value)
    with pytest.raises(Refused, match=text):
        open_weights(job(memory, files, monkeypatch), "registered", "svm")


def test_pages_that_were_copied(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "anonymous_in", lambda _: 4096)
    with pytest.raises(Refused, match=r"4 KiB of the mapped files became anonymous memory"):
        open_weights(job(memory, files, monkeypatch), "registered", "svm")


def test_copying_is_noticed_while_it_happens(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after 80 GB."""
    amounts = iter((0, 1 << 20, 100 << 20, 200 << 20))
    monkeypatch.setattr(strategies, "anonymous_bytes", lambda: next(amounts))
    with pytest.raises(Refused, match="registering took 100 MiB of anonymous memory: pages are being copied"):
        strategies.registered(job(memory, files, monkeypatch), "svm", 1 << 19)
    assert memory.most_regions == 2


def test_smaller_registrations_where_large_ones_are_refused(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "_SMALLER", 1 << 19)
    memory.largest = 1 << 19
    weights = open_weights(job(memory, files, monkeypatch), "registered", "advise")
    assert max(item.part.nbytes for item in weights.placed) < 1 << 19
    weights.close()
    memory.largest = PAGE
    with pytest.raises(DeviceError, match="registering"):
        open_weights(job(memory, files, monkeypatch), "registered", "advise")


@pytest.mark.parametrize("strategy", ["registered", "staged"])
def test_cancelled_at_every_moment(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Wherever loading looks whether it goes on, it can be told not to; the fixture sees that nothing is left."""
    monkeypatch.setattr(strategies, "PIECE", 1 << 18)
    monkeypatch.setattr(strategies, "STAGED_BYTES", 1 << 20)
    goes_on = Job.goes_on
    moments: list[str] = []

    def cancelling(self: Job, what: str) -> None:
        moments.append(what)
        if len(moments) == at:
            self.cancel.set()
        goes_on(self, what)

    monkeypatch.setattr(Job, "goes_on", cancelling)
    at = -1
    way = "svm" if strategy == "registered" else None
    open_weights(job(memory, files, monkeypatch), strategy, way).close()
    total = len(moments)
    assert total > 5
    for moment in range(1, total + 1):
        at = moment
        moments.clear()
        with pytest.raises(LoadCancelled):
            open_weights(job(memory, files, monkeypatch), strategy, way)
        assert not memory.regions and not memory.stagers
    held = Path("/proc/self/maps").read_text()
    assert not any(str(path) in held for path in files)


def test_out_of_memory_while_staging(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "STAGED_BYTES", 1 << 20)
    memory.allocations_left = 2
    with pytest.raises(OutOfMemoryError):
        open_weights(job(memory, files, monkeypatch), "staged")


@pytest.mark.parametrize("strategy", ["registered", "staged"])
def test_a_file_that_changed_since_its_header_was_read(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    os.truncate(files[1], SIZES[1] - 4096)
    with pytest.raises(MappingError, match=r"b\.gguf: "):
        open_weights(job(memory, files, monkeypatch), strategy, "svm")


def test_a_file_that_is_written_to_while_it_is_staged(
    memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(progress: Progress) -> None:
        if progress.done_bytes:
            os.utime(files[0], (1, 1))

    with pytest.raises(MappingError, match=r"a\.gguf: was written to while it was loaded"):
        open_weights(job(memory, files, monkeypatch, progress=touch), "staged")


def test_locking_comes_before_registration(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def mlock(*_: object) -> Any:
        order.append(f"lock with {len(memory.regions)} regions")
        from apu_engine.memory.mapping import Outcome

        return Outcome(0, 0.0, "locked 0 of 3 MiB: add `* - memlock unlimited` to /etc/security/limits.d")

    monkeypatch.setattr(strategies, "mlock", mlock)
    weights = open_weights(job(memory, files, monkeypatch), "registered", "lock")
    assert order == ["lock with 0 regions"]
    assert "limits.d" in weights.notices[0]
    weights.close()


def test_the_watchdog_hears_what_is_done(memory: Memory, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    work = job(memory, files, monkeypatch, cancel=threading.Event())
    monkeypatch.setattr(type(work.task), "beat", lambda self, what: said.append(what))
    open_weights(work, "registered", "svm").close()
    assert "registering part 1 of 2 (2.9 MiB) by way A" in said and "reading ahead" in said


# ---------------------------------------------------------------- sums


def by_hand(data: bytes) -> int:
    total = 0
    for i in range(0, len(data), 4):
        word = int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little")
        total += (word + 1) * (2 * (i // 4) + 1) * 0x9E3779B97F4A7C15
    return total % (1 << 64)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 4096, 1_200_003])
def test_checksum(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apu_engine.memory.verify._BLOCK", 1000)
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert checksum(np.frombuffer(data, np.uint8)) == by_hand(data)


def test_checksum_is_the_natives(device: Any) -> None:
    data = np.random.default_rng(1).integers(0, 256, 100_003, dtype=np.uint8)
    assert device.checksum(data.ctypes.data + 1, 100_002) == checksum(data[1:])
