"""What tests of matvec kernels share: activations quantised by numpy, the host's geometry, and one launch.

The geometry is that of native/gpu/matvec.cpp, chosen freely here so that every split and step count is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from shim import Buffer, Shim

Floats = npt.NDArray[np.float32]

WAVES, SET, FLOAT_SET, ITEM, FLOAT_ITEM, EXTRA = 4, 2, 4, 64, 32, 32  # matvec_args.h
ACT_NONE, ACT_SILU, ACT_GELU_TANH, ACT_GELU_ERF, ACT_SWIGLU_OAI = range(5)
NONE = (1 << 32) - 1  # kNone


@dataclass
class Quantized:
    q: npt.NDArray[np.int8]  # (T, columns)
    d: Floats  # (T, columns / 16)
    s16: Floats  # (T, columns / 16)

    def values(self, k: int) -> npt.NDArray[np.float64]:
        return (self.q * np.repeat(self.d.astype(np.float64), 16, 1))[:, :k]


def quantize(x: Floats) -> Quantized:
    """The law of native/quant/activations.h."""
    rows, k = x.shape
    columns = -(-k // 256) * 256
    halves = np.zeros((rows, columns), np.float32)
    halves[:, :k] = x
    halves = halves.reshape(rows, -1, 16)
    amax = np.abs(halves).max(2)
    with np.errstate(all="ignore"):
        d = (amax / np.float32(127)).astype(np.float32)
        small, bad = amax < np.float32(2.0**-100), ~np.isfinite(halves).all(2)
        inverse = (np.float32(1) / d).astype(np.float32)
        q = np.rint(halves * inverse[..., None])
        q[small | bad] = 0
        d[small] = 0
        d[bad] = np.nan
        s16 = (d * q.sum(2, dtype=np.float32)).astype(np.float32)
    return Quantized(q.astype(np.int8).reshape(rows, columns), d, s16)


def quantize_fine(x: Floats) -> Quantized:
    """(2 T) rows: of x, and of what quantising it loses."""
    first = quantize(x)
    rest = (x.astype(np.float64) - first.values(x.shape[1])).astype(np.float32)
    second = quantize(rest)
    pairs = [
        np.stack(p, 1).reshape(2 * len(x), -1) for p in zip(vars(first).values(), vars(second).values(), strict=True)
    ]
    return Quantized(*pairs)


@dataclass
class Side:
    dtype: Q
    weights: npt.NDArray[np.uint8]  # (N, bytes of a row)
    bias: Floats | None = None
    align: int = 16  # of the first row's address
    stride: int = 0  # bytes; 0: rows touch
    cuts: tuple[int, ...] = ()  # rows where a new segment begins


def make_matrix(shim: Shim, side: Side, k: int) -> dict[str, Any]:
    """The fields of a Matrix; its buffers live in the shim. Rows end where reading must end."""
    n, row_bytes = side.weights.shape
    stride = side.stride or row_bytes
    segments = []
    for begin, end in zip((0, *side.cuts), (*side.cuts, n), strict=True):
        data = np.full((end - begin) * stride, 0xFF, np.uint8)
        strides = np.lib.stride_tricks.as_strided(data, (end - begin, row_bytes), (stride, 1))
        strides[...] = side.weights[begin:end]
        data = data[: (end - begin - 1) * stride + row_bytes]
        align = 16 if side.align % 16 == 0 else 1
        buffer = shim.input(np.concatenate([np.full(side.align % 16, 0xFF, np.uint8), data]), align=16, padding=16)
        address = buffer.address + side.align % 16
        assert align in (1, 16)
        segments.append((address, begin, end - begin, stride))
    table = 0
    if len(segments) > 1:
        table = shim.input(
            [shim.args("Segment", address=a, row_begin=b, row_count=c, row_stride=s) for a, b, c, s in segments]
        ).address
    fields = {"data": segments[0][0], "row_stride": stride, "segments": table, "segment_count": len(segments)}
    return {**fields, "rows": n, "k": k, "type": int(side.dtype)}


def make_activations(shim: Shim, a: Quantized, k: int, x: Floats | None = None) -> dict[str, Any]:
    fields = {"q": shim.input(a.q), "d": shim.input(a.d), "s16": shim.input(a.s16), "columns": a.q.shape[1], "k": k}
    if x is not None:
        fields["x"] = shim.input(x)
    return fields


@dataclass
class Options:
    r: int = 1  # the kernel's rows
    splits: int = 1
    steps: int = 1
    activation: int = ACT_NONE
    pair: bool = False
    up: Floats | None = None
    residual: Floats | None = None
    cap: float = 0
    terms: int = 1
    set: int = 0  # rows of the matrix at once, 0: as the kernel's kind has them
    bucket: int = 0  # rows that the grid covers, 0: those of a

    def plain(self, sides: list[Side]) -> bool:
        added = self.pair or self.activation != ACT_NONE or self.residual is not None or self.cap
        return not added and self.terms == 1 and all(side.bias is None for side in sides)


def rows_of_set(shim: Shim, elements: int, size: int) -> int:
    """matvec_set of matvec_args.h."""
    return 2 * SET if shim.bulk_copies and size * 8 < elements * 4 else SET


def run_matvec(
    shim: Shim, name: str, a: Quantized, k: int, sides: list[Side], o: Options, x: Floats | None = None
) -> list[Floats]:
    """(T, N) of each side."""
    shim.clear()
    floats = x is not None
    rows = len(a.q) // o.terms
    bucket = o.bucket or rows
    lanes_k = shim.wave * (FLOAT_ITEM if floats and not o.set else ITEM)
    slices = -(-k // lanes_k)
    elements, size = gguf.GGML_QUANT_SIZES[sides[0].dtype]
    together = o.set or (FLOAT_SET if floats else rows_of_set(shim, elements, size))
    set_rows = together * o.steps * WAVES // o.splits
    block_rows = set_rows // 2 if o.pair else set_rows
    lds = 4 * slices * o.r * set_rows
    if not floats:
        lds += WAVES * together * (lanes_k // elements * size + EXTRA)
    outs: list[Buffer] = []
    fields, firsts, first = [], [], 0
    for m, side in enumerate(sides):
        n = len(side.weights)
        if not (o.pair and m):
            outs.append(shim.output((rows, n), np.float32))
        fields.append(
            {
                "w": make_matrix(shim, side, k),
                "bias": shim.input(side.bias) if side.bias is not None else 0,
                "out": outs[-1] if not (o.pair and m) else 0,
            }
        )
        firsts.append(NONE if o.pair and m else first)
        if not (o.pair and m):
            first += -(-n // block_rows)
    args = shim.args(
        "MatvecArgs",
        count=shim.input(np.array([rows], np.uint32)),
        **{"in": make_activations(shim, a, k, x)},
        sides=fields + [{}] * (4 - len(fields)),
        first_block=firsts + [NONE] * (4 - len(sides)),
        activation=o.activation,
        pair=int(o.pair),
        up=shim.input(o.up) if o.up is not None else 0,
        residual=shim.input(o.residual) if o.residual is not None else 0,
        soft_cap=o.cap,
        terms=o.terms,
        rows=len(a.q),
        slices=slices,
        splits=o.splits,
        split_shift=o.splits.bit_length() - 1,
        steps=o.steps,
        plain=int(o.plain(sides)),
    )
    groups = -(-bucket * o.terms // o.r)
    shim.launch(f"{name}_r{o.r}", (first, groups), WAVES * shim.wave, args, lds)
    return [out.array.copy() for out in outs]
