"""The input kernels: RMS norm against numpy, int8 rows bit for bit as the law of native/quant/activations.h gives."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import random_activations
from matvec_cases import Quantized, quantize, quantize_fine
from shim import Shim

PART = 1024  # columns of a block without a norm
EPS = 1e-5


@pytest.fixture(
    scope="module", params=[(32, False), (32, True), (64, False), (64, True)], ids=lambda p: f"w{p[0]}{'r' * p[1]}"
)
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim(["input.hip"], wave=request.param[0], reverse=request.param[1])


def prepare(
    shim: Shim,
    x: np.ndarray,
    norm: np.ndarray | None = None,
    terms: int = 1,
    floats: bool = False,
    align: int = 16,
    rows_each: int = 1,
) -> tuple[Quantized, np.ndarray]:
    shim.clear()
    rows, k = x.shape
    columns = -(-k // 256) * 256
    q = shim.output((rows * terms, columns), np.int8)
    d = shim.output((rows * terms, columns // 16), np.float32)
    s16 = shim.output((rows * terms, columns // 16), np.float32)
    out = shim.output((rows, k), np.float32)
    args = shim.args(
        "InputArgs",
        counts=shim.input(shim.args("StepCounts", rows=99, outputs=rows // rows_each)),
        **{"in": shim.input(np.vstack([x, np.full((2, k), np.nan, np.float32)]), align=align)},
        norm=0 if norm is None else shim.input(norm),
        eps=EPS,
        in_stride=k,
        k=k,
        columns=columns,
        rows_each=rows_each,
        output_rows=1,
        terms=terms,
        q=q,
        d=d,
        s16=s16,
        x=out if floats else 0,
    )
    small = norm is None or columns <= PART
    kernel = "input_small" if small else "input_large"
    grid = (rows + 2, -(-columns // PART) if norm is None else 1)  # two rows of the bucket that the step lacks
    shim.launch(kernel, grid, shim.threads(kernel), args)
    return Quantized(q.array, d.array, s16.array), out.array


def same(a: Quantized, b: Quantized) -> bool:
    nan = np.isnan(b.d)
    return (
        np.array_equal(a.q, b.q)
        and np.array_equal(np.isnan(a.d), nan)
        and np.array_equal(np.isnan(a.s16), nan)
        and np.array_equal(a.d[~nan].view(np.uint32), b.d[~nan].view(np.uint32))
        and np.array_equal(a.s16[~nan] + np.float32(0), b.s16[~nan] + np.float32(0))
    )


@pytest.mark.parametrize("k", [1, 15, 64, 577, 1536, 4096, 4609])
def test_quantised_rows(shim: Shim, k: int) -> None:
    x = random_activations(3, k)
    x[0, k // 2] = 1e-31
    got, _ = prepare(shim, x, align=4 if k % 2 else 16)
    assert same(got, quantize(x))
    got, floats = prepare(shim, x, terms=2, floats=True)
    assert same(got, quantize_fine(x))
    assert np.array_equal(floats, x)


def test_ties_and_extremes(shim: Shim) -> None:
    x = np.zeros((6, 64), np.float32)
    x[0, :32] = np.arange(32) - 15.5
    x[0, 0] = x[0, 16] = 127  # d = 1: every value a tie
    x[1, :16] = np.float32(2.0**-100)
    x[1, 16:32] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    x[2] = np.float32(3e38)
    x[3, 5], x[3, 20], x[3, 40] = np.inf, -np.inf, np.nan
    x[4] = -np.float32(0.0)
    x[5, ::3] = np.float32(1e-45)
    got, _ = prepare(shim, x)
    assert same(got, quantize(x))
    assert same(prepare(shim, x[:1], terms=2)[0], quantize_fine(x[:1]))


@pytest.mark.parametrize("k", [96, 130, 1024, 4608, 18432])
def test_norm(shim: Shim, k: int) -> None:
    x = random_activations(2, k)
    weight = np.random.default_rng(k).uniform(0.5, 1.5, k).astype(np.float32)
    got, floats = prepare(shim, x, weight, floats=True, rows_each=2)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight
    assert np.allclose(floats, expected, rtol=2e-6, atol=1e-30)
    assert same(got, quantize(floats))


def test_norm_without_quantisation(shim: Shim) -> None:
    x = random_activations(2, 70)
    weight = np.ones(70, np.float32)
    shim.clear()
    out = shim.output((2, 70), np.float32)
    counts = shim.input(shim.args("StepCounts", rows=1))
    fields = {"in": shim.input(x), "norm": shim.input(weight), "x": out, "counts": counts}
    args = shim.args("InputArgs", **fields, eps=EPS, in_stride=70, k=70, columns=256, rows_each=1, terms=1)
    shim.launch("input_small", 2, 256, args)
    assert np.isfinite(out.array[0]).all()
    assert np.isnan(out.array[1]).all()  # beyond the count: not written
