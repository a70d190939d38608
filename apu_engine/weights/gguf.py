"""A strict and fast reader of GGUF headers (versions 2 and 3), single files and split sets.

Layout: magic, version, tensor count, key count, key-value pairs, tensor infos, padding to
`general.alignment`, data. The header is untrusted input. It is read with bounded preads into ordinary
memory, never through a mapping; every count, length and extent is compared, by subtraction, with the bytes
that remain before anything is allocated for it. Only the header is read, so opening an 80 GB model costs as
much as its vocabulary does. Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from apu_engine.errors import FormatError, MappingError
from apu_engine.memory.files import open_regular
from apu_engine.weights.ggml_types import GGML_TYPES, REMOVED_TYPES
from apu_engine.weights.model_file import ModelFile, StringArray, TensorRef

# Bounds on what a header may ask for. The largest published headers are near 20 MB with 50,000 tensors.
MAX_HEADER = 128 << 20
MAX_FILE = 1 << 50
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME = 65_535  # bytes in a key or tensor name
MAX_DIMS = 4
MAX_DEPTH = 8  # arrays within arrays
MAX_NESTED = 1 << 16  # arrays within arrays, all together
DEFAULT_ALIGNMENT = 32

_FIRST_READ = 4 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TENSOR_TAIL = struct.Struct("<IQ")  # type, offset
_MIN_KEY = 8 + 1 + 4 + 1  # length, one character, type, the smallest value
_MIN_TENSOR = 8 + 1 + 4 + 4 + 8  # length, one character, n_dims, type, offset
_STRING, _ARRAY = 8, 9
_BOOL = 7
# metadata type -> (numpy dtype, scalar format)
_SCALARS: dict[int, tuple[np.dtype[Any], struct.Struct]] = {
    0: (np.dtype("u1"), struct.Struct("<B")),
    1: (np.dtype("i1"), struct.Struct("<b")),
    2: (np.dtype("<u2"), struct.Struct("<H")),
    3: (np.dtype("<i2"), struct.Struct("<h")),
    4: (np.dtype("<u4"), struct.Struct("<I")),
    5: (np.dtype("<i4"), struct.Struct("<i")),
    6: (np.dtype("<f4"), struct.Struct("<f")),
    _BOOL: (np.dtype("u1"), struct.Struct("<B")),
    10: (np.dtype("<u8"), struct.Struct("<Q")),
    11: (np.dtype("<i8"), struct.Struct("<q")),
    12: (np.dtype("<f8"), struct.Struct("<d")),
}

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# What people really pass: first bytes -> what the file is, what to do.
_OTHER_FILES = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model itself; run `git lfs pull`"),
    (b"<!DOCTYPE", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"<!doctype", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"<html", "is an HTML page; the download failed (use the file's direct link, or log in)"),
    (b"PK\x03\x04", "is a zip archive or a PyTorch checkpoint; unpack it, or convert it to GGUF"),
    (b"\x80\x02", "is a pickled PyTorch checkpoint; convert it to GGUF"),
    (b"\x1f\x8b", "is gzip-compressed; unpack it first"),
    (b"(\xb5/\xfd", "is zstd-compressed; unpack it first"),
    (b"\xfd7zXZ", "is xz-compressed; unpack it first"),
    (b"7z\xbc\xaf", "is a 7-zip archive; unpack it first"),
    (b"lmgg", "is in the GGML format of 2023, GGUF's predecessor; download a GGUF file of the model"),
    (b"fmgg", "is in the GGMF format of 2023, GGUF's predecessor; download a GGUF file of the model"),
    (b"tjgg", "is in the GGJT format of 2023, GGUF's predecessor; download a GGUF file of the model"),
    (b"FUGG", "has its magic reversed: no known tool writes that; download it again"),
    (b"{", "is a JSON document; a failed download leaves such a file: download it again"),
)


def open_gguf(path: str | os.PathLike[str], *, whole: bool = True) -> ModelFile:
    """Read the header of a model: a file, any shard of a split set, or a folder that holds one of either.

    A file that ends before its tensors do is refused, unless `whole` is off: then the header is enough.
    Raises FormatError, whose message names the file, the field, what was found and what to do.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        given = _model_in_folder(given)
    header = _read_header(given, whole)
    if header.integer("split.count", 1, 0, 99_999) <= 1:
        return _model_file([header])
    return _model_file(_read_siblings(header, whole))


@dataclass(frozen=True, slots=True)
class _Header:
    """One parsed file; tensors carry absolute offsets and shard number 0."""

    path: Path
    size: int
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorRef]

    def integer(self, key: str, default: int, lo: int, hi: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int or not lo <= value <= hi:
            raise FormatError(self.path, key, f"expected an integer between {lo} and {hi}, found {value!r}")
        return value


def _model_file(headers: list[_Header]) -> ModelFile:
    first = headers[0]
    tensors: dict[str, TensorRef] = {}
    for shard, header in enumerate(headers):
        for name, ref in header.tensors.items():
            if name in tensors:
                other = headers[tensors[name].shard].path
                raise FormatError(header.path, f'tensor "{name}"', f"is also in {other}; download the set again")
            tensors[name] = TensorRef(name, ref.dtype, ref.shape, shard, ref.offset, ref.nbytes)
    model = ModelFile(
        path=first.path,
        files=tuple(header.path for header in headers),
        file_sizes=tuple(header.size for header in headers),
        version=first.version,
        alignment=first.alignment,
        metadata=MappingProxyType(first.metadata),
        tensors=tensors,
    )
    if not model.architecture:
        raise model.fail("general.architecture", "is empty; convert the model again with current tools")
    return model


# ---------------------------------------------------------------- folders and split sets


def _model_in_folder(folder: Path) -> Path:
    """The model file in `folder`, or one shard of its only split set."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        raise FormatError(folder, "", f"cannot be listed: {error.strerror}") from None
    models: dict[tuple[str, str], str] = {}  # (stem, shard count) -> first name
    for name in names:
        if name.lower().endswith(".gguf") and not name.startswith("."):
            match = _SPLIT_NAME.fullmatch(name)
            models.setdefault((match["stem"], match["count"]) if match else (name, ""), name)
    found = list(models.values())
    if len(found) > 1:  # a vision projector beside the model is not another model
        found = [name for name in found if not name.lower().startswith("mmproj")]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise FormatError(folder, "", f"holds {len(found)} models; name one of: {', '.join(found)}")
    hint = "pass a .gguf file or a folder that holds one"
    inside = [name for name in names if any((folder / name).glob("*.gguf"))]
    if inside:
        hint = f"but its folders do: {', '.join(inside)}; name one of them"
    elif any(name.endswith(".safetensors") for name in names):
        hint = "only safetensors, without config.json; download that too"
    raise FormatError(folder, "", f"holds no .gguf file, {hint}")


def _read_siblings(header: _Header, whole: bool) -> list[_Header]:
    """All shards of the split set that `header` belongs to, in order, checked against one another."""
    path = header.path
    count = header.integer("split.count", 1, 1, 99_999)
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or int(match["count"]) != count:
        expected = f"NAME-00001-of-{count:05}.gguf"
        raise FormatError(
            path,
            "split.count",
            f"this is one of {count} shards, so its name must look like {expected}; rename it back",
        )
    paths = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [i for i, shard in enumerate(paths) if not shard.exists()]
    if missing:
        numbers = ", ".join(str(i + 1) for i in missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise FormatError(
            path,
            "split.count",
            f"{len(missing)} of {count} shards missing (number {numbers}): no {paths[missing[0]]}; "
            "download the missing ones into the same folder",
        )
    headers = [header if shard == path else _read_header(shard, whole) for shard in paths]
    first = headers[0]
    for i, shard_header in enumerate(headers):
        number = shard_header.integer("split.no", -1, 0, 99_998)
        if number != i:
            raise FormatError(
                shard_header.path,
                "split.no",
                f"expected {i} for shard {i + 1}, found {number}; give the file its name back",
            )
        for key in first.metadata.keys() & shard_header.metadata.keys():
            if key in ("split.no", "general.alignment"):
                continue
            if not _same(first.metadata[key], shard_header.metadata[key]):
                raise FormatError(
                    shard_header.path,
                    key,
                    f"differs from {first.path}: shards of different models; download the set again",
                )
        if "split.count" not in shard_header.metadata:
            raise FormatError(shard_header.path, "split.count", f"is missing: not a shard of {first.path}")
    total = sum(len(shard_header.tensors) for shard_header in headers)
    claimed = first.integer("split.tensors.count", total, 0, MAX_TENSORS)
    if claimed != total:
        raise FormatError(
            first.path,
            "split.tensors.count",
            f"expected {claimed} tensors, found {total}: shards of different models; download the set again",
        )
    return headers


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


# ---------------------------------------------------------------- one file


def _read_header(path: Path, whole: bool) -> _Header:
    try:
        fd, info = open_regular(path)
    except MappingError as error:
        raise FormatError(error.file, "", error.problem) from None
    try:
        return _Reader(path, fd, info.st_size).header(whole)
    finally:
        os.close(fd)


class _Reader:
    """Walks one header. `need` is the only gate to bytes: it bounds, then reads ahead."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.fd = fd
        self.size = size
        self.buf = b""  # the file's first bytes, as many as were needed so far
        self.pos = 0
        self.nested = 0

    def fail(self, field: str, problem: str) -> FormatError:
        return FormatError(self.path, field, problem)

    def need(self, count: int, field: str) -> None:
        """Make `count` more bytes available at `pos`, or raise naming `field`."""
        left = self.size - self.pos
        if count > left:
            raise self.fail(
                field,
                f"needs {count:,} bytes at offset {self.pos:,}, but the file has only {left:,} left: "
                "it is truncated or corrupt; download it again",
            )
        if count > len(self.buf) - self.pos:
            self._read_ahead(self.pos + count, field)

    def _read_ahead(self, end: int, field: str) -> None:
        if end > MAX_HEADER:
            raise self.fail(field, f"makes the header larger than {MAX_HEADER >> 20} MiB; the file is corrupt")
        wanted = min(max(end, 2 * len(self.buf), _FIRST_READ), self.size, MAX_HEADER)
        parts = [self.buf]
        have = len(self.buf)
        while have < wanted:
            try:
                part = os.pread(self.fd, wanted - have, have)
            except OSError as error:
                raise self.fail(field, f"reading at offset {have:,} failed: {error.strerror}") from None
            if not part:
                raise self.fail(field, "the file shrank while it was read; wait until it is complete")
            parts.append(part)
            have += len(part)
        self.buf = b"".join(parts)

    def u32(self, field: str) -> int:
        self.need(4, field)
        value: int = _U32.unpack_from(self.buf, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, field: str) -> int:
        self.need(8, field)
        value: int = _U64.unpack_from(self.buf, self.pos)[0]
        self.pos += 8
        return value

    def string(self, field: str, limit: int | None = None) -> str:
        length = self.u64(f"{field} length")
        if limit is not None and not 1 <= length <= limit:
            raise self.fail(f"{field} length", f"expected 1 to {limit:,} bytes, found {length:,}")
        self.need(length, field)
        raw = self.buf[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(field, f"is not UTF-8: {raw[:32]!r}") from None

    def count(self, field: str, smallest: int, limit: int) -> int:
        """A 64-bit count of things of at least `smallest` bytes each: the rest of the file must hold them."""
        value = self.u64(field)
        left = self.size - self.pos
        if value > left // smallest:
            raise self.fail(
                field,
                f"{value:,} entries need {value * smallest:,} bytes or more, the file has only {left:,} left",
            )
        if value > limit:
            raise self.fail(field, f"expected at most {limit:,}, found {value:,}")
        return value

    # ------------------------------------------------------------ parts of a header, in file order

    def header(self, whole: bool) -> _Header:
        version = self.preamble()
        n_tensors = self.count("tensor_count", _MIN_TENSOR, MAX_TENSORS)
        n_keys = self.count("metadata_kv_count", _MIN_KEY, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for i in range(n_keys):
            key = self.string(f"metadata key {i}", MAX_NAME)
            if key in metadata:
                raise self.fail(key, "the key occurs twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail("general.alignment", f"expected a power of two, found {alignment!r}")
        infos: dict[str, TensorRef] = {}
        for i in range(n_tensors):
            ref = self.tensor_info(i, alignment)
            if ref.name in infos:
                raise self.fail(f'tensor "{ref.name}"', "the name occurs twice")
            infos[ref.name] = ref
        start = -(-self.pos // alignment) * alignment
        return _Header(self.path, self.size, version, alignment, metadata, self.place(infos, start, whole))

    def preamble(self) -> int:
        """Magic and version; whatever else people mistake for a model is named."""
        if self.size == 0:
            raise self.fail("", "is empty (0 bytes); download it again")
        self.need(min(self.size, 16), "magic")
        if self.buf[:4] != b"GGUF":
            raise self.fail("magic", self.foreign())
        self.pos = 4
        version = self.u32("version")
        if version in (2, 3):
            return version
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version & 0xFFFF == 0 and 1 <= swapped <= 0xFFFF:
            raise self.fail(
                "version",
                f"the file is big-endian (version {swapped}, bytes swapped); download the little-endian one",
            )
        if version == 1:
            raise self.fail("version", "GGUF version 1 (2023) is not supported; download a current file of the model")
        raise self.fail("version", f"expected 2 or 3, found {version}; the file is corrupt or newer than this engine")

    def foreign(self) -> str:
        start = self.buf[:64].lstrip()
        for magic, what in _OTHER_FILES:
            if self.buf.startswith(magic) or (magic[:1] in b"<{" and start.startswith(magic)):
                return what
        if len(self.buf) > 8 and self.buf[8:9] == b"{" and _U64.unpack_from(self.buf)[0] < self.size:
            return "is a safetensors file, which this version does not read; download or convert to a GGUF file"
        if not self.buf[:16].strip(b"\0"):
            return "begins with zeros: a download that was reserved but never filled; download it again"
        return f'expected "GGUF", found {self.buf[:4]!r}: not a GGUF file'

    def value(self, key: str) -> Any:
        kind = self.u32(f"{key} type")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key, 1)
        if kind not in _SCALARS:
            raise self.fail(f"{key} type", f"expected a metadata type 0 to 12, found {kind}")
        form = _SCALARS[kind][1]
        self.need(form.size, key)
        (value,) = form.unpack_from(self.buf, self.pos)
        self.pos += form.size
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.fail(key, f"expected a boolean 0 or 1, found {value}")
        return bool(value)

    def array(self, key: str, depth: int) -> Any:
        kind = self.u32(f"{key} element type")
        if kind == _STRING:
            return self.strings(key, self.count(f"{key} length", 8, MAX_HEADER))
        if kind == _ARRAY:
            length = self.count(f"{key} length", 12, MAX_NESTED)
            self.nested += length
            if depth >= MAX_DEPTH or self.nested > MAX_NESTED:
                raise self.fail(key, f"arrays nest deeper than {MAX_DEPTH} or number more than {MAX_NESTED:,}")
            return [self.array(f"{key}[{i}]", depth + 1) for i in range(length)]
        if kind not in _SCALARS:
            raise self.fail(f"{key} element type", f"expected a metadata type 0 to 12, found {kind}")
        dtype = _SCALARS[kind][0]
        length = self.count(f"{key} length", dtype.itemsize, MAX_HEADER)
        self.need(length * dtype.itemsize, key)
        values = np.frombuffer(self.buf, dtype, length, self.pos).copy()
        self.pos += length * dtype.itemsize
        if kind == _BOOL:
            if length and values.max() > 1:
                raise self.fail(f"{key}[{int(values.argmax())}]", f"expected a boolean 0 or 1, found {values.max()}")
            values = values.view(np.bool_)
        values.flags.writeable = False
        return values

    def strings(self, key: str, length: int) -> StringArray:
        """Walk `length` strings; this loop is the cost of a header, so it does nothing but find the ends."""
        first = self.pos
        ends: list[int] = []
        append, unpack = ends.append, _U64.unpack_from
        buf, pos = self.buf, first
        have = len(buf)
        while len(ends) < length:
            for _ in range(length - len(ends)):
                if have - pos < 8:
                    break
                (count,) = unpack(buf, pos)
                if count > have - pos - 8:
                    break
                pos += 8 + count
                append(pos)
            else:
                break
            self.pos = pos  # the string does not fit into what was read: read on, or fail
            field = f"{key}[{len(ends)}]"
            self.need(8, f"{field} length")
            self.need(8 + unpack(self.buf, pos)[0], field)
            buf = self.buf
            have = len(buf)
        self.pos = pos
        stops = np.array(ends, np.int64) - first
        starts = np.empty_like(stops)
        if length:
            starts[0] = 8
            starts[1:] = stops[:-1] + 8
        return StringArray(buf[first:pos], starts, stops, self.path, key)

    def tensor_info(self, number: int, alignment: int) -> TensorRef:
        """One tensor info; `offset` is still relative to the data section."""
        name = self.string(f"tensor {number} name", MAX_NAME)
        field = f'tensor "{name}"'
        n_dims = self.u32(f"{field} n_dims")
        if n_dims > MAX_DIMS:
            raise self.fail(f"{field} n_dims", f"expected at most {MAX_DIMS} dimensions, found {n_dims:,}")
        self.need(8 * n_dims, f"{field} dimensions")
        dims = struct.unpack_from(f"<{n_dims}Q", self.buf, self.pos)
        self.pos += 8 * n_dims
        for axis, dim in enumerate(dims):
            if not 1 <= dim < 1 << 63:
                raise self.fail(f"{field} dimension {axis}", f"expected 1 to 2^63-1, found {dim}")
        self.need(12, f"{field} type and offset")
        dtype, offset = _TENSOR_TAIL.unpack_from(self.buf, self.pos)
        self.pos += 12
        block = GGML_TYPES.get(dtype)
        if block is None:
            what = f"{REMOVED_TYPES[dtype]} was dropped from the format" if dtype in REMOVED_TYPES else "is unknown"
            raise self.fail(f"{field} type", f"type {dtype} {what}; download or make a file with a current type")
        row = dims[0] if dims else 1
        if row % block.elements:
            raise self.fail(
                f"{field} dimension 0",
                f"{row} is no multiple of {block.elements}, the block size of {block.name}",
            )
        if offset % alignment:
            raise self.fail(f"{field} offset", f"expected a multiple of the alignment {alignment}, found {offset}")
        nbytes = math.prod(dims) // block.elements * block.nbytes
        return TensorRef(name, dtype, dims[::-1], 0, offset, nbytes)

    def place(self, infos: Mapping[str, TensorRef], start: int, whole: bool) -> dict[str, TensorRef]:
        """Absolute offsets for relative ones, every extent inside the file, or of the `whole` one any size that files
        have, and none across another.
        """
        room = (self.size if whole else MAX_FILE) - start
        placed: dict[str, TensorRef] = {}
        for name, ref in infos.items():
            if ref.nbytes > room or ref.offset > room - ref.nbytes:
                raise self.fail(
                    f'tensor "{name}"',
                    f"needs {ref.nbytes:,} bytes at {start + ref.offset:,}, {ref.nbytes + ref.offset - room:,} more "
                    f"than the file's {self.size:,}: it is truncated or corrupt; download it again",
                )
            placed[name] = TensorRef(name, ref.dtype, ref.shape, 0, start + ref.offset, ref.nbytes)
        order = sorted(placed.values(), key=lambda ref: (ref.offset, ref.nbytes))
        for a, b in pairwise(order):  # two names for the very same bytes are fine
            if b.offset < a.offset + a.nbytes and (a.offset, a.nbytes) != (b.offset, b.nbytes):
                raise self.fail(f'tensor "{b.name}"', f'overlaps tensor "{a.name}"; the file is corrupt')
        return placed
