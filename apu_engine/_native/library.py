"""Finds and opens libapu.so with the `_cdef.py` generated beside it, and refuses a pair that does not match.

The two files lie together: in this package when installed from a wheel, in the build folder or the
environment's site-packages when installed in editable form. Version and every struct's size and field offsets
are compared once, so that a stale library is an error message and not a misread struct.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from apu_engine.errors import ApuError

LIBRARY = "libapu.so"
_CDEF = "apu_engine._native._cdef"
_REBUILD = "rebuild it with ./build.sh or `pip install -e .`"


def _folders() -> Iterator[Path]:
    here = Path(__file__).resolve().parent
    yield here
    root = here.parent.parent
    if (root / "native" / "include" / "apu.h").exists():  # a source tree: its own build is never older than the copy
        yield root / "build" / "editable"
    spec = importlib.util.find_spec(_CDEF)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent


def find() -> Path:
    """Folder that holds both files. Raises ApuError when no folder does."""
    tried: list[str] = []
    for folder in _folders():
        if (folder / LIBRARY).exists() and (folder / "_cdef.py").exists():
            return folder
        tried.append(str(folder))
    raise ApuError(f"{LIBRARY} is not built (looked in {', '.join(tried)}); run ./build.sh or `pip install -e .`")


def kernels_folder() -> Path:
    """Folder of the GPU's code objects: beside libapu.so, else this package's.

    The folder need not exist: opening a device then says how to build what it needs.
    """
    own = Path(__file__).resolve().parent / "kernels"
    beside = find() / "kernels"
    return beside if beside.is_dir() else own


def open_library() -> tuple[Any, Any, Path]:
    """(ffi, lib, path of the library), checked against each other."""
    folder = find()
    path = folder / LIBRARY
    ffi = _load_cdef(folder / "_cdef.py").ffi
    try:
        lib = ffi.dlopen(str(path))
    except OSError as error:
        raise ApuError(f"{path}: cannot be loaded: {error}; {_REBUILD}") from None
    check_abi(ffi, lib, path)
    return ffi, lib, path


def _load_cdef(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_CDEF, path)
    if spec is None or spec.loader is None:
        raise ApuError(f"{path}: cannot be imported; {_REBUILD}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_CDEF] = module
    spec.loader.exec_module(module)
    return module


def check_abi(ffi: Any, lib: Any, path: Path) -> None:
    """Raises ApuError that names the struct when `lib` and the generated declarations disagree."""
    found = lib.apu_abi_version()
    if found != lib.APU_ABI_VERSION:
        raise ApuError(f"{path}: expected ABI version {lib.APU_ABI_VERSION}, found {found}; {_REBUILD}")
    native = {
        name: [int(number) for number in numbers]
        for name, *numbers in (line.split() for line in ffi.string(lib.apu_abi_layout()).decode().splitlines())
    }
    for name in ffi.list_types()[0]:
        type_ = ffi.typeof(name)
        if type_.kind != "struct":
            continue
        try:
            size = ffi.sizeof(type_)  # before `fields`: cffi fills them in lazily
        except ffi.error:
            continue  # opaque
        expected = [size, *(field.offset for _, field in type_.fields)]
        if native.pop(name, None) != expected:
            raise ApuError(f"{path}: struct {name} is laid out differently from apu.h; {_REBUILD}")
    if native:
        raise ApuError(f"{path}: struct {next(iter(native))} is not in the generated declarations; {_REBUILD}")
