"""What tests of GEMM kernels share: the host's geometry (native/gpu/gemm.cpp), a launch, the bound of its error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, truth
from matvec_cases import Floats, Quantized, Side, make_matrix
from shim import Buffer, Shim

FILES = ["gemm_legacy.hip", "gemm_k.hip", "gemm_other.hip", "gemm_rows.hip", "gemm_f32.hip"]
LEGACY = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
K_QUANTS = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K)
OTHERS = (Q.IQ2_XXS, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4, Q.F16, Q.BF16)
OWN = LEGACY + K_QUANTS + OTHERS  # types with kernels of their own
WITH_MINIMUM = (Q.Q4_1, Q.Q5_1, Q.Q2_K, Q.Q4_K, Q.Q5_K)
PAD, EXTRA_ROWS = 8, 257


@dataclass(frozen=True)
class Shape:
    """GemmShape of gemm_args.h."""

    rows: int
    columns: int
    depth: int
    unit: int

    @property
    def threads(self) -> int:
        return self.columns * self.depth // self.unit

    def lds(self, staged: bool, chunk_columns: int, chunk_bytes: int) -> int:
        stride = 2 * (self.depth + PAD)
        size = self.columns * 8 + self.rows * 8 + 64
        size += (3 if staged else 2) * self.rows * stride + 2 * self.columns * stride
        if chunk_bytes:
            size += (3 if chunk_columns == self.depth else 2) * self.columns * ((chunk_bytes + 30) // 32 * 32 + 16)
        return size


SMALL, LARGE = Shape(64, 64, 64, 32), Shape(256, 128, 64, 32)
SMALL_DIRECT, LARGE_DIRECT = Shape(64, 64, 64, 16), Shape(128, 128, 32, 16)
ANY, FLOAT = Shape(64, 64, 64, 16), Shape(64, 64, 16, 4)


def kernel_of(dtype: Q, large: bool, staged: bool, exact: bool = False) -> tuple[str, Shape, int]:
    """Name, shape and dynamic LDS."""
    if exact or dtype is Q.F32:
        return "gemm_f32", FLOAT, 0
    if dtype not in OWN:
        return "gemm_any", ANY, ANY.lds(staged, 1 << 30, 0)
    shape = (LARGE if large else SMALL) if staged else LARGE_DIRECT if large else SMALL_DIRECT
    elements, size = gguf.GGML_QUANT_SIZES[dtype]
    chunk = (64, 128) if dtype in FLOAT_TYPES else (256, 256 // elements * size)
    return (
        f"gemm_{dtype.name.lower()}_{'large' if large else 'small'}",
        shape,
        shape.lds(staged, chunk[0], chunk[1] * staged),
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Options:
    large: bool = False
    staged: bool = False
    exact: bool = False
    splits: int = 1
    activation: int = 0
    pair: bool = False
    gate: Floats | None = None
    residual: Floats | None = None
    cap: float = 0
    bucket: int = 0  # rows that the grid covers, 0: those of a
    experts: int = 0
    pairs: Any = None  # (sorted pairs, tiles, divisor) as buffers, of experts
    extra: dict[str, Any] = field(default_factory=dict)


def make_rows(
    shim: Shim, a: Quantized | Floats, k: int, passes: int = 1, pairs: Buffer | None = None, divisor: int = 1
) -> tuple[Buffer, Buffer]:
    """Rows of halves, with those after them that may be read, and the rows' scales, by gemm_rows."""
    columns = ceil_div(k, 256) * 256
    rows = len(a.q) // passes if isinstance(a, Quantized) else len(a)
    rows = rows if pairs is None else len(pairs.array)
    halves = shim.output((rows + EXTRA_ROWS, passes * columns), np.float16)
    scales = shim.output(rows, np.float32)
    source = {"q": shim.input(a.q), "d": shim.input(a.d)} if isinstance(a, Quantized) else {"x": shim.input(a)}
    args = shim.args(
        "GemmRowsArgs",
        counts=shim.input(shim.args("StepCounts", rows=rows)),
        a=halves,
        a_scale=scales,
        columns=columns,
        k=k,
        passes=passes,
        rows_each=1,
        pairs=0 if pairs is None else pairs,
        row_divisor=divisor,
        **source,
    )
    shim.launch("gemm_rows", rows + 1, shim.threads("gemm_rows"), args)
    return halves, scales


def run_gemm(shim: Shim, a: Quantized | Floats, k: int, sides: list[Side], o: Options, passes: int = 1) -> list[Floats]:
    """(T, N) of each side; a pair has one."""
    shim.clear()
    rows = len(a.q) // passes if isinstance(a, Quantized) else len(a)
    bucket = o.bucket or rows
    name, shape, lds = kernel_of(sides[0].dtype, o.large, o.staged, o.exact)
    fields: list[dict[str, Any]] = []
    outs: list[Buffer] = []
    tile = column = 0
    width = shape.columns // 2 if o.pair and name != "gemm_f32" else shape.columns
    for m, side in enumerate(sides):
        n = len(side.weights)
        first = not (o.pair and m)
        if first:
            outs.append(shim.output((rows, n), np.float32))
        fields.append(
            {
                "w": make_matrix(shim, side, k),
                "bias": shim.input(side.bias) if side.bias is not None else 0,
                "out": outs[-1],
                "tile_begin": tile,
                "column_begin": column,
            }
        )
        column += n
        if first:
            tile += ceil_div(n, width)
    columns = ceil_div(k, 256) * 256
    steps = ceil_div(k, shape.depth) if passes == 1 else 2 * columns // shape.depth
    unit = max(256 // shape.depth, 1)
    split_steps = ceil_div(ceil_div(steps, o.splits), unit) * unit
    splits = ceil_div(steps, split_steps)
    row_tiles = ceil_div(bucket, shape.rows)
    common: dict[str, Any] = {
        "counts": shim.input(shim.args("StepCounts", rows=rows)),
        "sides": fields + [{}] * (4 - len(fields)),
        "side_count": len(sides),
        "activation": o.activation,
        "pair": int(o.pair),
        "gate": shim.input(o.gate) if o.gate is not None else 0,
        "residual": shim.input(o.residual) if o.residual is not None else 0,
        "soft_cap": o.cap,
        "row_tiles": row_tiles,
        "max_rows": bucket,
        "all_columns": column,
        "k": k,
        "columns": columns,
        "passes": passes,
        "split_steps": split_steps,
        "row_divisor": 1,
        "partial": shim.output((splits, bucket, column), np.float32) if splits > 1 else 0,
        **o.extra,
    }
    if name == "gemm_f32":
        assert not isinstance(a, Quantized)
        common["x"] = shim.input(a)
    else:
        common["a"], common["a_scale"] = make_rows(shim, a, k, passes)
    args = shim.args("GemmArgs", **common)
    shim.launch(name, (row_tiles * tile, splits), shim.threads(name), args, lds)
    if splits > 1:
        outputs = len(sides[0].weights) if o.pair else column
        reduce = shim.args("GemmReduceArgs", gemm=args, splits=splits)
        shim.launch("gemm_reduce", (ceil_div(outputs, 256), bucket), 256, reduce)
    return [out.array.copy() for out in outs]


def expected(dtype: Q, weights: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and a bound of the error: weights and activations round to halves.

    A half rounds to 2^-12 of itself; a weight is a rounded scale times an integer, plus a rounded minimum, rounded.
    """
    w = truth(dtype, weights).astype(np.float64)
    size = np.abs(w)
    if dtype in WITH_MINIMUM:
        blocks = size.reshape(len(w), -1, 32)
        size = size + 3 * np.repeat(blocks.max(2), 32, 1)
    row = np.abs(values).max(1, keepdims=True)
    x = np.abs(values) + 2.0**-28 * row
    return values @ w.T, 3 * 2.0**-12 * (x @ size.T) + 1e-30
