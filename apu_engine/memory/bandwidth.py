"""How fast CPU and GPU reach memory: own, file pages in place, copies, and parts of an expert's size that lie anywhere.

What `apu-engine bench bw` measures, each frees what it took, and nothing takes more than an eighth of what is free. The
results are kept beside the probe's, by device, driver, kernel and file system, for other programs to read. Ways of
reading in place are the probe's own measurement, made anew.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from apu_engine._native import Device, Region
from apu_engine.errors import ApuError, MappingError, brief
from apu_engine.memory.files import save
from apu_engine.memory.machine import Machine
from apu_engine.memory.mapping import Mapping
from apu_engine.memory.placement import PAGE
from apu_engine.memory.probe import Probe, cache_folder, identity, probe
from apu_engine.memory.strategies import LETTERS, Job

MOST_BYTES = 1 << 30  # of a range: above every cache
LEAST_BYTES = 64 << 20
SLICE = 256 << 20  # of a file
PASSES = 5
PIECES = tuple(mib << 20 for mib in (1, 2, 4, 8, 16))  # of gathers: an expert's matrices
GATHERED = 256 << 20  # of one pass of a gather, so that none of it is in a cache from the pass before
_VERSION = 1  # of what is measured, and how


@dataclass(frozen=True, slots=True)
class Rate:
    """One figure. Copies count the bytes that are copied, once; GB are 1e9 bytes."""

    device: str  # "cpu", "hip", "cuda"
    test: str  # "read", "copy", "gather", "to device"
    memory: str  # "memory" (the device's own), "file pages", "pinned memory"
    gb_per_s: float
    nbytes: int
    threads: int = 0  # of the CPU
    piece_bytes: int = 0  # of gathers
    way: str = ""  # how a GPU reaches file pages: of LETTERS, or "direct"
    problem: str = ""  # why there is no figure

    @property
    def place(self) -> str:
        """`file pages, way A`."""
        how = f"way {LETTERS[self.way]}" if self.way in LETTERS else self.way
        return f"{self.memory}, {how}" if how else self.memory


@dataclass(slots=True)
class Bandwidths:
    """What was measured on one machine. `absent` says what is not there, and why."""

    made: float  # time.time()
    file: str
    rates: list[Rate] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def find(self, device: str, test: str, memory: str, **more: object) -> Rate | None:
        """The first figure that has all these fields."""
        wanted = {"device": device, "test": test, "memory": memory, "problem": "", **more}
        return next((rate for rate in self.rates if all(getattr(rate, k) == v for k, v in wanted.items())), None)


OnRate = Callable[[Rate], None]


class _Taken(list[Rate]):
    """Figures, told one by one as they come."""

    def __init__(self, tell: OnRate) -> None:
        super().__init__()
        self._tell = tell

    def append(self, rate: Rate) -> None:
        super().append(rate)
        self._tell(rate)


def measure(job: Job, threads: int, tell: OnRate = lambda rate: None) -> Bandwidths:
    """All figures of the CPU with 1 to `threads` workers (0: as the engine chooses), and of `job`'s device where that
    is a GPU; on slices of its files. `tell` gets each figure as it comes. A part of the GPU's that fails is a figure
    with a problem; raises MappingError, NativeError and LoadCancelled for the CPU's.
    """
    taken = _Taken(tell)
    found = Bandwidths(time.time(), str(job.files[0]))
    job.goes_on("reading memory with the CPU")
    _cpu(job, threads, taken)
    device = job.device
    if device.props.kind != "cpu":
        _gpu(job, taken)
        for name in (*LETTERS, "direct"):
            if not any(rate.way == name for rate in taken):
                title = f"way {LETTERS[name]} ({name})" if name in LETTERS else name
                found.absent.append(f"{title}: the runtime of {device.props.name} does not have it")
    found.rates = list(taken)
    return found


# ---------------------------------------------------------------- CPU


def _cpu(job: Job, threads: int, out: list[Rate]) -> None:
    size = range_bytes(Machine().available)
    memory, copy = (mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2))
    with contextlib.closing(memory), contextlib.closing(copy), Mapping.open(job.files[0], job.sizes[0]) as mapping:
        first, nbytes = _slice(job)
        with Device("cpu", threads=threads) as device:
            most = device.props.threads
        mapping.populate(first, nbytes)
        base, to = _address(memory), _address(copy)
        for pages in (memory, copy):  # until they are written to they are all the kernel's one page of zeros
            pages.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(pages, np.uint8)[::PAGE] = 1
        for count in _counts(most):
            job.goes_on(f"reading memory with {count} threads of the CPU")
            with Device("cpu", threads=count) as device:
                rate = device.read_rate(base, size, PASSES)
                out.append(Rate("cpu", "read", "memory", rate / 1e9, size, count))
                rate = device.read_rate(mapping.address + first, nbytes, PASSES)
                out.append(Rate("cpu", "read", "file pages", rate / 1e9, nbytes, count))
                rate = _copy_rate(device, base, to, size, count)
                out.append(Rate("cpu", "copy", "memory", rate / 1e9, size, count))
                if count < most:
                    continue
                for piece in PIECES:
                    if parts := _parts(mapping.address + first, nbytes, piece):
                        rate = device.gather_rate(parts, piece, PASSES) / 1e9
                        out.append(Rate("cpu", "gather", "file pages", rate, len(parts) * piece, count, piece))


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({*(1 << i for i in range(most.bit_length()) if 1 << i < most), most})


def _copy_rate(device: Device, source: int, to: int, nbytes: int, threads: int) -> float:
    """Bytes per second, the best of PASSES, by so many threads, each with its own part."""
    step = -(-nbytes // threads // PAGE) * PAGE
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            begin = time.perf_counter()
            parts = range(0, nbytes, step)
            list(pool.map(lambda at: device.copy(to + at, source + at, min(step, nbytes - at)), parts))
            best = min(best, time.perf_counter() - begin)
    return nbytes / best


# ---------------------------------------------------------------- GPU


def _gpu(job: Job, out: list[Rate]) -> None:
    kind = job.device.props.kind
    nbytes = range_bytes(job.device.free_memory())
    with _tried(out, Rate(kind, "read", "memory", 0.0, nbytes)):
        _own_memory(job, nbytes, out)
    with _tried(out, Rate(kind, "to device", "pinned memory", 0.0, nbytes)):
        _to_device(job, nbytes, out)
    with _tried(out, Rate(kind, "read", "file pages", 0.0, 0)):
        found = probe(job, fresh=True)
        for way in found.ways:
            rate = Rate(kind, "read", "file pages", way.gb_per_s, found.nbytes, way=way.name, problem=way.problem)
            out.append(rate)
        _in_place(job, found, out)


def _own_memory(job: Job, nbytes: int, out: list[Rate]) -> None:
    device, kind = job.device, job.device.props.kind
    job.goes_on("reading the GPU's memory")
    region = Region.alloc(device, nbytes)
    try:
        base, half = region.address, nbytes // 2 // PAGE * PAGE
        out.append(Rate(kind, "read", "memory", device.read_rate(base, nbytes, PASSES) / 1e9, nbytes))
        rate = _best(lambda: device.copy(base + half, base, half), half)
        out.append(Rate(kind, "copy", "memory", rate / 1e9, half))
        for piece in PIECES:
            if parts := _parts(base, nbytes, piece):
                rate = device.gather_rate(parts, piece, PASSES) / 1e9
                out.append(Rate(kind, "gather", "memory", rate, len(parts) * piece, piece_bytes=piece))
    finally:
        region.free()


def _to_device(job: Job, nbytes: int, out: list[Rate]) -> None:
    """From memory that is registered as a whole: the copy engine reads it without a buffer between."""
    device, kind = job.device, job.device.props.kind
    job.goes_on("copying to the GPU's memory")
    size = min(nbytes, SLICE)
    if "register" not in device.props.ways:
        out.append(Rate(kind, "to device", "pinned memory", 0.0, size, problem="the runtime cannot pin memory"))
        return
    regions: list[Region] = []
    host = mmap.mmap(-1, size)
    try:
        np.frombuffer(host, np.uint8)[::PAGE] = 1
        regions.append(Region.register(device, _address(host), size, "registered", "register"))
        regions.append(Region.alloc(device, size))
        to = regions[-1].address
        rate = _best(lambda: device.copy(to, _address(host), size, from_host=True), size)
        out.append(Rate(kind, "to device", "pinned memory", rate / 1e9, size))
    finally:
        for region in reversed(regions):
            region.free()
        host.close()


def _in_place(job: Job, found: Probe, out: list[Rate]) -> None:
    """Gathers by the way that reads fastest."""
    sound = [way for way in found.ways if not way.problem]
    if not sound:
        return
    way = max(sound, key=lambda item: item.gb_per_s)
    device, kind = job.device, job.device.props.kind
    job.goes_on(f"gathering parts of file pages, {way.title}")
    with Mapping.open(job.files[0], job.sizes[0]) as mapping:
        first, nbytes = _slice(job)
        mapping.populate(first, nbytes)
        strategy, name = ("direct", "auto") if way.name == "direct" else ("registered", way.name)
        region = Region.register(device, mapping.address + first, nbytes, strategy, name)
        try:
            for piece in PIECES:
                if parts := _parts(region.address, nbytes, piece):
                    rate = device.gather_rate(parts, piece, PASSES) / 1e9
                    size = len(parts) * piece
                    out.append(Rate(kind, "gather", "file pages", rate, size, piece_bytes=piece, way=way.name))
        finally:
            region.free()


@contextlib.contextmanager
def _tried(out: list[Rate], rate: Rate) -> Iterator[None]:
    """What fails in the block becomes `rate` with a problem."""
    try:
        yield
    except (ApuError, OSError) as error:
        out.append(replace(rate, problem=brief(error)))


# ---------------------------------------------------------------- pieces


def range_bytes(free: int) -> int:
    """Bytes of a measured range, whole pages, where `free` bytes are: at most an eighth of them."""
    return max(LEAST_BYTES, min(MOST_BYTES, free // 8)) // PAGE * PAGE


def _slice(job: Job) -> tuple[int, int]:
    """(offset, bytes) of whole pages of the first file's tensors, at most SLICE."""
    extents = [extent for ref in job.refs for extent in ref.extents if extent.shard == 0]
    first = min(extent.offset for extent in extents) // PAGE * PAGE
    end = max(extent.end for extent in extents)
    nbytes = min(SLICE, end - first) // PAGE * PAGE
    if not nbytes:
        raise MappingError(job.files[0], f"holds {end - first:,} bytes of weights, expected at least {PAGE:,}")
    return first, nbytes


def _parts(base: int, nbytes: int, piece: int) -> list[int]:
    """Addresses of parts that do not overlap, in an order that nobody guesses, GATHERED together at most; two or more,
    or none.
    """
    room = nbytes // piece
    count = min(room, max(2, GATHERED // piece))
    places = np.random.default_rng(piece).permutation(room)[:count]
    return [base + int(place) * piece for place in places] if count >= 2 else []


def _best(copy: Callable[[], None], nbytes: int) -> float:
    """Bytes per second by the wall clock, the best of PASSES after one that is not counted."""
    seconds = []
    for _ in range(PASSES + 1):
        begin = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds[1:])


def _address(memory: mmap.mmap) -> int:
    view = np.frombuffer(memory, np.uint8)
    return int(view.__array_interface__["data"][0])


# ---------------------------------------------------------------- what is kept


def _path() -> Path:
    return cache_folder() / "bandwidth.json"


def _key(job: Job) -> str:
    return f"{identity(job.device.props, job.files[0])}; bandwidth {_VERSION}"


def keep(job: Job, found: Bandwidths) -> Path | None:
    """Writes figures for this device, driver, kernel and file system. The file, or None where it cannot be written."""
    path = _path()
    all_of = _kept()
    all_of[_key(job)] = found
    return path if save(path, msgspec.json.format(msgspec.json.encode(all_of))) else None


def _kept() -> dict[str, Bandwidths]:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=dict[str, Bandwidths])
    except (OSError, msgspec.MsgspecError):
        return {}


def titles(rates: Sequence[Rate]) -> list[tuple[str, ...]]:
    """Rows for a table: what, where from, with what, and the figure or the problem."""
    rows: list[tuple[str, ...]] = []
    for rate in rates:
        how = f"{rate.threads} thread{'s' if rate.threads > 1 else ''}" if rate.threads else ""
        how = f"parts of {rate.piece_bytes >> 20} MiB" + (f", {how}" if how else "") if rate.piece_bytes else how
        figure = rate.problem or f"{rate.gb_per_s:.1f}"
        rows.append((rate.device, rate.test, rate.place, how, f"{rate.nbytes / (1 << 20):.0f} MiB", figure))
    return rows
