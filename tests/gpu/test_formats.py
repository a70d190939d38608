"""Matvec formats of Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4 and IQ2_XXS against the gguf package's dequantiser in float64."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from kernel_cases import random_activations, random_weights, truth
from matvec_cases import Floats, Options, Side, quantize, run_matvec
from shim import Shim

FILES = ["matvec_tables.hip"]
TYPES = [Q.Q2_K, Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4, Q.IQ2_XXS]
SHIMS = [(32, False), (32, True), (64, False), (64, True)]


@pytest.fixture(params=SHIMS, ids=lambda p: f"w{p[0]}{'r' * p[1]}")
def shim(request: pytest.FixtureRequest) -> Shim:
    """Waves of 32 copy to LDS asynchronously, waves of 64 through registers."""
    wave, reverse = request.param
    return Shim(FILES, wave, reverse, ["APU_SHIM_ASYNC"] if wave == 32 else [])


def check(dtype: Q, weights: np.ndarray, values: np.ndarray, got: Floats) -> None:
    w = truth(dtype, weights).astype(np.float64)
    size = np.abs(w)
    if dtype is Q.Q2_K:  # product and minimum are summed apart
        size += size.max(1, keepdims=True)
    bound = 4e-7 * (np.abs(values) @ size.T) + 1e-30
    assert np.all(np.abs(got - values @ w.T) <= bound), float(np.max(np.abs(got - values @ w.T) / bound))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_shapes_and_alignments(shim: Shim, dtype: Q) -> None:
    """Odd addresses, strides and row counts; slices that end early; every split and several steps."""
    block = GGML_QUANT_SIZES[dtype][0]
    cases = [
        (block, 9, Options(), Side(dtype, np.empty(0), align=1)),
        (9 * block if block == 32 else 3 * block, 8, Options(splits=2, steps=2), Side(dtype, np.empty(0))),
        (2304, 13, Options(splits=4, steps=3), Side(dtype, np.empty(0), align=2)),
        (4608, 11, Options(splits=2, steps=1), Side(dtype, np.empty(0), align=7, stride=1)),
        (4096 + block, 5, Options(splits=4, steps=1), Side(dtype, np.empty(0), cuts=(2, 3))),
    ]
    for k, n, options, side in cases:
        side.weights = random_weights(dtype, n, k)
        side.stride = side.weights.shape[1] + 13 if side.stride else 0
        a = quantize(random_activations(1, k))
        got = run_matvec(shim, f"matvec_{dtype.name.lower()}", a, k, [side], options)[0]
        check(dtype, side.weights, a.values(k), got)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.name.lower())
def test_rows_have_the_bits_of_one_row(shim: Shim, dtype: Q) -> None:
    k, n, rows = 2304, 7, 8
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k), align=3)
    name = f"matvec_{dtype.name.lower()}"
    a = quantize(x)
    single = np.concatenate([run_matvec(shim, name, quantize(x[t : t + 1]), k, [side], Options())[0] for t in range(8)])
    check(dtype, side.weights, a.values(k), single)
    for r, count, splits in ((2, 3, 4), (4, 4, 1), (8, 8, 2)):
        got = run_matvec(shim, name, quantize(x[:count]), k, [side], Options(r=r, splits=splits, steps=2, bucket=8))[0]
        assert np.array_equal(got.view(np.uint32), single[:count].view(np.uint32)), (r, count)


def test_every_scale_of_mxfp4(shim: Shim) -> None:
    """Powers of two from the denormal ones up, with activations that bring products back into range."""
    for begin in range(0, 252, 14):
        weights = random_weights(Q.MXFP4, 1, 14 * 32)
        weights.reshape(14, 17)[:, 0] = np.arange(begin, begin + 14)
        x = random_activations(1, 14 * 32, seed=begin)
        a = quantize(x * np.float32(2.0 ** ((126 - begin) / 2)))
        got = run_matvec(shim, "matvec_mxfp4", a, 14 * 32, [Side(Q.MXFP4, weights)], Options())[0]
        check(Q.MXFP4, weights, a.values(14 * 32), got)
