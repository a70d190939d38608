"""Matvec kernels of float types against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import random_activations, random_weights, truth
from matvec_cases import ACT_SILU, Floats, Options, Quantized, Side, run_matvec
from shim import Shim

TYPES = [Q.F32, Q.F16, Q.BF16]
NONE = np.zeros((0, 0), np.float32)


@pytest.fixture(
    scope="module", params=[(32, False), (32, True), (64, False), (64, True)], ids=lambda p: f"w{p[0]}{'r' * p[1]}"
)
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim(["matvec_float.hip"], wave=request.param[0], reverse=request.param[1])


def run(shim: Shim, x: Floats, sides: list[Side], options: Options) -> list[Floats]:
    rows, k = x.shape
    unused = Quantized(np.zeros((rows, 0), np.int8), NONE, NONE)
    return run_matvec(shim, f"matvec_{sides[0].dtype.name.lower()}", unused, k, sides, options, x)


def check(side: Side, x: Floats, got: Floats) -> None:
    w, wide = truth(side.dtype, side.weights).astype(np.float64), x.astype(np.float64)
    bound = 5e-7 * (np.abs(wide) @ np.abs(w).T) + 1e-30
    assert np.all(np.abs(got - wide @ w.T) <= bound)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_shapes_and_alignments(shim: Shim, dtype: Q) -> None:
    for k, n, align, extra, options in (
        (1, 3, 1, 0, Options()),
        (8, 9, 16, 0, Options()),
        (577, 5, 2, 0, Options(splits=2)),
        (1536, 21, 16, 0, Options(steps=2)),
        (2304, 6, 16, 0, Options(splits=4)),
        (4616, 7, 1, 5, Options(splits=2, steps=2)),
    ):
        x = random_activations(1, k)
        side = Side(dtype, random_weights(dtype, n, k), align=align)
        side.stride = side.weights.shape[1] + extra
        check(side, x, run(shim, x, [side], options)[0])


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
@pytest.mark.parametrize("k", [2320, 101])
def test_rows_have_the_bits_of_one_row(shim: Shim, dtype: Q, k: int) -> None:
    n, rows = 6, 8
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k), cuts=(1, 4))
    single = np.concatenate([run(shim, x[t : t + 1], [side], Options(splits=2))[0] for t in range(rows)])
    check(side, x, single)
    for r, count in ((1, 2), (2, 3), (4, 3), (8, 5), (8, 8)):
        got = run(shim, x[:count], [side], Options(r=r, bucket=8))[0]
        assert np.array_equal(got.view(np.uint32), single[:count].view(np.uint32)), (r, count)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_pair_and_several_matrices(shim: Shim, dtype: Q) -> None:
    k, rows = 72, 2
    x = random_activations(rows, k) * np.float32(0.1)
    rng = np.random.default_rng(1)
    sides = [Side(dtype, random_weights(dtype, n, k, seed=n), align=n % 3 + 1) for n in (5, 5, 12)]
    bias = rng.standard_normal(5).astype(np.float32)
    sides[1].bias = bias
    wide = [x.astype(np.float64) @ truth(dtype, s.weights).astype(np.float64).T for s in sides]
    wide[1] += bias
    got = run(shim, x, sides, Options(r=2, steps=2))
    for y, expected in zip(got, wide, strict=True):
        assert np.allclose(y, expected, rtol=1e-5, atol=1e-5)
    paired = run(shim, x, sides[:2], Options(r=2, activation=ACT_SILU, pair=True))[0]
    expected = wide[0] / (1 + np.exp(-wide[0])) * wide[1]
    assert np.allclose(paired, expected, rtol=1e-5, atol=1e-5)
