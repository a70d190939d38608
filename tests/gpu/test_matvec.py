"""Matvec kernels of quantised types against numpy: the gguf dequantiser in float64 over the same activations."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import random_activations, random_weights, truth
from matvec_cases import (
    ACT_GELU_ERF,
    ACT_GELU_TANH,
    ACT_SILU,
    ACT_SWIGLU_OAI,
    Floats,
    Options,
    Side,
    quantize,
    quantize_fine,
    run_matvec,
)
from shim import Shim

FILES = ["matvec_legacy.hip", "matvec_k.hip"]
TYPES = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K]
SHIMS = [(32, False), (32, True), (64, False), (64, True)]


@pytest.fixture(scope="module", params=SHIMS, ids=lambda p: f"w{p[0]}{'r' * p[1]}")
def shim(request: pytest.FixtureRequest) -> Shim:
    """Waves of 32 copy to LDS asynchronously, waves of 64 through registers."""
    wave, reverse = request.param
    return Shim(FILES, wave, reverse, ["APU_SHIM_ASYNC"] if wave == 32 else [])


def expected(dtype: Q, weights: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product and the error that float32 sums of it may have."""
    w = truth(dtype, weights).astype(np.float64)
    return values @ w.T, 4e-7 * (np.abs(values) @ np.abs(w).T) + 1e-30


def check(dtype: Q, weights: np.ndarray, values: np.ndarray, got: Floats) -> None:
    y, bound = expected(dtype, weights, values)
    assert np.all(np.abs(got - y) <= bound), float(np.max(np.abs(got - y) / bound))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_shapes_and_alignments(shim: Shim, dtype: Q) -> None:
    """Odd addresses, strides and row counts; slices that end early; every split and several steps."""
    block = 256 if dtype.name.endswith("_K") else 32
    cases = [
        (block, 9, Options(), Side(dtype, np.empty(0), align=1)),
        (9 * block if block == 32 else 3 * block, 8, Options(splits=2, steps=2), Side(dtype, np.empty(0))),
        (2304, 13, Options(splits=4, steps=3), Side(dtype, np.empty(0), align=2)),
        (4608, 11, Options(splits=2, steps=1), Side(dtype, np.empty(0), align=7, stride=1)),
        (4096 + block, 5, Options(splits=4, steps=1), Side(dtype, np.empty(0), cuts=(2, 3))),
    ]
    for k, n, options, side in cases:
        x = random_activations(1, k)
        side.weights = random_weights(dtype, n, k)
        side.stride = side.weights.shape[1] + 13 if side.stride else 0
        a = quantize(x)
        got = run_matvec(shim, f"matvec_{dtype.name.lower()}", a, k, [side], options)[0]
        check(dtype, side.weights, a.values(k), got)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_rows_have_the_bits_of_one_row(shim: Shim, dtype: Q) -> None:
    k, n, rows = 2304, 7, 8
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k))
    name = f"matvec_{dtype.name.lower()}"
    a = quantize(x)
    single = np.concatenate(
        [run_matvec(shim, name, quantize(x[t : t + 1]), k, [side], Options(splits=2))[0] for t in range(rows)]
    )
    check(dtype, side.weights, a.values(k), single)
    for r, count, splits in ((1, 3, 1), (2, 3, 4), (4, 3, 2), (4, 4, 1), (8, 5, 1), (8, 8, 4)):
        options = Options(r=r, splits=splits, steps=2, bucket=8)
        got = run_matvec(shim, name, quantize(x[:count]), k, [side], options)[0]
        assert np.array_equal(got.view(np.uint32), single[:count].view(np.uint32)), (r, count)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    from math import erfc

    return 0.5 * x * np.vectorize(erfc)(-x / np.sqrt(2))


def swish(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-1.702 * x))


ACTIVATIONS = {ACT_SILU: silu, ACT_GELU_TANH: gelu_tanh, ACT_GELU_ERF: gelu_erf, ACT_SWIGLU_OAI: swish}


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=("silu", "gelu_tanh", "gelu_erf", "swiglu_oai"))
@pytest.mark.parametrize("dtype", TYPES[:2], ids=lambda t: t.name.lower())
def test_gated_pair(shim: Shim, dtype: Q, kind: int) -> None:
    k, n, rows = 256, 19, 2
    x = random_activations(rows, k, seed=kind) * 3
    x[:, ::2] *= 0.2
    rng = np.random.default_rng(kind)
    bias = rng.standard_normal((2, n)).astype(np.float32)
    sides = [Side(dtype, random_weights(dtype, n, k, seed=s), bias[s]) for s in range(2)]
    a = quantize(x)
    gate, up = (expected(dtype, s.weights, a.values(k))[0] + s.bias for s in sides)
    up = up + (kind == ACT_SWIGLU_OAI)
    y = ACTIVATIONS[kind](gate) * up
    residual = rng.standard_normal((rows, n)).astype(np.float32)
    name = f"matvec_{dtype.name.lower()}"
    paired = run_matvec(shim, name, a, k, sides, Options(r=2, steps=2, activation=kind, pair=True, residual=residual))[
        0
    ]
    scale = np.abs(y) + np.abs(up) * 0.05 + 1e-3
    assert np.max(np.abs(paired - (y + residual)) / (scale + np.abs(residual))) < 2e-5
    # Gate and up of different types: up comes from memory.
    second = run_matvec(shim, name, a, k, [sides[1]], Options(r=2))[0]
    apart = run_matvec(shim, name, a, k, [sides[0]], Options(r=2, activation=kind, up=second, residual=residual))[0]
    assert np.array_equal(apart.view(np.uint32), paired.view(np.uint32))


def test_four_matrices_with_bias_residual_and_cap(shim: Shim) -> None:
    k, rows = 288, 3
    dtype = Q.Q8_0
    x = random_activations(rows, k) * 4
    rng = np.random.default_rng(5)
    sides = [Side(dtype, random_weights(dtype, n, k, seed=n), align=n % 4) for n in (17, 1, 8, 30)]
    for side in sides[::2]:
        side.bias = rng.standard_normal(len(side.weights)).astype(np.float32)
    residual = rng.standard_normal((rows, 17)).astype(np.float32)
    a = quantize(x)
    got = run_matvec(shim, "matvec_q8_0", a, k, sides, Options(r=4, splits=2, residual=residual, cap=3.0, bucket=4))
    for m, side in enumerate(sides):
        y = expected(dtype, side.weights, a.values(k))[0] + (side.bias if side.bias is not None else 0)
        if m == 0:
            y = residual + 3 * np.tanh(y / 3)
        assert np.allclose(got[m], y, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES[:1], ids=lambda t: t.name.lower())
def test_two_terms(shim: Shim, dtype: Q) -> None:
    """Precision "fine": rows are sums of two products; every kernel's rows give the same bits."""
    k, n, rows = 288, 10, 5
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k))
    a = quantize_fine(x)
    values = a.values(k).reshape(rows, 2, k).sum(1)
    many = run_matvec(shim, "matvec_q8_0", a, k, [side], Options(r=8, terms=2))[0]
    check(dtype, side.weights, values, many)
    few = run_matvec(shim, "matvec_q8_0", a, k, [side], Options(r=2, terms=2))[0]
    assert np.array_equal(few.view(np.uint32), many.view(np.uint32))


def test_non_finite_rows_stay_apart(shim: Shim) -> None:
    k, n = 256, 6
    x = random_activations(2, k)
    x[0, 40] = np.inf
    side = Side(Q.Q4_0, random_weights(Q.Q4_0, n, k))
    a = quantize(x)
    got = run_matvec(shim, "matvec_q4_0", a, k, [side], Options(r=2))[0]
    assert np.isnan(got[0]).all()
    check(Q.Q4_0, side.weights, a.values(k)[1:], got[1:])
