"""How weights come to a device: registered in place, in place without registration (direct), or as one copy (staged).

All three end in `Weights`, which knows the device address of each part of the files. Opening can be cancelled between
any two parts or pieces; whatever fails leaves nothing behind. In place, every claim of the runtime is checked: the
address is its own, a sum computed by the device over both ends of each part equals ours, and no page was copied. At
most one copy of the weights exists at any time: a way that failed is undone and its mapping unmapped before the next is
tried, and staging holds the copy and a small ring.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import Device, NativeError, Region, Stager
from apu_engine.errors import ApuError, LoadCancelled, MappingError, ModelError
from apu_engine.memory.budget import STAGING_RING
from apu_engine.memory.files import open_regular
from apu_engine.memory.machine import GIB
from apu_engine.memory.mapping import Mapping, Progress, cached_bytes, mlock, prefetch
from apu_engine.memory.placement import PAGE, REGISTERED_BYTES, STAGED_BYTES, Part, Placed, Places, cut
from apu_engine.memory.verify import anonymous_bytes, anonymous_in, checksum
from apu_engine.memory.watchdog import Task
from apu_engine.options import format_size
from apu_engine.plan.spec import Segment
from apu_engine.weights.made import make
from apu_engine.weights.model_file import TensorRef

LETTERS = {"svm": "A", "advise": "B", "lock": "C", "register": "D"}  # as documentation calls the ways
PIECE = 64 << 20  # bytes between two looks at whether loading was cancelled
EDGE = 64 << 10  # bytes at each end of a part that are summed
GROWTH = 64 << 20  # anonymous memory that a runtime may take for its own books while it registers, and
GROWTH_SHARE = 256  # this part of what is registered
_SMALLER = 1 << 28  # most of one registration where larger ones were refused
_ALIGNMENT = 256  # of device allocations; bytes of a copy keep their file offset's remainder


class Refused(ApuError):
    """The runtime said yes, but what it did is not what was asked for."""


@dataclass(slots=True)
class Job:
    """What a strategy needs to know. `refs` are the tensors that the plan uses; `mapped` is called once, when the
    files are open and nothing is read yet.
    """

    device: Device
    files: Sequence[Path]
    sizes: Sequence[int]
    refs: Sequence[TensorRef]
    progress: Callable[[Progress], None] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    task: Task = field(default_factory=lambda: Task("loading"))
    mapped: Callable[[], None] | None = None
    readahead: bool = True
    lock: bool = False
    copy: bool = False  # to anonymous memory: for a test of the footprint check

    def goes_on(self, what: str) -> None:
        """For the watchdog. Raises LoadCancelled."""
        if self.cancel.is_set():
            raise LoadCancelled("loading was cancelled")
        self.task.beat(what)

    def opened(self) -> None:
        done, self.mapped = self.mapped, None
        if done is not None:
            done()


class Weights:
    """Weights as the device reads them. Free it after the plan, before the device."""

    def __init__(self, strategy: str, way: str | None = None) -> None:
        self.strategy = strategy
        self.way = way
        self.grain = "unknown"
        self.placed: list[Placed] = []  # in file order
        self.mappings: list[Mapping] = []
        self.notices: list[str] = []
        self.copied_bytes = 0  # of the files, in memory beside their pages
        self.kept_bytes = 0  # staged: file pages that could not be dropped
        self.made_bytes = 0  # of small tensors that no file holds as they are needed
        self._regions: list[Region] = []
        self._copies: list[NDArray[np.uint8]] = []
        self._made: dict[str, int] = {}  # device addresses
        self._places: Places | None = None
        self._views: dict[Path, Mapping] = {}  # files that only views map: a GPU holds a copy
        self._lock = threading.RLock()  # leases end wherever their last user is dropped, also within a lock's holder
        self._leases = 0
        self._closed = False
        self._then: list[Callable[[], None]] = []

    def segments(self, ref: TensorRef) -> tuple[Segment, ...]:
        """Where a tensor's rows are on the device. Raises ModelError when one of them is not wholly there."""
        if ref.made is not None:
            if ref.name not in self._made:
                raise ModelError(f"tensor {ref.name} was not made: nothing that runs uses it", (ref.name,))
            return (Segment(self._made[ref.name], 0, ref.rows, ref.row_bytes, 0),)
        if self._places is None:
            self._places = Places(self.placed)
        return self._places.segments(ref)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that the device can read."""
        return sum(item.part.nbytes for item in self.placed)

    @property
    def registered_bytes(self) -> int:
        """Host bytes that the device reads in place by registration: whole pages."""
        return sum(region.info().pinned_bytes for region in self._regions)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's own memory."""
        return sum(region.info().device_bytes for region in self._regions)

    def check(self) -> None:
        """Raises MappingError when a file in use was truncated or changed."""
        for mapping in self.mappings:
            mapping.check()

    def mapping(self, path: Path, size: int) -> Mapping:
        """The mapping of a file for views of it, opened where the device holds a copy. Raises MappingError."""
        with self._lock:
            if self._closed:
                raise MappingError(path, "the model is closed")
            for mapping in self.mappings:
                if mapping.path == path:
                    return mapping
            if path not in self._views:
                self._views[path] = Mapping.open(path, size)
            return self._views[path]

    def made(self, ref: TensorRef) -> NDArray[np.uint8] | None:
        """The bytes of a tensor that was made, read-only; None where they are not in the host's memory."""
        with self._lock:
            if self._closed:
                raise MappingError(ref.name, "the model is closed")
            for data in self._copies:
                at = self._made.get(ref.name, 0) - data.ctypes.data
                if 0 <= at <= data.nbytes - ref.nbytes:
                    view = data[at : at + ref.nbytes]
                    view.flags.writeable = False
                    return view
        return None

    def lease(self) -> Lease:
        """What the device reads stays, also after `close`, while the object that this returns lives.

        Raises ModelError when the weights are closed."""
        with self._lock:
            if self._closed:
                raise ModelError("the model is closed")
            return Lease(self)

    def _count(self, more: int) -> None:
        with self._lock:
            self._leases += more
            if self._closed and not self._leases:
                self._free()

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Frees regions, unmaps, calls `then`; what others still look at goes with its last user. Harmless twice."""
        with self._lock:
            self._closed = True
            if then is not None:
                self._then.append(then)
            if not self._leases:
                self._free()

    def _free(self) -> None:
        for region in reversed(self._regions):
            region.free()
        self._regions.clear()
        self._copies.clear()
        for mapping in (*self.mappings, *self._views.values()):
            mapping.release()
        while self._then:
            self._then.pop(0)()

    def make(self, job: Job) -> None:
        """Makes the tensors that no file holds, in memory that the device can read."""
        refs = [ref for ref in job.refs if ref.made is not None]
        if not refs:
            return
        job.goes_on("making small tensors")
        offsets = np.cumsum([0] + [-(-ref.nbytes // _ALIGNMENT) * _ALIGNMENT for ref in refs]).tolist()
        data = np.zeros(offsets[-1], np.uint8)
        for ref, offset in zip(refs, offsets[:-1], strict=True):
            data[offset : offset + ref.nbytes] = make(ref, job.files)
        if job.device.props.kind == "cpu":
            self._copies.append(data)
            region = Region.register(job.device, data.ctypes.data, data.nbytes, "direct")
        else:
            region = Region.alloc(job.device, data.nbytes)
            job.device.copy(region.address, data.ctypes.data, data.nbytes, from_host=True)
        self._regions.append(region)
        self._made = {ref.name: region.address + offset for ref, offset in zip(refs, offsets[:-1], strict=True)}
        self.made_bytes = sum(ref.nbytes for ref in refs)

    def _map(self, job: Job, layers: int = 1) -> dict[tuple[int, int], Mapping]:
        found: dict[tuple[int, int], Mapping] = {}
        for shard, (file, size) in enumerate(zip(job.files, job.sizes, strict=True)):
            for layer in range(layers):
                found[shard, layer] = mapping = Mapping.open(file, size)
                self.mappings.append(mapping)
        return found


class Lease:
    """Keeps weights on the device while it lives."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        weights._count(1)

    def __del__(self) -> None:
        self._weights._count(-1)


class Meter:
    """Reports of a stage: bytes done, rate, time left."""

    def __init__(self, job: Job, stage: str, total: int) -> None:
        self._job, self._stage, self._total = job, stage, total
        self._start = time.monotonic()
        self.done = 0
        self.add(0)

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self._job.progress is None:
            return
        seconds = time.monotonic() - self._start
        rate = self.done / seconds if seconds > 0 else 0.0
        eta = (self._total - self.done) / rate if rate else None
        self._job.progress(Progress(self._stage, self.done, self._total, rate / GIB, eta))


def open_weights(job: Job, strategy: str, way: str | None = None) -> Weights:
    """Weights by one strategy ("registered" needs a way).

    Raises NativeError where the device refuses, Refused where it did something else than it was asked for, MappingError
    for a file that is not what it was, LoadCancelled.
    """
    weights = _open(job, strategy, way)
    with _undone(weights):
        weights.make(job)
    return weights


def _open(job: Job, strategy: str, way: str | None) -> Weights:
    if strategy == "direct" or job.copy:
        return direct(job)
    if strategy == "staged":
        return staged(job)
    assert way is not None
    try:
        return registered(job, way)
    except NativeError:
        if max((part.nbytes for part in cut(job.refs, REGISTERED_BYTES)), default=0) <= _SMALLER:
            raise
    return registered(job, way, _SMALLER)


# ---------------------------------------------------------------- in place


def direct(job: Job) -> Weights:
    """Host addresses are the device's: the cpu, and GPUs that use the host's page tables."""
    weights = Weights("direct")
    with _undone(weights):
        mappings = weights._map(job)
        job.opened()
        if job.lock:
            job.goes_on("locking the weights in memory")
            weights.notices.append(mlock(weights.mappings, cancel=job.cancel).notice)
        if job.readahead:
            _read_ahead(job, weights, None)
        for (shard, _), mapping in mappings.items():
            job.goes_on(f"registering {mapping.path.name}")
            address = mapping.address
            if job.copy:
                weights._copies.append(mapping.array().copy())
                weights.copied_bytes += mapping.nbytes
                address = weights._copies[-1].ctypes.data
            on_gpu = job.device.props.kind != "cpu"
            region = Region.register(job.device, address, mapping.nbytes, "staged" if job.copy and on_gpu else "direct")
            weights._regions.append(region)
            weights.copied_bytes += region.info().device_bytes
            for chunk in region.chunks():
                begin = chunk.host - address
                weights.placed.append(Placed(Part(shard, begin, begin + chunk.nbytes), chunk.device))
        if job.device.props.kind != "cpu" and not job.copy:
            _check_in_place(job, weights, mappings)
    return weights


def registered(job: Job, way: str, limit: int = REGISTERED_BYTES) -> Weights:
    """The files' own pages, read by the device in place after registration by one way, `limit` bytes at a time."""
    weights = Weights("registered", way)
    parts = cut(job.refs, limit)
    with _undone(weights):
        mappings = weights._map(job, 1 + max((part.layer for part in parts), default=0))
        for mapping in weights.mappings:
            mapping.prefer_huge_pages()
        job.opened()
        ranges = [(mappings[part.shard, part.layer], part.first, part.last - part.first) for part in parts]
        _read_ahead(job, weights, ranges)
        if job.device.props.kind != "cuda":  # which pins what it registers; AMD's driver does not
            job.goes_on("locking the weights in memory")
            weights.notices.append(mlock(_firsts(mappings), ranges, job.cancel).notice)
        before = anonymous_bytes()
        meter = Meter(job, "registering", sum(part.nbytes for part in parts))
        grains = set()
        for number, (part, (mapping, first, nbytes)) in enumerate(zip(parts, ranges, strict=True), 1):
            job.goes_on(f"registering part {number} of {len(parts)} ({format_size(nbytes)}) by way {LETTERS[way]}")
            region = Region.register(job.device, mapping.address + first, nbytes, "registered", way)
            weights._regions.append(region)
            address = device_address(region, mapping.address + first, nbytes)
            weights.placed.append(Placed(part, address + part.begin - first))
            grains.add(region.info().grain)
            if (growth := anonymous_bytes() - before) > GROWTH + meter.done // GROWTH_SHARE:
                raise Refused(f"registering took {format_size(growth)} of anonymous memory: pages are being copied")
            meter.add(part.nbytes)
        weights.grain = worst_grain(grains)
        _check_in_place(job, weights, mappings)
    return weights


def device_address(region: Region, host: int, nbytes: int) -> int:
    """The device address of a registered range, from the runtime. Raises Refused when it cannot be right."""
    chunks = region.chunks()
    if len(chunks) != 1 or (chunks[0].host, chunks[0].nbytes) != (host, nbytes):
        raise Refused(f"a registered range of {nbytes:,} bytes came back as {len(chunks)} chunks, expected the range")
    if not chunks[0].device or chunks[0].device % PAGE:
        raise Refused(f"a registered range is at device address {chunks[0].device:#x}, expected whole pages")
    return chunks[0].device


def worst_grain(grains: Collection[str]) -> str:
    """Of several ranges: fine where one is, which on some GPUs means uncached, then unknown, else coarse."""
    return next((grain for grain in ("fine", "unknown") if grain in grains), "coarse")


def _firsts(mappings: dict[tuple[int, int], Mapping]) -> list[Mapping]:
    """One mapping of each file."""
    return [mapping for (_, layer), mapping in mappings.items() if layer == 0]


def _read_ahead(job: Job, weights: Weights, ranges: list[tuple[Mapping, int, int]] | None) -> None:
    done = -1

    def report(progress: Progress) -> None:
        nonlocal done
        if progress.done_bytes != done:
            done = progress.done_bytes
            job.task.beat(f"reading ahead: {done:,} of {progress.total_bytes:,} bytes")
        if job.progress is not None:
            job.progress(progress)

    job.goes_on("reading ahead")
    files = list({mapping.path: mapping for mapping in weights.mappings}.values())
    threads = max(job.device.props.threads, 2) if job.device.props.kind == "cpu" else 4
    weights.notices.append(prefetch(files, threads, report, job.cancel, ranges).notice)


def _check_in_place(job: Job, weights: Weights, mappings: dict[tuple[int, int], Mapping]) -> None:
    """The device reads the files' bytes at both ends of each part, and no page of a mapping is anonymous."""
    job.goes_on("checking that the device reads the files")
    for item in weights.placed:
        mapping = mappings[item.part.shard, item.part.layer]
        end = min(item.part.last, mapping.nbytes)
        for at in {item.part.first, max(item.part.first, end - EDGE)}:
            expected = checksum(mapping.array(at, min(EDGE, end - at)))
            check_sum(job.device, item, at, min(EDGE, end - at), expected, mapping.path)
        mapping.check()
    job.goes_on("checking that no page was copied")
    copied = anonymous_in([(mapping.address, mapping.address + mapping.nbytes) for mapping in weights.mappings])
    if copied:
        raise Refused(f"{format_size(copied)} of the mapped files became anonymous memory: pages were copied")


def check_sum(device: Device, item: Placed, offset: int, nbytes: int, expected: int, path: Path) -> None:
    """Raises Refused unless the device's sum over `nbytes` at file offset `offset` of a part is `expected`."""
    found = device.checksum(item.address + offset - item.part.begin, nbytes)
    if found != expected:
        raise Refused(
            f"{path}: the device reads other bytes at {offset:,} than the file holds: "
            f"expected sum {expected:#x}, found {found:#x}"
        )


# ---------------------------------------------------------------- one copy


class _Source:
    """A file that is staged: open, and what it was when its header was read."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.fd, info = open_regular(path)
        self._identity = (size, info.st_mtime_ns)
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        info = os.fstat(self.fd)
        if (info.st_size, info.st_mtime_ns) != self._identity:
            raise MappingError(
                self.path,
                f"was written to while it was loaded (expected {self._identity[0]:,} bytes, found {info.st_size:,}); "
                "load it again",
            )

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        data = bytearray()
        while len(data) < nbytes:
            piece = os.pread(self.fd, nbytes - len(data), offset + len(data))
            if not piece:
                raise MappingError(self.path, f"ends at {offset + len(data):,}, expected more; load it again")
            data += piece
        return np.frombuffer(data, np.uint8)

    def drop(self) -> int:
        """Drops the file's pages from the page cache; bytes that stayed, as far as the kernel says."""
        kept = 0
        for again in (False, True):
            with contextlib.suppress(OSError):
                if again:  # pages of a file that was just written stay until they are on disk
                    os.fdatasync(self.fd)
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            kept = cached_bytes(self.fd, self.path, self._identity[0]) or 0
            if not kept:
                break
        return kept

    def close(self) -> None:
        os.close(self.fd)


def staged(job: Job) -> Weights:
    """One copy in the device's memory, read with direct I/O through a small pinned ring; file pages are dropped."""
    weights = Weights("staged")
    parts = cut(job.refs, STAGED_BYTES)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_undone(weights))
        sources: list[_Source] = []
        for file, size in zip(job.files, job.sizes, strict=True):
            sources.append(_Source(file, size))
            stack.callback(sources[-1].close)
        job.opened()
        for source in sources:  # pages that are cached already would be a second copy meanwhile
            source.drop()
        total = sum(part.nbytes for part in parts)
        meter = Meter(job, "staging", total)
        with Stager(job.device, STAGING_RING) as stager:
            for number, part in enumerate(parts, 1):
                job.goes_on(f"allocating part {number} of {len(parts)} ({format_size(part.nbytes)}) on the device")
                region = Region.alloc(job.device, part.nbytes + 3 * _ALIGNMENT)
                weights._regions.append(region)
                address = region.address + _ALIGNMENT + part.begin % _ALIGNMENT
                weights.placed.append(Placed(part, address))
                source = sources[part.shard]
                for begin, end in _pieces(part):
                    job.goes_on(f"staging {source.path.name}: {meter.done:,} of {total:,} bytes are on the device")
                    stager.read(source.fd, str(source.path), begin, end - begin, address + begin - part.begin)
                    meter.add(end - begin)
            job.goes_on("waiting for the last copies")
            stager.wait()
        weights.copied_bytes = total
        job.goes_on("checking the copy")
        for item in weights.placed:
            part, source = item.part, sources[item.part.shard]
            for at in {part.begin, max(part.begin, part.end - EDGE)}:
                data = source.read(at, min(EDGE, part.end - at))
                check_sum(job.device, item, at, data.nbytes, checksum(data), source.path)
        for source in sources:
            source.check()
            weights.kept_bytes += source.drop()
    return weights


def _pieces(part: Part) -> list[tuple[int, int]]:
    """Its bytes in pieces that meet at multiples of PIECE, which direct I/O reads without a remainder."""
    cuts = range(part.begin // PIECE * PIECE + PIECE, part.end, PIECE)
    bounds = [part.begin, *cuts, part.end]
    return list(pairwise(bounds))


@contextlib.contextmanager
def _undone(weights: Weights) -> Iterator[None]:
    """Closes the weights when the block fails."""
    try:
        yield
    except BaseException:
        weights.close()
        raise
    weights.notices = [notice for notice in weights.notices if notice]
