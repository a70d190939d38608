"""Runs GPU kernels on the CPU: .hip files compiled by g++ through native/gpu/kernels/shim.h, launched from Python.

    shim = Shim(["matvec_q8_0.hip"], wave=32, reverse=False)  # compiled once per content, cached in build/shim
    weights = shim.input(array, align=1, padding=16)          # read-only, exact guard zones but for `padding` bytes
    out = shim.output((rows, n), np.float32)                  # poisoned with NaN
    args = shim.args("MatvecArgs", w=shim.args("Matrix", data=weights, rows=n, ...), out=out.address)
    shim.launch("matvec_q8_0_r1", grid=(blocks, 1, 1), threads=256, args=args, lds=0)
    out.array                                                  # numpy, the same memory

`shim.args(struct, **fields)` makes a ctypes twin of any plain struct that the files see (kernel arguments, common.h);
fields take numbers, buffers (their address), nested structs and lists; those not given are zero. `shim.input` takes
such structs too (counts, tables of segments). A failed launch raises ShimError, which names the kernel, the block, the
thread and, for traps, the source line. After each launch every buffer's surroundings are checked for writes.

Run each kernel with wave 32 and 64, forward and reversed (`every_shim`): reversed runs start with the last block, wave
and lane, put buffers at the start of their pages instead of the end, and let asynchronous copies arrive at once instead
of as late as allowed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "native/gpu/kernels"
CACHE = ROOT / "build/shim"
POISON = 0xFF
PAGE = mmap.PAGESIZE

_KERNEL = re.compile(
    r'static_assert\(\((?P<threads>[^;]*?)\) % apu::gpu::kWaveSize == 0, "apu_kernel"\);\s*'
    r'extern "C"\s+__attribute__\(\(visibility\("default"\)\)\)\s+void\s+(?P<name>\w+)\s*\('
)
_STRUCT = re.compile(r"\bstruct\s+(?:alignas\(\d+\)\s*)?(\w+)\s*\{([^{}()]*)\}\s*;")
_ENUM = re.compile(r"\benum\s+(?:class\s+)?(\w+)")
_CONSTANT = re.compile(r"\bconstexpr\s+\w+\s+(k\w+)\s*=\s*(0x[0-9a-fA-F]+|\d+)u?\s*;")
_FIELD = re.compile(r"(?:const\s+)?([\w:]+)\s*((?:\*|const\b|\s)*)(.+)", re.S)
_SCALARS: dict[str, Any] = {
    **{f"u{n}": getattr(ctypes, f"c_uint{n}") for n in (8, 16, 32, 64)},
    **{f"i{n}": getattr(ctypes, f"c_int{n}") for n in (8, 16, 32, 64)},
    **{f"uint{n}_t": getattr(ctypes, f"c_uint{n}") for n in (8, 16, 32, 64)},
    **{f"int{n}_t": getattr(ctypes, f"c_int{n}") for n in (8, 16, 32, 64)},
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
}


class ShimError(RuntimeError):
    """A launch failed, or wrote outside of a buffer."""


def find_compiler() -> str:
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++", "clang++-19"):
        if candidate and shutil.which(candidate):
            return candidate
    raise ShimError("no C++ compiler; set CXX")


@lru_cache
def _flags() -> tuple[str, ...]:
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-DAPU_GPU_SHIM"]
    flags += ["-w", "-fvisibility=hidden", f"-I{KERNELS}", f"-I{ROOT / 'native'}"]
    # Undefined behaviour that vendors answer differently: traps, reported with their line.
    flags += ["-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero"]
    flags += [
        "-fsanitize-undefined-trap-on-error"
        if "clang" not in find_compiler()
        else "-fsanitize-trap=alignment,bounds,shift-exponent,integer-divide-by-zero"
    ]
    cpu = Path("/proc/cpuinfo")
    words = set(cpu.read_text().split()) if cpu.exists() else set()
    if {"avx2", "fma"} <= words:
        flags += ["-mavx2", "-mfma"]
    return tuple(flags)


@contextmanager
def locked(made: Path) -> Iterator[None]:
    """One process at a time makes a file that is kept; the next one finds it."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_name(f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@lru_cache
def _headers() -> str:
    """A digest of whatever a kernel file may include, and of the compiler."""
    program = Path(shutil.which(find_compiler()) or "").resolve()
    digest = hashlib.sha256(f"{program} {program.stat().st_size} {program.stat().st_mtime_ns}".encode())
    for file in sorted((ROOT / "native").rglob("*.h")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@lru_cache
def compile_kernels(file: str | Path, wave: int = 32, defines: tuple[str, ...] = ()) -> tuple[Path, str]:
    """The shared object of a kernel file (relative to native/gpu/kernels, or absolute) and its preprocessed text
    without that of the compiler's own headers.

    The object exports apu_shim_launch and apu_shim_kernel (see shim_launch.h).
    """
    path = KERNELS / file
    flags = [*_flags(), f"-DAPU_SHIM_WAVE={wave}", *(f"-D{d}" for d in defines)]
    parts = [_headers(), str(path), path.read_text(), *flags]
    # Without running the preprocessor: where no header changed, the object and text of the last time.
    known = CACHE / f"{path.stem}-w{wave}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"
    with locked(known):
        if known.exists():
            kept = json.loads(known.read_text())
            if Path(kept["object"]).exists():
                return Path(kept["object"]), kept["text"]
        out, text = _compile(path, wave, flags)
        partial = known.with_suffix(".partial")
        partial.write_text(json.dumps({"object": str(out), "text": text}))
        partial.replace(known)
    return out, text


def _compile(path: Path, wave: int, flags: list[str]) -> tuple[Path, str]:
    pre = subprocess.run([find_compiler(), "-x", "c++", "-E", *flags, str(path)], capture_output=True, text=True)
    if pre.returncode:
        raise ShimError(f"{path.name}: {pre.stderr}")
    text = re.sub(r"^#.*$", "", pre.stdout, flags=re.M)
    key = hashlib.sha256("\0".join([find_compiler(), *flags, text]).encode()).hexdigest()[:16]
    out = CACHE / f"{path.stem}-w{wave}-{key}.so"
    text = _of_files(pre.stdout, {str(path.parent), str(ROOT)})
    with locked(out):
        if out.exists():
            return out, text
        entries = "".join(
            f'{{"{m["name"]}", {m["threads"]}, Call<&{m["name"]}>::bytes, &Call<&{m["name"]}>::call}}, '
            for m in _KERNEL.finditer(text)
        )
        table = f"\nnamespace apu::gpu::shim {{ const Entry entries[] = {{{entries}{{}}}}; }}\n"
        with tempfile.TemporaryDirectory(dir=CACHE) as tmp:
            source, made = Path(tmp) / f"{path.stem}.ii", Path(tmp) / "k.so"
            source.write_text(pre.stdout + table)
            command = [find_compiler(), "-shared", *flags, "-o", str(made), str(source)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                raise ShimError(f"{path.name}: {run.stderr}")
            made.replace(out)
    return out, text


def _of_files(preprocessed: str, folders: set[str]) -> str:
    """The lines that come from files in these folders, by the preprocessor's marks."""
    kept = []
    for part in re.split(r"^# \d+ ", preprocessed, flags=re.M):
        mark, _, lines = part.partition("\n")
        if any(mark.startswith(f'"{folder}/') for folder in folders):
            kept.append(re.sub(r"^#.*$", "", lines, flags=re.M))
    return "".join(kept)


@lru_cache
def _declared(text: str) -> tuple[dict[str, str], dict[str, int], set[str]]:
    """Bodies of plain structs (the first of each name), constants and names of enums."""
    structs: dict[str, str] = {}
    for m in _STRUCT.finditer(text):
        structs.setdefault(m[1], m[2])
    return structs, {m[1]: int(m[2], 0) for m in _CONSTANT.finditer(text)}, set(_ENUM.findall(text))


class Buffer:
    """Device memory of a test: an array between inaccessible pages and `padding` bytes that may be read, not written.

    In forward runs the data ends where the pages end, in reversed runs it begins where they begin (rounded to `align`).
    """

    def __init__(self, nbytes: int, align: int, padding: int, at_start: bool) -> None:
        pages = (nbytes + 2 * padding + align + PAGE - 1) // PAGE * PAGE
        self._map = mmap.mmap(-1, pages + 2 * PAGE)
        self._all = np.frombuffer(self._map, np.uint8)
        self._all[:] = POISON
        base = self._all.ctypes.data
        low, high = base + PAGE, base + PAGE + pages
        at = -(-(low + padding) // align) * align if at_start else (high - padding - nbytes) // align * align
        self.address = at
        self.nbytes = nbytes
        self._span = (low, high)
        self.bytes = self._all[at - base : at - base + nbytes]
        _protect(base, PAGE, 0)
        _protect(high, PAGE, 0)

    def _freeze(self) -> None:
        _protect(self._span[0], self._span[1] - self._span[0], mmap.PROT_READ)

    def check(self) -> None:
        base = self._all.ctypes.data
        for name, begin, end in (
            ("before", self._span[0], self.address),
            ("after", self.address + self.nbytes, self._span[1]),
        ):
            changed = np.flatnonzero(self._all[begin - base : end - base] != POISON)
            if len(changed):
                offset = begin + int(changed[0]) - self.address
                raise ShimError(
                    f"{len(changed)} bytes {name} a buffer of {self.nbytes} were written, first at {offset}"
                )

    @property
    def array(self) -> npt.NDArray[Any]:
        return self.bytes.view(self.dtype).reshape(self.shape)

    dtype: np.dtype[Any] = np.dtype(np.uint8)
    shape: tuple[int, ...] = (-1,)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _protect(address: int, nbytes: int, protection: int) -> None:
    if _libc.mprotect(address, nbytes, protection):
        raise OSError(ctypes.get_errno(), "mprotect")


class Shim:
    """Kernel files compiled for one wave size and run in one order."""

    def __init__(
        self, files: Iterable[str | Path], wave: int = 32, reverse: bool = False, defines: Sequence[str] = ()
    ) -> None:
        self.wave, self.reverse = wave, reverse
        self.bulk_copies = "APU_SHIM_ASYNC" in defines
        self._buffers: list[Buffer] = []
        self._structs: dict[str, type[ctypes.Structure]] = {}
        self._texts: list[str] = []
        self._kernels: dict[str, tuple[ctypes.CDLL, Path]] = {}
        for file in files:
            path, text = compile_kernels(file, wave, tuple(defines))
            library = ctypes.CDLL(str(path))
            library.apu_shim_launch.argtypes = [
                ctypes.c_char_p,
                ctypes.c_uint32 * 3,
                ctypes.c_uint32,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_uint64,
                ctypes.c_uint32,
                ctypes.c_char_p,
                ctypes.c_uint64,
            ]
            self._texts.append(text)
            for m in _KERNEL.finditer(text):
                self._kernels[m["name"]] = (library, path)

    @property
    def kernels(self) -> list[str]:
        return sorted(self._kernels)

    def threads(self, kernel: str) -> int:
        """With how many threads the kernel is declared."""
        name, threads, nbytes = ctypes.c_char_p(), ctypes.c_uint32(), ctypes.c_uint64()
        library, index = self._kernels[kernel][0], 0
        while library.apu_shim_kernel(index, ctypes.byref(name), ctypes.byref(threads), ctypes.byref(nbytes)):
            if name.value == kernel.encode():
                return threads.value
            index += 1
        raise KeyError(kernel)

    # Memory

    def input(self, data: Any, align: int = 16, padding: int = 0, readonly: bool = True) -> Buffer:
        """A copy of an array, of bytes or of ctypes structures (one or a list), that kernels may only read."""
        if isinstance(data, list) and data and isinstance(data[0], ctypes.Structure):
            data = b"".join(bytes(d) for d in data)
        if isinstance(data, ctypes.Structure | ctypes.Array):
            data = bytes(data)
        array = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray) else np.ascontiguousarray(data)
        buffer = self._buffer(array.shape, array.dtype, align, padding)
        buffer.array[...] = array
        if readonly:
            buffer._freeze()
        return buffer

    def output(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, align: int = 16, padding: int = 0) -> Buffer:
        """Memory that kernels may write, full of poison (0xFF bytes: NaN, -1)."""
        return self._buffer((shape,) if isinstance(shape, int) else shape, np.dtype(dtype), align, padding)

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any], align: int, padding: int) -> Buffer:
        buffer = Buffer(int(np.prod(shape)) * dtype.itemsize, align, padding, self.reverse)
        buffer.shape, buffer.dtype = shape, dtype
        self._buffers.append(buffer)
        return buffer

    def clear(self) -> None:
        """Forgets the buffers made so far (they live as long as the Shim, since kernels know them by address)."""
        self._buffers.clear()

    # Structures

    def struct(self, name: str) -> type[ctypes.Structure]:
        """The ctypes twin of a plain struct that one of the files sees."""
        if name not in self._structs:
            for text in self._texts:
                structs, constants, _ = _declared(text)
                if name in structs:
                    parts = structs[name].split(";")
                    fields = [field for part in parts for field in self._fields(part.strip(), constants)]
                    self._structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
                    return self._structs[name]
            raise KeyError(f"no plain struct {name} in the kernel files")
        return self._structs[name]

    def _fields(self, declaration: str, constants: dict[str, int]) -> Iterator[tuple[str, Any]]:
        if not declaration or declaration.startswith(("static", "using", "typedef")):
            return
        m = _FIELD.fullmatch(declaration)
        if m is None:
            raise ValueError(f"not a plain field: {declaration}")
        base, stars, names = m[1].rpartition("::")[2], m[2].count("*"), m[3]
        for item in names.split(","):
            item = item.partition("=")[0].strip()
            pointer = stars > 0 or item.startswith("*")
            stars = 0 if not item.startswith("*") and item is not names.split(",")[0] else stars
            size = re.fullmatch(r"\**\s*(\w+)\s*((?:\[\w+\])*)", item)
            if size is None:
                raise ValueError(f"not a plain field: {declaration}")
            kind = ctypes.c_void_p if pointer else _SCALARS.get(base) or self._enum_or_struct(base)
            for n in reversed(re.findall(r"\[(\w+)\]", size[2])):
                kind = kind * (int(n.rstrip("u"), 0) if n[0].isdigit() else constants[n])
            yield size[1], kind

    def _enum_or_struct(self, name: str) -> Any:
        if any(name in _declared(text)[2] for text in self._texts):
            return ctypes.c_uint32
        return self.struct(name)

    def args(self, struct: str, **fields: Any) -> Any:
        """A struct with these fields; buffers become addresses, dicts nested structs."""
        made = self.struct(struct)()
        kinds = {str(f[0]): f[1] for f in made._fields_}
        for name, value in fields.items():
            if name not in kinds:
                raise TypeError(f"{struct} has no field {name}; it has {', '.join(kinds)}")
            setattr(made, name, self._value(kinds[name], value))
        return made

    def _value(self, kind: Any, value: Any) -> Any:
        if isinstance(value, Buffer):
            return value.address
        if isinstance(value, dict):
            return self.args(kind.__name__, **value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list | tuple):
            return kind(*(self._value(kind._type_, v) for v in value))
        return value

    # Launch

    def launch(
        self, name: str, grid: int | tuple[int, ...], threads: int, args: ctypes.Structure | bytes, lds: int = 0
    ) -> None:
        """Runs a kernel to its end; ShimError says what went wrong, and where."""
        if name not in self._kernels:
            raise ShimError(f"no kernel {name}; there are {', '.join(self.kernels)}")
        library, path = self._kernels[name]
        sizes = (grid,) if isinstance(grid, int) else grid
        dims = (ctypes.c_uint32 * 3)(*sizes, *(1,) * (3 - len(sizes)))
        argument, error = bytes(args), ctypes.create_string_buffer(1500)
        failed = library.apu_shim_launch(
            name.encode(), dims, threads, lds, argument, len(argument), self.reverse, error, len(error)
        )
        if failed:
            text = error.value.decode()
            raise ShimError(self._nearby(text) + _source_line(text, path))
        for buffer in list(self._buffers):
            try:
                buffer.check()
            except ShimError as e:
                self._buffers.remove(buffer)
                raise ShimError(f"kernel {name}: {e}") from None

    def _nearby(self, text: str) -> str:
        at = re.search(r"fault at address (0x[0-9a-f]+)", text)
        if at is None:
            return text
        address = int(at[1], 16)
        for b in self._buffers:
            if b._span[0] - PAGE <= address < b._span[1] + PAGE:
                kind = "writes to" if b._span[0] <= address < b._span[1] else "at"
                return f"{text}: {kind} byte {address - b.address} of a buffer of {b.nbytes} bytes, {b.dtype}{b.shape}"
        return text


def _source_line(text: str, path: Path) -> str:
    at = re.search(r"\+0x([0-9a-f]+) of the code", text)
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line-19")
    if at is None or tool is None:
        return ""
    lines = subprocess.run([tool, "-e", str(path), "-i", f"0x{at[1]}"], capture_output=True, text=True).stdout
    return " (" + ", from ".join(Path(line).name for line in lines.splitlines()) + ")"


def every_shim(files: Sequence[str | Path], defines: Sequence[str] = ()) -> Iterator[Shim]:
    """The files for wave 32 and 64, forward and reversed."""
    for wave in (32, 64):
        for reverse in (False, True):
            yield Shim(files, wave, reverse, defines)
