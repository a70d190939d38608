"""A strict reader of safetensors headers.

Layout: the header's length in 8 bytes, the header as a JSON object, the data. An entry of the header gives a tensor's
dtype, shape and [begin, end) within the data; `__metadata__` holds strings. Every byte of the data belongs to exactly
one tensor; any byte may be its first, since files of odd offsets are published and valid. The header is untrusted: it
is read into ordinary memory, bounded, and every number is compared before it is used. Source of the format:
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from apu_engine.errors import FormatError, MappingError
from apu_engine.memory.files import open_regular
from apu_engine.weights.strict_json import parse_json

MAX_HEADER = 100_000_000  # bytes, as the format has it
MAX_NAME = 4096  # bytes
MAX_DIMS = 8
MAX_DIM = (1 << 63) - 1

# dtype -> bits of an element
DTYPES: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
_ENTRY = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"

# What people really pass: first bytes -> what the file is, what to do.
_OTHER_FILES = (
    (b"version ", "is a Git LFS pointer, not the model itself; run `git lfs pull`"),
    (b"GGUF", "is a GGUF file; give its name the ending .gguf"),
    (b"<!DOCTYPE", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"<!doctype", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"<html", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"PK\x03\x04", "is a zip archive or a PyTorch checkpoint; download the safetensors files of the model"),
    (b"\x80\x02", "is a pickled PyTorch checkpoint; download the safetensors files of the model"),
    (b'{"', "is a JSON document; a failed download leaves such a file: download it again"),
)


class Entry(NamedTuple):
    """One tensor: `nbytes` bytes at absolute `offset`; `shape` is row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says."""

    path: Path
    size: int
    metadata: dict[str, str]
    tensors: dict[str, Entry]


def read_header(path: Path, whole: bool = True) -> Header:
    """The header of one file, which may end before its tensors do unless `whole`.

    Raises FormatError naming the file, the field, what was found and what to do."""
    try:
        fd, info = open_regular(path)
    except MappingError as error:
        raise FormatError(error.file, "", error.problem) from None
    with os.fdopen(fd, "rb") as file:
        if not info.st_size:
            raise FormatError(path, "", "is empty (0 bytes); download it again")
        first = file.read(8)
        begin = file.read(1)
        for magic, what in _OTHER_FILES:  # a header's length may look like any of them
            if first.startswith(magic[:8]) and begin != b"{":
                raise FormatError(path, "header length", what)
        if len(first) < 8:
            raise FormatError(path, "header length", f"the file has only {len(first)} bytes; download it again")
        (length,) = struct.unpack("<Q", first)
        if length > MAX_HEADER:
            raise FormatError(
                path, "header length", f"expected at most {MAX_HEADER:,}, found {length:,}: no safetensors file"
            )
        if length > info.st_size - 8:
            raise FormatError(
                path,
                "header length",
                f"is {length:,}, but the file has only {info.st_size - 8:,} bytes left: it is truncated or corrupt; "
                "download it again",
            )
        raw = begin + file.read(length - 1) if length else b""
    if len(raw) != length:
        raise FormatError(path, "header", "the file shrank while it was read; wait until it is complete")
    return _header(path, info.st_size, raw, whole)


def _header(path: Path, size: int, raw: bytes, whole: bool) -> Header:
    if raw[:1] != b"{":
        raise FormatError(path, "header", f"expected a JSON object, found {raw[:16]!r}; no safetensors file")
    document = parse_json(raw, path, "header")
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(path, _METADATA, "expected an object of strings")
    start = 8 + len(raw)
    room = size - start if whole else MAX_DIM
    tensors = {name: _entry(path, name, value, start, room) for name, value in document.items()}
    _check_cover(path, list(tensors.values()), start, size if whole else None)
    return Header(path, size, metadata, tensors)


def _entry(path: Path, name: str, value: Any, start: int, room: int) -> Entry:
    if not name or len(name) > MAX_NAME or "\0" in name:
        raise _fail(path, name, "", f"its name has {len(name)} characters or a NUL, expected 1 to {MAX_NAME} without")
    if not isinstance(value, dict) or value.keys() != _ENTRY:
        found = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        wanted = ", ".join(sorted(_ENTRY))
        raise _fail(path, name, "", f"expected an object of {wanted}, found {found[:200] or 'nothing'}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    bits = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _fail(path, name, " dtype", f"{dtype!r:.40} is unknown; expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise _fail(path, name, " shape", f"expected at most {MAX_DIMS} sizes of 0 to 2^63-1, found {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _fail(path, name, " data_offsets", f"expected two offsets, found {offsets!r:.80}")
    begin, end = offsets
    if begin > end:
        raise _fail(path, name, " data_offsets", f"begin at {begin:,} and end before, at {end:,}")
    if end > room:
        problem = f"end at {end:,} of {room:,} bytes of data: the file is truncated or corrupt; download it again"
        raise _fail(path, name, " data_offsets", problem)
    total = math.prod(shape) * bits
    if total != 8 * (end - begin):
        problem = f"hold {end - begin:,} bytes, but {dtype} {shape} takes {-(-total // 8):,}"
        raise _fail(path, name, " data_offsets", problem)
    return Entry(name, dtype, tuple(shape), start + begin, end - begin)


def _fail(path: Path, name: str, what: str, problem: str) -> FormatError:
    return FormatError(path, f'tensor "{name[:200]}"{what}', problem)


def _are_sizes(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110  a loop takes a third of the time of `all`, and there are 100,000 of them
        if type(value) is not int or not 0 <= value <= MAX_DIM:
            return False
    return True


def _check_cover(path: Path, entries: list[Entry], start: int, size: int | None) -> None:
    """Every byte of the data belongs to one tensor."""
    order = sorted(entries, key=lambda entry: (entry.offset, entry.nbytes))
    at, before = start, ""
    for entry in order:
        if entry.offset < at:
            raise FormatError(path, f'tensor "{entry.name}"', f'overlaps tensor "{before}"; the file is corrupt')
        if entry.offset > at:
            raise FormatError(
                path,
                f'tensor "{entry.name}"',
                f"{entry.offset - at:,} bytes before it, at {at:,}, belong to no tensor; the file is corrupt",
            )
        at, before = at + entry.nbytes, entry.name
    if size is not None and at != size:
        raise FormatError(
            path, "", f"{size - at:,} bytes behind the last tensor, at {at:,}, belong to no tensor; download it again"
        )
