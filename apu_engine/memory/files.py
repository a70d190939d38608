"""Opening a file that is about to be mapped: regular, readable, and never one whose opening blocks. Also what measuring
needs of files: which file system one is on, one of noise, one that is written whole or not at all.

`stat` comes before `open`, because opening a device can have side effects; O_NONBLOCK and the second check
on the descriptor cover a path that is exchanged in between (a FIFO without a writer would block for ever).
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from apu_engine.errors import MappingError

_NOISE = ".apu-engine-"
_NOISE_AGE = 60  # seconds
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Open `path` read-only and close-on-exec; return (descriptor, fstat). The caller closes the descriptor.

    Raises MappingError when the path is missing, unreadable or not a regular file.
    """
    try:
        _require_regular(path, Path(path).stat())
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise MappingError(path, _explain(path, error)) from None
    except ValueError as error:  # a NUL byte in the path
        raise MappingError(path, f"is no usable path: {error}") from None
    try:
        info = os.fstat(fd)
        _require_regular(path, info)
    except BaseException:
        os.close(fd)
        raise
    return fd, info


def _require_regular(path: str | os.PathLike[str], info: os.stat_result) -> None:
    if stat.S_ISREG(info.st_mode):
        return
    kind = next((name for test, name in _KINDS if test(info.st_mode)), "not a regular file")
    raise MappingError(path, f"is {kind}; a model is a regular file")


def _explain(path: str | os.PathLike[str], error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        if Path(path).is_symlink():
            return f"is a link to {Path(path).readlink()}, which does not exist; download the file again"
        return "does not exist; check the path"
    if isinstance(error, PermissionError):
        return f"may not be read by user {os.geteuid()}; check the permissions of the file and of its folders"
    return f"cannot be opened: {error.strerror}"


def file_system(path: str | os.PathLike[str]) -> str:
    """Type and source of the file system that a file is on: `ext4 /dev/nvme0n1p2`. Raises OSError without the file."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            head, _, tail = line.partition(" - ")
            if head.split()[2] == wanted:
                kind, source, *_ = tail.split()
                return f"{kind} {source}"
    return f"device {wanted}"


def save(path: Path, data: bytes) -> bool:
    """Puts a small file in its place at once, its folder too; False, and nothing changed, where that cannot be."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


@contextmanager
def noise_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of noise, whole MiB of it, that stands for a model and is removed again: in `folder`, or where that cannot
    be written, in the system's folder for such files.
    """
    import numpy as np

    place = folder if folder.is_dir() and os.access(folder, os.W_OK) else None
    _remove_left_behind(Path(place or tempfile.gettempdir()))
    with (
        tempfile.NamedTemporaryFile(prefix=_NOISE, suffix=".tmp", dir=place) as file,
        _removed_on_sigterm(Path(file.name)),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        piece = np.random.default_rng(1).bytes(1 << 20)
        for number in range(nbytes >> 20):
            file.write(number.to_bytes(4, "little") + piece[4:])
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def _remove_left_behind(folder: Path) -> None:
    """Removes files of noise whose process was killed: old ones that nobody holds locked."""
    for path in folder.glob(f"{_NOISE}*.tmp"):
        with suppress(OSError), path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _NOISE_AGE:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@contextmanager
def _removed_on_sigterm(path: Path) -> Iterator[None]:
    """SIGTERM removes the file and ends the process at once, also while native code runs: a thread waits for it."""
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or not usual:
        yield
        return
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)

    def wait() -> None:
        while (number := os.read(reading, 1)) and number[0]:
            if number[0] == signal.SIGTERM:
                path.unlink(missing_ok=True)
                os._exit(128 + signal.SIGTERM)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")
        waiting.join()
        os.close(reading)
        os.close(writing)
