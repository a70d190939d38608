"""Small tensors that no file holds as they are needed: read, changed and kept in memory when a model is loaded.

Only vectors and tables of ids are made so, a few MB of the largest models; matrices are read in place, whatever their
layout. What is made: norms that a model adds 1 to, rotary factors that follow from hyperparameters, ids in 64 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import FormatError
from apu_engine.memory.files import open_regular
from apu_engine.weights.ggml_types import TYPES
from apu_engine.weights.model_file import Made, TensorRef

F32, F16, I32, I64, F64, BF16 = 0, 1, 26, 27, 28, 30  # GGUF's type numbers
_NUMPY = {F32: "<f4", F16: "<f2", BF16: "<u2", 24: "i1", 25: "<i2", I32: "<i4", I64: "<i8", F64: "<f8"}


def made(
    name: str,
    dtype: int,
    shape: tuple[int, ...],
    why: str,
    make: Callable[..., NDArray[Any]],
    sources: Sequence[TensorRef] = (),
) -> TensorRef:
    """A tensor that `make` makes of the sources' elements; see model_file.Made."""
    nbytes = int(np.prod(shape)) * TYPES[dtype].nbytes
    return TensorRef(name, dtype, shape, -1, 0, nbytes, made=Made(why, tuple(sources), make))


def make(ref: TensorRef, files: Sequence[Path]) -> NDArray[np.uint8]:
    """Its bytes. Raises FormatError when a source cannot be read, or what is made has another size."""
    assert ref.made is not None
    values = ref.made.make(*(elements(source, files) for source in ref.made.sources))
    out = np.ascontiguousarray(values, _NUMPY[ref.dtype]).view(np.uint8).reshape(-1)
    if len(out) != ref.nbytes:
        where = files[ref.made.sources[0].shard] if ref.made.sources else files[0]
        raise FormatError(where, f'tensor "{ref.name}"', f"expected {ref.nbytes:,} bytes, found {len(out):,}")
    return out


def elements(ref: TensorRef, files: Sequence[Path]) -> NDArray[Any]:
    """A tensor's elements, flat, read from its file; BF16 as float32."""
    parts = []
    for extent in ref.extents:
        data = np.frombuffer(_read(files[extent.shard], extent.offset, extent.end - extent.offset), np.uint8)
        rows = np.lib.stride_tricks.as_strided(data, (extent.rows, extent.row_bytes), (extent.stride, 1))
        parts.append(rows.reshape(-1))
    values = np.concatenate(parts).view(_NUMPY[ref.dtype])
    return (values.astype(np.uint32) << 16).view(np.float32) if ref.dtype == BF16 else values


def _read(path: Path, offset: int, nbytes: int) -> bytes:
    fd, _ = open_regular(path)
    try:
        data = b""
        while len(data) < nbytes:
            part = os.pread(fd, nbytes - len(data), offset + len(data))
            if not part:
                raise FormatError(path, "", f"ends at {offset + len(data):,}, expected {nbytes:,} bytes at {offset:,}")
            data += part
        return data
    finally:
        os.close(fd)
