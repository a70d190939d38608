"""Measures how well a device reads file pages in place, on slices of the real file, and what follows from that.

Whether registered pages are read as fast as device memory depends on the runtime, the kernel and the file system, and
nobody publishes it: so each way is tried for a moment, verified (a sum over all bytes, anonymous memory, grain) and
timed against a device allocation of the same size. A result is kept in the user's cache folder for this device, driver,
kernel and file system. While a way is tried the cache says so: one that took the process with it is not tried again.
One process measures at a time, both for the sake of that note and because bandwidth is shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from apu_engine._native import Device, DeviceProps, NativeError, OutOfMemoryError, Region, lib
from apu_engine.errors import brief
from apu_engine.memory.files import file_system, noise_file, save
from apu_engine.memory.machine import GIB
from apu_engine.memory.mapping import Mapping
from apu_engine.memory.placement import REGISTERED_BYTES, Part, cut
from apu_engine.memory.strategies import GROWTH, LETTERS, Job, Refused, device_address, worst_grain
from apu_engine.memory.verify import anonymous_bytes, anonymous_in, checksum
from apu_engine.memory.watchdog import Task
from apu_engine.weights.model_file import ModelFile, TensorRef

SECONDS = 5.0  # for everything
SLICE = 256 << 20  # timed; well above an APU's caches
SMALL = 1 << 20  # of each of the other slices, which are only verified
READ_SECONDS = 1.0  # a slice is as long as the file system delivers in this time
PASSES = 5
SHARE = 0.95  # of the device's own bandwidth: fast enough to read in place
SHORT = 32 << 20  # below this a timing is launches more than reads, and tells only the slow from the fast,
SHORT_SHARE = 0.5  # which this does
_PIECE = 16 << 20
_COLUMNS = 1024  # of the matrix of noise
_VERSION = 1  # of what is measured, and how


@dataclass(frozen=True, slots=True)
class Way:
    """How one way of reading in place did. `name` is of LETTERS, or "direct". `problem` "": it verified."""

    name: str
    problem: str = ""
    grain: str = "unknown"
    gb_per_s: float = 0.0  # 1e9 bytes
    register_s_per_gib: float = 0.0
    first_touch_s_per_gib: float = 0.0  # what the first read took more than the second
    lost: bool = False  # not tried, because the last trial took the process with it

    @property
    def title(self) -> str:
        """`way A`, `direct`."""
        return f"way {LETTERS[self.name]}" if self.name in LETTERS else self.name


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured on `nbytes` of a file, and when."""

    device_gb_per_s: float
    nbytes: int
    seconds: float
    made: float  # time.time()
    ways: tuple[Way, ...]
    cached: bool = False

    def share(self, way: Way) -> float:
        """Bandwidth as a share of the device's own memory."""
        return way.gb_per_s / self.device_gb_per_s if self.device_gb_per_s else 0.0

    @property
    def enough(self) -> float:
        """The share from which a way is as good as a copy."""
        return SHARE if self.nbytes >= SHORT else SHORT_SHARE

    def find(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name), None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy to load with, and why."""

    strategy: str
    way: str | None = None
    why: str = ""

    @property
    def title(self) -> str:
        """`registered (way A)`, `staged`."""
        return f"{self.strategy} (way {LETTERS[self.way]})" if self.way else self.strategy


def candidates(memory: str, way: str, probe: Probe | None, ways: Sequence[str]) -> list[Candidate]:
    """What to try, in order. `memory` and `way` are the options, `ways` what the runtime has the functions of.

    A way is taken when it verified, coarse-grained or without a grain, and reads at `enough` of the device's
    bandwidth; then, in case that a copy does not fit, what is slower.
    """
    if memory == "staged":
        return [Candidate("staged", why="as asked")]
    if memory == "direct":
        return [_in_place("direct", probe, "as asked")]
    if way != "auto":
        return [_in_place(way, probe, "as asked")]
    assert probe is not None
    sound = [item for item in probe.ways if not item.problem]
    if memory == "registered":
        sound = [item for item in sound if item.name != "direct"]
        order = sorted(sound, key=lambda item: (item.grain == "fine", -_step(probe, item)))
        tried = [_in_place(item.name, probe) for item in order]
        return tried or [_in_place(name, probe) for name in ways]
    order = sorted(sound, key=lambda item: -_step(probe, item))
    fast = [item for item in order if item.grain != "fine" and probe.share(item) >= probe.enough]
    rest = [item for item in order if item not in fast]
    staged = Candidate("staged", why=_not_in_place(probe, order))
    return [*(_in_place(i.name, probe) for i in fast), staged, *(_in_place(i.name, probe) for i in rest)]


def _step(probe: Probe, way: Way) -> int:
    """Bandwidth in steps of 2%: within one the order of the ways decides, not noise."""
    return round(50 * probe.share(way))


def _in_place(name: str, probe: Probe | None, otherwise: str = "") -> Candidate:
    found = probe.find(name) if probe is not None else None
    why = otherwise
    if probe is not None and found is not None and found.gb_per_s:
        fine = ", fine-grained" if found.grain == "fine" else ""
        why = f"{probe.share(found):.0%} of device bandwidth{fine}"
    return Candidate("direct", None, why) if name == "direct" else Candidate("registered", name, why)


def _not_in_place(probe: Probe, sound: Sequence[Way]) -> str:
    """`in place reads at 1.2% of device memory (51 of 4361 GB/s)`, or why no way works."""
    if sound:
        best = max(sound, key=lambda item: item.gb_per_s)
        share = probe.share(best)
        text = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
        fine = ", fine-grained" if best.grain == "fine" else ""
        numbers = f"{_number(best.gb_per_s)} of {_number(probe.device_gb_per_s)} GB/s"
        return f"in place reads at {text} of device memory ({numbers}{fine})"
    if not probe.ways:
        return "the runtime has no way of reading in place"
    return "no way of reading in place works (" + "; ".join(f"{w.title}: {w.problem}" for w in probe.ways) + ")"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


# ---------------------------------------------------------------- measuring


@contextlib.contextmanager
def trial(device: Device, model: ModelFile | None, folder: Path, nbytes: int, task: Task) -> Iterator[Job]:
    """What there is to measure with: the files and weights of a model, or, without one, a matrix of `nbytes` of noise
    (F32) in `folder`, so that its file system is the one that matters; that file is removed again.
    """
    from apu_engine import arch

    if model is not None:
        refs = arch.tensors_used(model, arch.PlanOptions(ctx=1))
        yield Job(device, model.files, model.file_sizes, refs, task=task)
        return
    task.beat("writing a file of noise")
    with noise_file(folder, nbytes) as path:
        ref = TensorRef("noise", lib.APU_F32, (nbytes // 4 // _COLUMNS, _COLUMNS), 0, 0, nbytes)
        yield Job(device, [path], [nbytes], [ref], task=task)


@dataclass(slots=True)
class _Slice:
    """Whole pages [first, last) of a file: mapped anew for each way."""

    file: Path
    size: int
    first: int
    last: int
    sum: int = 0

    @property
    def nbytes(self) -> int:
        return self.last - self.first


def probe(job: Job, fresh: bool = False, only: str | None = None) -> Probe:
    """How the device reads the files of `job` in place: from the cache, which `fresh` empties, else measured. With
    `only` no other way is tried, and what is measured is not kept.

    Raises LoadCancelled, MappingError for a file that cannot be read, NativeError where the device cannot even
    allocate; a way that fails is a Way with a problem.
    """
    cache = Cache(_key(job))
    if fresh:
        cache.forget()
    with cache.alone(job):
        kept = cache.read()
        if kept is not None and (only is None or kept.find(only) is not None):
            return replace(kept, cached=True)
        return _probe(job, cache, only)


def _probe(job: Job, cache: Cache, only: str | None) -> Probe:
    start = time.monotonic()
    deadline = start + SECONDS
    names = [name for name in LETTERS if name in job.device.props.ways]
    if job.device.props.pageable:
        names.append("direct")
    if only is not None:
        names = [only]
    job.goes_on("probing: reading slices of the file")
    slices = _slices(job) if names else []
    reference = _device_rate(job, slices[0].nbytes) if slices else 0.0
    found: list[Way] = []
    for name in names if slices else []:
        job.goes_on(f"probing {Way(name).title}")
        if only is None and name in (lost := cache.lost()):
            problem = f"the process did not survive trying it {lost[name]}; `apu-engine doctor --full` tries again"
            found.append(Way(name, problem, lost=True))
        elif time.monotonic() > deadline:
            found.append(Way(name, f"not tried, {SECONDS:g} s were over"))
        else:
            with cache.trying(name):
                found.append(_try(job, name, slices))
    result = Probe(reference, slices[0].nbytes if slices else 0, time.monotonic() - start, time.time(), tuple(found))
    if only is None:
        cache.write(result)
    return result


def _slices(job: Job) -> list[_Slice]:
    """The one that is timed, at the beginning of the weights, then the middle and the end of them."""
    parts = cut(job.refs, REGISTERED_BYTES)
    if not parts:
        return []
    part = max(parts[: len(parts) // 2 + 1], key=lambda item: item.nbytes)
    timed = _slice(job, part, part.first, SLICE)
    with Mapping.open(timed.file, timed.size) as mapping:
        begin = time.monotonic()
        for at in range(timed.first, timed.last, _PIECE):
            mapping.populate(at, min(_PIECE, timed.last - at))
            job.goes_on("probing: reading slices of the file")
            if time.monotonic() - begin > READ_SECONDS:
                timed.last = min(timed.last, at + _PIECE)
    out = [timed]
    for other in (parts[len(parts) // 2], parts[-1]):
        piece = _slice(job, other, max(other.first, other.last - SMALL), SMALL)
        if all(piece.file != s.file or piece.first >= s.last or piece.last <= s.first for s in out):
            out.append(piece)
    for item in out:
        with Mapping.open(item.file, item.size) as mapping:
            end = min(item.last, mapping.nbytes)
            mapping.populate(item.first, end - item.first)
            item.sum = checksum(mapping.array(item.first, end - item.first))
            mapping.check()
    return out


def _slice(job: Job, part: Part, first: int, nbytes: int) -> _Slice:
    return _Slice(job.files[part.shard], job.sizes[part.shard], first, min(part.last, first + nbytes))


def _device_rate(job: Job, nbytes: int) -> float:
    """GB/s of reads from the device's own memory; of less of it where there is not as much."""
    try:
        region = Region.alloc(job.device, nbytes)
    except OutOfMemoryError:
        if nbytes < _PIECE:
            raise
        return _device_rate(job, nbytes // 4)
    try:
        return job.device.read_rate(region.address, nbytes, PASSES) / 1e9
    finally:
        region.free()


def _try(job: Job, name: str, slices: Sequence[_Slice]) -> Way:
    """Registers fresh mappings of the slices, verifies and times; everything is undone again."""
    mappings: list[Mapping] = []
    regions: list[Region] = []
    way = Way(name)
    try:
        way = _measure(job, way, slices, mappings, regions)
    except (NativeError, Refused) as error:
        way = replace(way, problem=brief(error))
    finally:
        for region in reversed(regions):
            region.free()
        for mapping in mappings:
            mapping.close()
    return way


def _measure(job: Job, way: Way, slices: Sequence[_Slice], mappings: list[Mapping], regions: list[Region]) -> Way:
    device, grains = job.device, set()
    before, spent, touched = anonymous_bytes(), 0.0, 0.0
    timed = 0
    for item in slices:
        mapping = Mapping.open(item.file, item.size)
        mappings.append(mapping)
        end = min(item.last, mapping.nbytes)
        mapping.prefer_huge_pages()
        mapping.populate(item.first, end - item.first)
        host = mapping.address + item.first
        begin = time.monotonic()
        if way.name == "direct":
            regions.append(Region.register(device, host, item.nbytes, "direct"))
        else:
            regions.append(Region.register(device, host, item.nbytes, "registered", way.name))
        spent += time.monotonic() - begin
        address = device_address(regions[-1], host, item.nbytes)
        grains.add(regions[-1].info().grain)
        begin = time.monotonic()
        found = device.checksum(address, end - item.first)
        first = time.monotonic() - begin
        if found != item.sum:
            raise Refused(
                f"the device reads other bytes at {item.first:,} of {item.file.name} than the file holds: "
                f"expected sum {item.sum:#x}, found {found:#x}"
            )
        if item is slices[0]:
            timed = address
            begin = time.monotonic()
            device.checksum(address, end - item.first)
            touched = max(0.0, first - (time.monotonic() - begin))
        mapping.check()
        job.goes_on(f"probing {way.title}")
    rate = device.read_rate(timed, slices[0].nbytes, PASSES) / 1e9
    if copied := anonymous_in([(mapping.address, mapping.address + mapping.nbytes) for mapping in mappings]):
        raise Refused(f"{copied:,} bytes of the file became anonymous memory: pages were copied")
    if (growth := anonymous_bytes() - before) > GROWTH:
        raise Refused(f"anonymous memory grew by {growth:,} bytes")
    return replace(
        way,
        grain=worst_grain(grains),
        gb_per_s=rate,
        register_s_per_gib=spent * GIB / sum(item.nbytes for item in slices),
        first_touch_s_per_gib=touched * GIB / slices[0].nbytes,
    )


# ---------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Where results are kept: below XDG_CACHE_HOME, else ~/.cache."""
    from apu_engine.catalog import home

    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else home() / ".cache") / "apu_engine"


class _Kept(msgspec.Struct):
    results: dict[str, Probe] = {}
    trying: dict[str, dict[str, str]] = {}


@dataclass(slots=True)
class Cache:
    """Results by key in one small file. A file that cannot be read or written is no error: it is measured again."""

    key: str
    folder: Path = field(default_factory=cache_folder)

    @property
    def path(self) -> Path:
        return self.folder / "probe.json"

    def read(self) -> Probe | None:
        """The result that was kept for this key."""
        return self._load().results.get(self.key)

    def lost(self) -> dict[str, str]:
        """Ways whose trial never ended, and when it began."""
        return self._load().trying.get(self.key, {})

    def write(self, probe: Probe) -> None:
        kept = self._load()
        kept.results[self.key] = probe
        self._save(kept)

    def forget(self) -> None:
        """Drops what is kept for this key."""
        kept = self._load()
        if (kept.results.pop(self.key, None), kept.trying.pop(self.key, None)) != (None, None):
            self._save(kept)

    @contextlib.contextmanager
    def alone(self, job: Job) -> Iterator[None]:
        """Waits until no other process measures, up to twice SECONDS. A folder without locks is no error."""
        with contextlib.ExitStack() as stack:
            deadline = time.monotonic() + 2 * SECONDS
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((self.folder / "probe.lock").open("ab"))
                while time.monotonic() < deadline:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        job.goes_on("waiting for another process that probes")
                        job.cancel.wait(0.05)
            yield

    @contextlib.contextmanager
    def trying(self, way: str) -> Iterator[None]:
        """Marks a way as being tried until the block ends, however it ends."""
        kept = self._load()
        kept.trying.setdefault(self.key, {})[way] = time.strftime("%Y-%m-%d %H:%M")
        self._save(kept)
        try:
            yield
        finally:
            kept = self._load()
            kept.trying.get(self.key, {}).pop(way, None)
            if not kept.trying.get(self.key):
                kept.trying.pop(self.key, None)
            self._save(kept)

    def _load(self) -> _Kept:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return _Kept()

    def _save(self, kept: _Kept) -> None:
        save(self.path, msgspec.json.format(msgspec.json.encode(kept)))


def _key(job: Job) -> str:
    return f"{identity(job.device.props, job.files[0])}; probe {_VERSION}"


def identity(props: DeviceProps, file: Path) -> str:
    """What a measurement holds for: device, driver, kernel and the file system that `file` is on. Raises OSError where
    there is no such file.
    """
    return "; ".join(
        (
            f"{props.kind} {props.arch} {props.name}",
            f"driver {props.driver_version}",
            f"kernel {os.uname().release}",
            file_system(file),
        )
    )
