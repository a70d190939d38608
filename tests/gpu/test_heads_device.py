"""Matrices of heads (heads.hip) on the shim against float64: types, segments, odd addresses, rows alone and tiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import random_weights, truth
from rig import STEP
from shim import Shim, every_shim

THREADS = 256
NAMES = {Q.F32: "f32", Q.F16: "f16", Q.BF16: "bf16"}
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def shims() -> list[Shim]:
    return list(every_shim(["heads.hip"]))


def run(
    shim: Shim, dtype: Q, w: Array, x: Array, heads: int, k: int, n: int, across: bool, tiled: bool, cuts: list[int]
) -> Array:
    """(T, H, N + rest); `w` (rows of all heads, bytes) lies in pieces that end at `cuts`, at odd addresses."""
    rest = x.shape[2] - k
    segments, row_bytes = [], w.shape[1]
    for begin, end in zip([0, *cuts], [*cuts, len(w)], strict=True):
        piece = shim.input(w[begin:end], align=1 if len(cuts) else 16, padding=16)
        fields = {"address": piece, "row_begin": begin, "row_count": end - begin, "row_stride": row_bytes}
        segments.append(shim.args("Segment", **fields))
    name = "heads_across" if across else f"heads_{NAMES.get(dtype, 'any')}"
    lanes = 1
    while lanes < shim.wave and lanes * 16 < k:
        lanes *= 2
    each = shim.wave * 16 if across else THREADS // lanes * (1 if name == "heads_any" else 4)
    blocks, tile = -(-n // each), 4 if tiled else 1
    out = shim.output((len(x) + 3, heads, n + rest), np.float32)
    args = shim.args(
        "HeadArgs",
        count=shim.args("RowCount", counts=shim.input(shim.args("StepCounts", rows=len(x))), kind=STEP),
        w={
            "data": segments[0].address,
            "row_stride": row_bytes,
            "segments": shim.input(segments),
            "segment_count": len(segments),
            "rows": k if across else n,
            "k": n if across else k,
            "type": int(dtype),
        },
        out=out,
        heads=heads,
        k=k,
        n=n,
        rest=rest,
        lanes=lanes,
        blocks=blocks,
        aligned=int(k % 16 == 0 and rest % 4 == 0),
        aligned_w=int(k % 16 == 0 and not cuts),
        **{"in": shim.input(np.concatenate([x, np.full_like(x[:1], np.nan)]))},
    )
    shim.launch(name + ("_many" if tiled else "_r1"), ((len(x) // tile + 1) * blocks, heads), THREADS, args)
    shim.clear()
    assert np.isnan(out.array[len(x) :]).all()
    return out.array[: len(x)]


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    "dtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q5_1, Q.Q4_K, Q.IQ4_XS], ids=lambda dtype: dtype.name
)
@pytest.mark.parametrize(("k", "n", "rest", "pieces"), [(512, 40, 0, 1), (33, 600, 3, 2), (1280, 33, 4, 7)])
def test_against_float64(shims: list[Shim], dtype: Q, across: bool, k: int, n: int, rest: int, pieces: int) -> None:
    heads = 3
    inner = n if across else k
    if dtype not in (Q.F32, Q.F16, Q.BF16):  # whole blocks
        inner = -(-inner // 256) * 256
        k, n = (k, inner) if across else (inner, n)
    rows = k if across else n
    w = random_weights(dtype, heads * rows, inner)
    values = truth(dtype, w).astype(np.float64).reshape(heads, rows, inner)
    x = np.random.default_rng(k).standard_normal((6, heads, k + rest)).astype(np.float32)
    want = np.einsum("thk,hkn->thn" if across else "thk,hnk->thn", x[..., :k].astype(np.float64), values)
    cuts = sorted(np.random.default_rng(1).choice(np.arange(1, heads * rows), pieces - 1, replace=False).tolist())
    for shim in shims:
        one = run(shim, dtype, w, x, heads, k, n, across, False, cuts)
        many = run(shim, dtype, w, x, heads, k, n, across, True, cuts)
        np.testing.assert_allclose(one[..., :n], want, atol=3e-6 * np.abs(want).max() + 1e-6)
        assert np.array_equal(one[..., n:], x[..., k:])
        assert np.array_equal(one.view(np.uint32), many.view(np.uint32))
