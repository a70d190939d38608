"""What a header reader hands to the engine: metadata with checked getters, and where each tensor lies.

A ModelFile holds no weight bytes and no open descriptor. Metadata is a claim of the file's author: the
getters are the one place where a claim becomes a number, so each takes the type and the range the caller
can live with and raises a FormatError that names file and key. Shapes are row-major with the outermost
dimension first, as in numpy; GGUF stores them the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import FormatError
from apu_engine.weights.ggml_types import TYPES, type_name


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
T = TypeVar("T")


class StringArray(Sequence[str]):
    """A metadata array of strings, decoded on access: reading a header only finds where each one lies.

    `tolist()` is the fast way to all of them. Raises FormatError at the entry that is not UTF-8.
    """

    __slots__ = ("_ends", "_file", "_key", "_raw", "_starts")

    def __init__(self, raw: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64], file: Path, key: str) -> None:
        self._raw = raw
        self._starts = starts  # (n,) offset of each string in raw
        self._ends = ends
        self._file = file
        self._key = key

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        raw = self._raw[int(self._starts[index]) : int(self._ends[index])]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            at = index % len(self)
            raise FormatError(self._file, f"{self._key}[{at}]", f"is not UTF-8: {raw[:32]!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings, in order."""
        raw = self._raw
        spans = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        try:
            return [str(raw[start:end], "utf-8") for start, end in spans]
        except UnicodeDecodeError:
            return [self[i] for i in range(len(self))]  # raises with the index

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return self._raw == other._raw and len(self) == len(other)
        if isinstance(other, list):
            return self.tolist() == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StringArray({self._key}, {len(self)} strings)"


class Extent(NamedTuple):
    """`rows` rows of a tensor in file `shard`: the first at absolute `offset`, each next one `stride` bytes further."""

    shard: int
    offset: int
    rows: int
    stride: int
    row_bytes: int

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.offset + (self.rows - 1) * self.stride + self.row_bytes


@dataclass(frozen=True, slots=True)
class Made:
    """How a small tensor that no file holds is made when the model is loaded, from tensors that files do hold.

    `make` takes the elements of `sources`, one flat array each in the file's own type (BF16 as float32), and returns
    the tensor's. `why` says in a few words what is done.
    """

    why: str
    sources: tuple[TensorRef, ...]
    make: Callable[..., NDArray[Any]]


class Scaling(NamedTuple):
    """The factors of a tensor's elements: each element of `ref` (.., R, C) is that of `rows` by `columns` of them, the
    last ones cut. `ref` has a matrix for each of the tensor's.
    """

    ref: TensorRef
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor lies: `nbytes` bytes at absolute `offset` of file `shard`, in blocks of `dtype`.

    `dtype` is GGUF's type number (ggml_types.TYPES); `shape` is row-major, outermost dimension first. A tensor in
    several `pieces`, in the order of its rows, has shard and offset of the first; one that is `made` has shard -1.
    With `scales` elements are codes to be multiplied by them.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    pieces: tuple[Extent, ...] = ()
    made: Made | None = None
    scales: Scaling | None = None

    @property
    def type_name(self) -> str:
        return type_name(self.dtype)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the run along the last dimension."""
        block = TYPES[self.dtype]
        return (self.shape[-1] if self.shape else 1) // block.elements * block.nbytes

    @property
    def rows(self) -> int:
        return self.nbytes // self.row_bytes

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Its rows in files, in order; none of a tensor that is made."""
        if self.made is not None:
            return ()
        return self.pieces or (Extent(self.shard, self.offset, self.rows, self.row_bytes, self.row_bytes),)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A validated model header: one file, or a split set in the order of its shards.

    `path` is the first file, or the folder of safetensors; `alignment` that of the first file. Extents of all tensors
    lie inside `file_sizes`, unless only headers were asked for.
    """

    path: Path
    files: tuple[Path, ...]
    file_sizes: tuple[int, ...]
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    tensors: dict[str, TensorRef]
    notices: tuple[str, ...] = ()  # what of the files is not used, for whoever loads them
    origin: Callable[[str], tuple[Path, str]] | None = None  # a field's file, and its name there, where they differ

    @property
    def architecture(self) -> str:
        """`general.architecture`, for instance "llama"."""
        return self.get_str("general.architecture")

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors together, without header and padding."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def missing_bytes(self) -> int:
        """What the files lack of the tensors, where only headers were asked for."""
        ends = [0] * len(self.files)
        for extent in (extent for tensor in self.tensors.values() for extent in tensor.extents):
            ends[extent.shard] = max(ends[extent.shard], extent.end)
        return sum(max(0, end - size) for end, size in zip(ends, self.file_sizes, strict=True))

    def fail(self, field: str, problem: str) -> FormatError:
        """A FormatError about this file, for callers that check more than a range."""
        file, name = self.origin(field) if self.origin else (self.path, field)
        return FormatError(file, name, problem)

    def _found(self, key: str, default: object) -> bool:
        """Whether the file has `key`; raises when it has not and there is no default."""
        if key in self.metadata:
            return True
        if default is REQUIRED:
            hint = "" if self.origin else "; convert the model again with current tools"
            raise self.fail(key, f"is required but missing{hint}")
        return False

    def get_int(
        self, key: str, default: T | _Required = REQUIRED, lo: int | None = None, hi: int | None = None
    ) -> int | T:
        """An integer in [lo, hi]. A missing key gives `default`, unchecked (None is a default too)."""
        if not self._found(key, default):
            return cast("T", default)
        value = self.metadata[key]
        if type(value) is not int:
            raise self.fail(key, f"expected an integer, found {_describe(value)}")
        _check_range(self, key, value, lo, hi)
        return value

    def get_float(
        self,
        key: str,
        default: T | _Required = REQUIRED,
        lo: float | None = None,
        hi: float | None = None,
        finite: bool = True,
    ) -> float | T:
        """A number in [lo, hi] as float, NaN and infinities refused unless `finite` is False."""
        if not self._found(key, default):
            return cast("T", default)
        value = self.metadata[key]
        if type(value) not in (int, float):
            raise self.fail(key, f"expected a number, found {_describe(value)}")
        if finite and not math.isfinite(value):
            raise self.fail(key, f"expected a finite number, found {value}")
        _check_range(self, key, value, lo, hi)
        return float(value)

    def get_bool(self, key: str, default: T | _Required = REQUIRED) -> bool | T:
        if not self._found(key, default):
            return cast("T", default)
        value = self.metadata[key]
        if type(value) is not bool:
            raise self.fail(key, f"expected true or false, found {_describe(value)}")
        return value

    def get_str(self, key: str, default: T | _Required = REQUIRED) -> str | T:
        if not self._found(key, default):
            return cast("T", default)
        value = self.metadata[key]
        if not isinstance(value, str):
            raise self.fail(key, f"expected a string, found {_describe(value)}")
        return value

    def get_array(
        self,
        key: str,
        kind: str,
        default: Any = REQUIRED,
        length: int | None = None,
        lo: float | None = None,
        hi: float | None = None,
    ) -> Any:
        """An array of `kind` "int", "float", "bool" or "str", of exactly `length` entries when that is given.

        Numbers come as a read-only numpy array in the file's own width, every entry in [lo, hi] and finite;
        strings come as a list.
        """
        if not self._found(key, default):
            return default
        value = self.metadata[key]
        if _array_kind(value) not in (kind, "empty"):
            raise self.fail(key, f"expected an array of {kind}, found {_describe(value)}")
        if length is not None and len(value) != length:
            raise self.fail(key, f"expected {length:,} entries, found {len(value):,}")
        if kind == "str":
            return list(value)
        if not isinstance(value, np.ndarray):
            return np.empty(0, {"int": np.int32, "float": np.float32, "bool": np.bool_}[kind])
        if kind == "float" and not np.isfinite(value).all():
            at = int(np.flatnonzero(~np.isfinite(value))[0])
            raise self.fail(f"{key}[{at}]", f"expected a finite number, found {value[at]}")
        if len(value) and kind != "bool":
            for at in (int(value.argmin()), int(value.argmax())):
                _check_range(self, f"{key}[{at}]", value[at].item(), lo, hi)
        return value

    def get_per_layer(
        self, key: str, layers: int, default: Any = REQUIRED, lo: int | None = None, hi: int | None = None
    ) -> Any:
        """A tuple of `layers` integers: the file holds an array of them, or one for all layers."""
        if not isinstance(self.metadata.get(key, 0), int):
            values = self.get_array(key, "int", length=layers, lo=lo, hi=hi)
            return tuple(values.tolist())
        value = self.get_int(key, default, lo, hi)
        return (value,) * layers if isinstance(value, int) else value


def _check_range(model: ModelFile, field: str, value: float, lo: float | None, hi: float | None) -> None:
    if (lo is None or value >= lo) and (hi is None or value <= hi):
        return
    if lo is not None and hi is not None:
        wanted = f"between {lo} and {hi}"
    else:
        wanted = f"at least {lo}" if lo is not None else f"at most {hi}"
    raise model.fail(field, f"expected {wanted}, found {value}")


def _array_kind(value: Any) -> str:
    """ "int", "float", "bool", "str", "nested", "empty"; "" for anything that is no array."""
    if isinstance(value, StringArray):
        return "str"
    if isinstance(value, np.ndarray):
        if not len(value):
            return "empty"
        return {"i": "int", "u": "int", "f": "float", "b": "bool"}[value.dtype.kind]
    if isinstance(value, list):
        return "nested" if value else "empty"
    return ""


def _describe(value: Any) -> str:
    kind = _array_kind(value)
    if kind:
        return f"an array ({kind}, {len(value):,} entries)"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return f"{value!r} ({type(value).__name__})"
