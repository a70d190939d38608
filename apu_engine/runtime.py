"""Which copy of AMD's runtime, libamdhip64, this process uses, and where the others are.

Looked for by exact soname (pip's packages have no plain .so) in: APU_HIP_LIBRARY, a copy that is loaded already (torch
brings one), ROCm's Python packages, ROCM_PATH, /opt/rocm and its versioned and core folders, the loader's path. The
first two decide by themselves: two copies in one process do not work together, and the native library refuses the
second. Of several that are installed, the newest that shows this GPU wins: a child process asks each until one does.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from apu_engine.config import hip_library_wanted, library_folders
from apu_engine.memory.machine import Machine

STEM = "libamdhip64.so"
_SONAME = re.compile(re.escape(STEM) + r"\.(\d{1,3})")
_PACKAGES = ("_rocm_sdk_core",)
_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib", "lib/x86_64-linux-gnu", "lib64", "lib")
_PROBE_S = 30.0  # a runtime that takes longer to answer is taken for one that hangs


@dataclass(frozen=True, slots=True)
class Copy:
    """One installed libamdhip64: `source` says where from, for people; `version` is ROCm's as far as known."""

    path: Path
    source: str
    version: tuple[int, ...] = ()

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version)) or "unknown version"

    def __str__(self) -> str:
        return f"{self.path} ({self.version_text}, {self.source})"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The copy to open, and why; `refused` are newer ones that do not show the GPU, with what they said."""

    copy: Copy
    reason: str
    refused: tuple[tuple[Copy, str], ...] = ()

    def __str__(self) -> str:
        found = f"{self.copy.path}, {self.copy.version_text}, {self.reason}"
        passed = "; ".join(f"{copy.path}, {copy.version_text}, was passed over: {why}" for copy, why in self.refused)
        return f"{found}; {passed}" if passed else found


def choose(
    gfx: str | None = None, machine: Machine | None = None, probe: Callable[[Copy], str | list[str]] | None = None
) -> Chosen | None:
    """The copy for a GPU of target `gfx` (None: for any GPU); None when there is none to be found.

    `probe` gives the targets that a copy shows, or what keeps it from working.
    """
    if named := hip_library_wanted():
        return Chosen(Copy(Path(named), "APU_HIP_LIBRARY", _version(Path(named))), "named by APU_HIP_LIBRARY")
    for path in loaded():
        source = "torch" if "torch" in path.parts else "this process"
        return Chosen(Copy(path, source, _version(path)), f"loaded already by {source}")
    copies = installed(machine)
    if len(copies) < 2:
        return Chosen(copies[0], f"from {copies[0].source}") if copies else None
    refused: list[tuple[Copy, str]] = []
    newest_first = sorted(copies, key=lambda copy: copy.version, reverse=True)
    for copy in newest_first:
        found = (probe or targets)(copy)
        if isinstance(found, str):
            refused.append((copy, found))
        elif gfx is not None and gfx not in found:
            refused.append((copy, f"shows {', '.join(found) or 'no device'}, not {gfx}"))
        else:
            return Chosen(copy, f"from {copy.source}, the newest of {len(copies)} that works", tuple(refused))
    first = newest_first[0]
    return Chosen(first, f"from {first.source}, the newest of {len(copies)}, of which none works", tuple(refused[1:]))


def loaded() -> list[Path]:
    """Files of the runtime that this process has mapped, each once."""
    found: dict[Path, None] = {}
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line[73:] if len(line) > 73 else ""
        if path.rpartition("/")[2].startswith(STEM):
            found[Path(path)] = None
    return list(found)


def installed(machine: Machine | None = None) -> list[Copy]:
    """All copies in the order in which they are looked for, each file once."""
    machine = machine or Machine()
    found: dict[Path, Copy] = {}
    for folder, source, version in _folders(machine):
        for path in _sonames(folder):
            real = path.resolve()
            if real not in found:
                found[real] = Copy(path, source, version or _version(real))
    return list(found.values())


def _folders(machine: Machine) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """(folder, where it is from, version) of each place; a version of () is told by the file's name."""
    rocm, searched = library_folders()
    if machine.real:
        yield from _packages()
        if rocm:
            yield Path(rocm, "lib"), f"ROCM_PATH={rocm}", _release(Path(rocm))
    opt = machine.path("opt")
    roots = [opt / "rocm"]
    for parent, pattern in ((opt / "rocm", "core*"), (opt, "rocm-*"), (opt / "rocm", "rocm-*")):
        roots += sorted(parent.glob(pattern), reverse=True)
    for root in roots:
        yield root / "lib", str(root), _release(root)
    if machine.real:
        for name in searched:
            yield Path(name), "LD_LIBRARY_PATH", ()
        for folder in _linker_folders():
            yield folder, "the system's libraries", ()
    for name in _FOLDERS:
        yield machine.path(name), "the system's libraries", ()


def _packages() -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """ROCm's Python packages in this environment."""
    import importlib.util
    from importlib.metadata import PackageNotFoundError, version

    for name in _PACKAGES:
        package = importlib.util.find_spec(name)
        for folder in (package.submodule_search_locations or []) if package else []:
            distribution = name.strip("_").replace("_", "-")
            try:
                numbers = _numbers(version(distribution))
            except PackageNotFoundError:
                numbers = ()
            yield Path(folder, "lib"), f"the Python package {distribution}", numbers


def _linker_folders() -> list[Path]:
    """Folders in which the dynamic linker's cache has the library."""
    for command in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            done = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        paths = re.findall(rf"^\s*{re.escape(STEM)}\.\d+ .*=> (/.*)$", done.stdout, re.M)
        return list(dict.fromkeys(Path(path).parent for path in paths))
    return []


def _sonames(folder: Path) -> list[Path]:
    """The folder's libraries by soname, newest first."""
    found = []
    try:
        for path in folder.iterdir():
            if (match := _SONAME.fullmatch(path.name)) and path.is_file():
                found.append((int(match[1]), path))
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def _release(root: Path) -> tuple[int, ...]:
    """ROCm's version as its folder tells it."""
    try:
        return _numbers((root / ".info/version").read_text())
    except OSError:
        return ()


def _version(path: Path) -> tuple[int, ...]:
    """From the file's full name: libamdhip64.so.7.1.70101 is 7.1.1."""
    return _numbers(path.resolve().name.rpartition(".so.")[2])


def _numbers(text: str) -> tuple[int, ...]:
    found = re.match(r"\s*(\d{1,4})(?:\.(\d{1,4}))?(?:\.(\d{1,9}))?", text)
    numbers = [int(part) for part in found.groups() if part is not None] if found else []
    if len(numbers) == 3 and numbers[2] >= 10000:  # major, minor and patch in two digits each
        numbers[2] %= 100
    return tuple(numbers)


def targets(copy: Copy) -> str | list[str]:
    """The targets of the GPUs that this copy shows, asked in a process of its own; a text says what went wrong."""
    command = [sys.executable, "-m", "apu_engine.runtime", str(copy.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"did not answer within {_PROBE_S:g} s"
    except OSError as error:
        return f"could not be tried: {error.strerror}"
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return f"ended the process that tried it (status {done.returncode})"
    return [str(name) for name in answer] if isinstance(answer, list) else str(answer)


def _probe(path: str) -> str | list[str]:
    try:
        library = ctypes.CDLL(path)
        ask = getattr(library, "hipGetDevicePropertiesR0600", None) or library.hipGetDeviceProperties
        count = ctypes.c_int(0)
        for status in (library.hipInit(0), library.hipGetDeviceCount(ctypes.byref(count))):
            if status:
                return f"shows no device (error {status})"
    except (OSError, AttributeError) as error:
        return str(error)
    found = []
    for index in range(count.value):
        properties = ctypes.create_string_buffer(1 << 16)  # larger than the struct of any version
        if ask(properties, index) == 0 and (name := re.search(rb"gfx[0-9a-f]{3,5}", properties.raw)):
            found.append(name[0].decode())
    return found


if __name__ == "__main__":
    print(json.dumps(_probe(sys.argv[1])))
