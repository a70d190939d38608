"""Builds the stand-in for libamdhip64 (tests/gpu/double) and the "code objects" it runs, and arranges its faults.

`library()` is a shared object with the runtime's symbols, `library(hide=...)` one that lacks some of them.
`code_object()` lists the shared objects that shim.py compiles from the kernels. Both are kept in build/shim.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shim import CACHE, KERNELS, compile_kernels, find_compiler, locked

SOURCES = Path(__file__).with_name("double")
LIVE = ("allocations", "pinned", "streams", "events", "modules", "graphs", "execs", "registrations", "range_bytes")
TOTALS = ("most_device_bytes", "most_pinned_bytes", "copied_bytes", "pageable_bytes")


def shared_object(name: str, sources: Iterable[Path], headers: Iterable[Path], flags: Sequence[str] = ()) -> Path:
    """Compiled once for each content; `flags` are the linker's too."""
    compiler, headers = find_compiler(), list(headers)
    options = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    options += ["-Wno-missing-field-initializers", "-pthread", *(flag for flag in flags if not flag.startswith("-Wl,"))]
    with ThreadPoolExecutor(2) as pool:
        objects = list(
            pool.map(lambda source: _made([compiler, "-c", *options], ".o", [source], headers), sorted(sources))
        )
    command = [compiler, "-shared", "-pthread", *flags]
    return _made(command, ".so", objects, [], name, ["-ldl"])


def _made(
    command: Sequence[str],
    suffix: str,
    sources: Sequence[Path],
    headers: Iterable[Path],
    name: str = "",
    libraries: Sequence[str] = (),
) -> Path:
    """What a command makes of `sources`, kept by their content."""
    content = hashlib.sha256("\0".join(command).encode())
    for file in [*sources, *sorted(headers)]:
        content.update(file.read_bytes())
    out = CACHE / f"{name or sources[0].stem}-{content.hexdigest()[:16]}{suffix}"
    with locked(out):
        if not out.exists():
            partial = out.with_suffix(f".{os.getpid()}{suffix}")
            subprocess.run([*command, "-o", str(partial), *map(str, sources), *libraries], check=True)
            partial.replace(out)
    return out


def library(hide: Sequence[str] = (), flags: Sequence[str] = ()) -> Path:
    """The double; `hide` names symbols that an older or broken runtime lacks."""
    if hide:
        script = CACHE / f"hide-{'-'.join(hide)}.map"
        with locked(script):
            if not script.exists():
                script.write_text("{ local: " + " ".join(f"{name};" for name in hide) + " };\n")
        flags = [*flags, f"-Wl,--version-script={script}"]
    return shared_object("libamdhip64-double", SOURCES.glob("*.cpp"), SOURCES.glob("*.h"), flags)


def code_object(folder: Path, arch: str = "gfx1151", files: Iterable[Path] | None = None) -> Path:
    """`folder`/`arch`.co for kernel files, all of native/gpu/kernels by default; wave size 64 for gfx90a."""
    wave = 64 if arch == "gfx90a" else 32
    files = sorted(KERNELS.glob("*.hip")) if files is None else list(files)
    with ThreadPoolExecutor(2) as pool:
        objects = [path for path, _ in pool.map(lambda file: compile_kernels(file, wave), files)]
    out = folder / f"{arch}.co"
    partial = out.with_suffix(f".{os.getpid()}")  # processes that share a folder see all of it
    partial.write_bytes("\n".join(["apu hip double", arch, *map(str, objects)]).encode() + b"\0")
    partial.replace(out)
    return out


def counted(path: Path) -> dict[str, int]:
    """What the double of another process writes to the file that APU_HIP_DOUBLE_COUNTS names; zeros before it does."""
    numbers = array("Q", path.read_bytes() if path.exists() else b"") or array("Q", [0] * len(LIVE + TOTALS))
    return dict(zip(LIVE + TOTALS, numbers, strict=True))


class HipDouble:
    """The double as loaded in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.apu_double_error.restype = ctypes.c_char_p

    def set(self, **faults: object) -> None:
        """Replaces what is arranged, and forgives an earlier fault: see `fault("...")` in tests/gpu/double."""
        self._library.apu_double_set(" ".join(f"{key}={value}" for key, value in faults.items()).encode())

    def fail(self, error: str) -> None:
        """A fault has happened: every call answers with this error from now on."""
        self._library.apu_double_fail(error.encode())

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist; `range_bytes` of host memory that the device can reach in place."""
        return {name: count for name, count in self._counts().items() if name in LIVE}

    def totals(self) -> dict[str, int]:
        """Since the last `set`: most bytes allocated at any one time, bytes copied to the device."""
        return {name: count for name, count in self._counts().items() if name in TOTALS}

    def _counts(self) -> dict[str, int]:
        counts = (ctypes.c_uint64 * len(LIVE + TOTALS))()
        self._library.apu_double_counts(counts)
        return dict(zip(LIVE + TOTALS, counts, strict=True))

    def error(self) -> str:
        """What the last kernel that failed said."""
        return str(self._library.apu_double_error().decode())
