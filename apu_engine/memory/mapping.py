"""Model files as memory: PROT_READ and MAP_SHARED, so that the page cache's own pages are the weights.

A Mapping is the only owner of an address range; tensors, numpy views and native code borrow from it. The
range is registered with the native library's SIGBUS guard: a file that shrinks while mapped turns into zero
pages and a recorded fault, which `check` raises as an error that names the file. The descriptor stays open,
so `check` also sees a file that was rewritten in place; a file replaced by renaming leaves the mapped one
intact and is no error.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import MappingError
from apu_engine.memory.budget import memory_available
from apu_engine.memory.files import open_regular
from apu_engine.memory.machine import GIB
from apu_engine.options import format_size

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22  # Linux 5.14
SLICE = 16 << 20  # bytes per readahead call: the grain of progress and of cancelling
_EHWPOISON = 133
_REPLACE = "replace a model by renaming a new file over it, never in place"

_libc = ctypes.CDLL(None, use_errno=True)
for _name, _last in (
    ("madvise", ctypes.c_int),
    ("mincore", ctypes.c_void_p),
    ("mlock", None),
    ("munlock", None),
):
    _function = getattr(_libc, _name)
    _function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([_last] if _last else [])]
    _function.restype = ctypes.c_int


class Mapping:
    """One file, mapped read-only and shared. Also a context manager that closes itself.

    `address` is where byte 0 lies; it and all views are valid until `close`, or after `release` until the last is gone.
    """

    def __init__(self, path: Path, fd: int, info: os.stat_result) -> None:
        self.path = path
        self.nbytes = info.st_size
        self._fd = fd
        self._identity = (info.st_size, info.st_mtime_ns)
        self._map = mmap.mmap(fd, info.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self.address: int = self._bytes.__array_interface__["data"][0]
        self._guard(True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], size: int | None = None) -> Mapping:
        """Map the whole file. `size` is what its header was validated against; another size now is refused.

        Raises MappingError when the file cannot be opened or mapped, is empty, or changed size.
        """
        fd, info = open_regular(path)
        try:
            if size is not None and info.st_size != size:
                raise MappingError(
                    path,
                    f"has {info.st_size:,} bytes, but had {size:,} when its header was read; load it again",
                )
            if not info.st_size:
                raise MappingError(path, "is empty (0 bytes); download it again")
            return cls(Path(path), fd, info)
        except OSError as error:
            os.close(fd)
            raise MappingError(path, _map_failure(info.st_size, error)) from None
        except BaseException:
            os.close(fd)
            raise

    def array(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """A read-only view (nbytes,) of uint8 at byte `offset`; it must be dropped before `close`."""
        if self._bytes is None:
            raise MappingError(self.path, "the mapping is closed")
        length = self.nbytes - offset if nbytes is None else nbytes
        if not (0 <= offset <= self.nbytes and 0 <= length <= self.nbytes - offset):
            raise MappingError(self.path, f"bytes {offset:,} + {length:,} lie outside its {self.nbytes:,} bytes")
        return self._bytes[offset : offset + length]

    def check(self) -> None:
        """Raise MappingError when a mapped page could not be read, or the file was changed in place."""
        from apu_engine import _native

        if self._bytes is None:
            raise MappingError(self.path, "the mapping is closed")
        info = os.fstat(self._fd)
        if info.st_size < self.nbytes:
            raise MappingError(
                self.path,
                f"was truncated from {self.nbytes:,} to {info.st_size:,} bytes while it was mapped; "
                f"restore the file and load it again ({_REPLACE})",
            )
        if _native.faulted() == str(self.path):
            raise MappingError(
                self.path,
                "a mapped page could not be read: the file was truncated for a while, or the disk failed "
                "(see dmesg); load it again",
            )
        if (info.st_size, info.st_mtime_ns) != self._identity:
            raise MappingError(
                self.path,
                f"was written to while it was mapped, so its weights are in doubt; reload it ({_REPLACE})",
            )

    def resident_bytes(self) -> int | None:
        """Bytes of the file in the page cache, or None where the kernel hides that (files of other users)."""
        return _resident(self._fd, self.path, self.address, self.nbytes)

    def prefer_huge_pages(self) -> None:
        """Ask for 2 MiB pages, before anything is read: heard where the file system has large folios, else nothing."""
        _libc.madvise(self.address, self.nbytes, MADV_HUGEPAGE)

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring bytes into the page cache, and into the page table where the kernel can (from Linux 5.14).

        `offset` is a multiple of the page size. Raises MappingError, not SIGBUS, when they cannot be read.
        """
        while _libc.madvise(self.address + offset, nbytes, MADV_POPULATE_READ):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return self._read_through(offset, nbytes)
            if code in (errno.EAGAIN, errno.EINTR):
                continue
            self.check()
            reason = "memory is damaged (see dmesg)" if code == _EHWPOISON else os.strerror(code)
            raise MappingError(self.path, f"readahead of {nbytes:,} bytes at {offset:,} failed: {reason}")
        return None

    def _read_through(self, offset: int, nbytes: int) -> None:
        buffer = bytearray(1 << 20)
        end = offset + nbytes
        while offset < end:
            try:
                count = os.preadv(self._fd, [memoryview(buffer)[: min(len(buffer), end - offset)]], offset)
            except OSError as error:
                raise MappingError(self.path, f"reading at {offset:,} failed: {error.strerror}") from None
            if not count:
                self.check()
                raise MappingError(self.path, f"ends at {offset:,} of {self.nbytes:,} bytes; load it again")
            offset += count

    def _guard(self, on: bool) -> None:
        from apu_engine import _native

        if on:
            _native.guard(self.address, self.nbytes, str(self.path))
        else:
            _native.unguard(self.address)

    def close(self) -> None:
        """Unmap; a second call does nothing. While views live it raises MappingError and changes nothing."""
        if self._bytes is None:
            return
        view, self._bytes = self._bytes, None
        self._guard(False)
        del view
        try:
            self._map.close()
        except BufferError:
            self._bytes = np.frombuffer(self._map, np.uint8)
            self._guard(True)
            raise MappingError(self.path, "cannot be unmapped while arrays still view it; drop them first") from None
        os.close(self._fd)

    def release(self) -> None:
        """Unmap as `close` does, but where views live when the last is gone. Until then the range stays guarded."""
        from apu_engine import _native

        if self._bytes is None:
            return
        view, self._bytes = self._bytes, None
        os.close(self._fd)
        weakref.finalize(view, _native.unguard, self.address).atexit = False
        del self._map  # `view` is what all views hold, and it holds the mapping: it ends its guard, then unmaps

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._bytes is None else f"at {self.address:#x}"
        return f"Mapping({self.path}, {format_size(self.nbytes)}, {state})"


def cached_bytes(fd: int, path: Path, nbytes: int) -> int | None:
    """Bytes of an open file in the page cache; None where the kernel hides that. Nothing is read."""
    with mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        found = _resident(fd, path, view.__array_interface__["data"][0], nbytes)
        del view
        return found


def _resident(fd: int, path: Path, address: int, nbytes: int) -> int | None:
    if os.fstat(fd).st_uid != os.geteuid() and not os.access(path, os.W_OK):
        return None
    flags = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, nbytes, flags.__array_interface__["data"][0]):
        return None
    return min(int((flags & 1).sum()) * mmap.PAGESIZE, nbytes)


def _map_failure(size: int, error: OSError) -> str:
    if error.errno == errno.ENOMEM:
        return f"no address space for {format_size(size)}; raise the limit (`ulimit -v unlimited`)"
    if error.errno == errno.ENODEV:
        return "its file system does not support mapping; copy the file to a local disk"
    return f"cannot be mapped: {error.strerror}"


# ---------------------------------------------------------------- readahead and locking


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a stage that takes a while. `eta_s` is None until there is a rate to go by."""

    stage: str
    done_bytes: int
    total_bytes: int
    gib_per_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What readahead or locking did; `notice` is "", or a line for the user on why it did less than asked."""

    done_bytes: int
    seconds: float
    notice: str = ""


Range = tuple[Mapping, int, int]  # bytes [offset, offset + n) of a mapping, offset a multiple of the page size


def prefetch(
    mappings: Sequence[Mapping],
    threads: int = 4,
    progress: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    ranges: Sequence[Range] | None = None,
) -> Outcome:
    """Read the files, or `ranges` of them, into memory in parallel and in order; `progress` is called from this thread.

    Files larger than the memory available are left alone: reading them ahead would evict their own first
    pages. Stops soon after `cancel` is set, or on KeyboardInterrupt, which is raised again. Raises
    MappingError on a failed read.
    """
    ranges = _whole(mappings) if ranges is None else ranges
    total = sum(nbytes for _, _, nbytes in ranges)
    notice = _too_large(mappings)
    if notice:
        return Outcome(0, 0.0, f"no readahead: {notice}")
    start = time.monotonic()
    work = _Readahead(ranges)
    workers = [threading.Thread(target=work.run, name="readahead", daemon=True) for _ in range(max(1, threads))]
    for worker in workers:
        worker.start()

    def report() -> None:
        if progress:
            seconds = time.monotonic() - start
            rate = work.done / seconds if seconds > 0 else 0.0
            eta = (total - work.done) / rate if rate else None
            progress(Progress("readahead", work.done, total, rate / GIB, eta))

    try:
        for worker in workers:
            while worker.is_alive():
                worker.join(0.05)
                if cancel and cancel.is_set():
                    work.stop = True
                if work.done < total:
                    report()
    finally:
        work.stop = True
        for worker in workers:
            worker.join()
    if work.error:
        raise work.error
    report()
    cut = "readahead was cancelled; pages are read when they are needed" if work.done < total else ""
    return Outcome(work.done, time.monotonic() - start, cut)


class _Readahead:
    """The shared state of the readahead threads: a queue of slices and a sum."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.slices = _slices(ranges)
        self.lock = threading.Lock()
        self.done = 0
        self.stop = False
        self.error: MappingError | None = None

    def run(self) -> None:
        while not self.stop:
            with self.lock:
                piece = next(self.slices, None)
            if piece is None:
                return
            mapping, offset, nbytes = piece
            try:
                mapping.populate(offset, nbytes)
            except MappingError as error:
                self.error, self.stop = error, True
                return
            with self.lock:
                self.done += nbytes


def _whole(mappings: Sequence[Mapping]) -> list[Range]:
    return [(mapping, 0, mapping.nbytes) for mapping in mappings]


def _slices(ranges: Sequence[Range]) -> Iterator[Range]:
    for mapping, begin, nbytes in ranges:
        for offset in range(begin, begin + nbytes, SLICE):
            yield mapping, offset, min(SLICE, begin + nbytes - offset)


def mlock(
    mappings: Sequence[Mapping], ranges: Sequence[Range] | None = None, cancel: threading.Event | None = None
) -> Outcome:
    """Pin the pages of files, or of `ranges` of them, as far as RLIMIT_MEMLOCK lets; closing a mapping unpins them.

    A refusal is no error: the outcome's notice says what to change. Stops soon after `cancel` is set.
    """
    notice = _too_large(mappings)
    if notice:
        return Outcome(0, 0.0, f"not locked: {notice}")
    start = time.monotonic()
    ranges = _whole(mappings) if ranges is None else ranges
    total = sum(nbytes for _, _, nbytes in ranges)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    done = 0
    for mapping, offset, nbytes in _slices(ranges):
        if cancel and cancel.is_set():
            return Outcome(done, time.monotonic() - start, "locking was cancelled")
        if _libc.mlock(mapping.address + offset, nbytes):
            code = ctypes.get_errno()
            mapping.check()
            return Outcome(done, time.monotonic() - start, _lock_refused(done, total, hard, code))
        done += nbytes
    return Outcome(done, time.monotonic() - start)


def _lock_refused(done: int, total: int, limit: int, code: int) -> str:
    if code not in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return f"locked {format_size(done)} of {format_size(total)}: mlock failed: {os.strerror(code)}"
    from apu_engine import access
    from apu_engine.memory.machine import Machine

    machine = Machine()
    helps = "; ".join(access.memlock(access.container(machine), access.host(machine).family))
    size = f"{format_size(done)} of {format_size(total)}"
    return f"locked {size}: the limit on locked memory is {format_size(limit)}; {helps}"


def _too_large(mappings: Sequence[Mapping]) -> str:
    """Why these files do not fit into memory, or "". Pages that are resident already are no new demand."""
    total = sum(mapping.nbytes for mapping in mappings)
    available = memory_available()
    if total <= available:
        return ""
    missing = total - sum(mapping.resident_bytes() or 0 for mapping in mappings)
    if missing <= available:
        return ""
    return (
        f"the weights ({format_size(total)}) exceed the memory available ({format_size(available)}); "
        "they are read from disk again whenever they are needed, which is slow"
    )
