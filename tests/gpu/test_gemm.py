"""GEMM kernels of every type against numpy in float64: shapes, alignments, segments, epilogues, splits, ranges."""

from __future__ import annotations

import numpy as np
import pytest
from gemm_cases import FILES, OWN, Options, expected, make_rows, run_gemm
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, QUANTIZED_TYPES, random_activations, random_weights, truth
from matvec_cases import ACT_GELU_ERF, ACT_GELU_TANH, ACT_SILU, Floats, Quantized, Side, quantize, quantize_fine
from shim import Shim

SHIMS = [(32, False), (64, True)]  # large blocks and staged ones run in the other orders


@pytest.fixture(params=SHIMS, ids=lambda p: f"w{p[0]}{'r' * p[1]}", scope="module")
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim(FILES, wave=request.param[0], reverse=request.param[1])


@pytest.fixture(params=[False, True], ids=["", "r"], scope="module")
def staged(request: pytest.FixtureRequest) -> Shim:
    """Large blocks that stage their weights in LDS by asynchronous copies."""
    return Shim(FILES, wave=32, reverse=request.param, defines=["APU_SHIM_STAGED"])


def inputs(dtype: Q, x: Floats) -> tuple[Quantized | Floats, np.ndarray]:
    """What the kernels read, and its values."""
    if dtype in FLOAT_TYPES:
        return x, x.astype(np.float64)
    a = quantize(x)
    return a, a.values(x.shape[1])


def check(got: Floats, y: np.ndarray, bound: np.ndarray) -> None:
    assert np.all(np.isfinite(got))
    assert np.all(np.abs(got - y) <= bound), float(np.max(np.abs(got - y) / bound))


def product(shim: Shim, dtype: Q, rows: int, n: int, k: int, side: Side, o: Options) -> None:
    a, values = inputs(dtype, random_activations(rows, k))
    side.weights = random_weights(dtype, n, k)
    side.stride = side.weights.shape[1] + 13 if side.stride else 0
    check(run_gemm(shim, a, k, [side], o)[0], *expected(dtype, side.weights, values))


def k_of(dtype: Q, small: int) -> int:
    elements = GGML_QUANT_SIZES[dtype][0]
    return -(-small // elements) * elements


@pytest.mark.parametrize("dtype", OWN, ids=lambda t: t.name.lower())
def test_types(shim: Shim, dtype: Q) -> None:
    product(shim, dtype, 9, 20, k_of(dtype, 288), Side(dtype, np.empty(0), align=1, stride=1), Options())


@pytest.mark.parametrize("dtype", OWN, ids=lambda t: t.name.lower())
def test_large_blocks(dtype: Q) -> None:
    shim = Shim(FILES, wave=32, reverse=True)
    product(shim, dtype, 18, 33, k_of(dtype, 320), Side(dtype, np.empty(0), align=2), Options(large=True))


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("dtype", OWN, ids=lambda t: t.name.lower())
def test_staged_weights(staged: Shim, dtype: Q, large: bool) -> None:
    """Chunks that end within K, at an odd address, and a third one in the first one's place."""
    k = k_of(dtype, 544)
    product(staged, dtype, 18, 33, k, Side(dtype, np.empty(0), align=3), Options(large=large, staged=True))


@pytest.mark.parametrize("dtype", [t for t in QUANTIZED_TYPES if t not in OWN], ids=lambda t: t.name.lower())
def test_any_type(shim: Shim, dtype: Q) -> None:
    product(shim, dtype, 9, 20, k_of(dtype, 256), Side(dtype, np.empty(0), align=1), Options())


@pytest.mark.parametrize("dtype", [Q.F16, Q.BF16, Q.F32], ids=lambda t: t.name.lower())
def test_float_rows_of_any_length(shim: Shim, staged: Shim, dtype: Q) -> None:
    for k in (1, 31, 77, 129):
        for large in (False, True):
            product(shim, dtype, 9, 17, k, Side(dtype, np.empty(0), align=1), Options(large=large))
            if dtype is not Q.F32:
                product(staged, dtype, 9, 17, k, Side(dtype, np.empty(0), align=1), Options(large=large, staged=True))


@pytest.mark.parametrize("dtype", [Q.F32, Q.Q4_K, Q.IQ1_S, Q.F16], ids=lambda t: t.name.lower())
def test_exact(shim: Shim, dtype: Q) -> None:
    """Weights in float32, fma in the order of columns: 1e-5 of the terms' magnitudes and better."""
    k = k_of(dtype, 288)
    x, weights = random_activations(70, k), random_weights(dtype, 67, k)
    got = run_gemm(shim, x, k, [Side(dtype, weights, align=1)], Options(exact=True))[0]
    w = truth(dtype, weights).astype(np.float64)
    check(got, x.astype(np.float64) @ w.T, 2e-6 * (np.abs(x).astype(np.float64) @ np.abs(w).T))


def silu(v: np.ndarray) -> np.ndarray:
    return v / (1 + np.exp(-np.clip(v, -700, None)))


@pytest.mark.parametrize("dtype", [Q.Q4_0, Q.Q6_K, Q.BF16, Q.F32], ids=lambda t: t.name.lower())
def test_epilogues(shim: Shim, dtype: Q) -> None:
    """Pairs, a gate computed before, biases, caps, residuals, several matrices; in splits and whole."""
    k, rows, n = 512, 35, 37
    rng = np.random.default_rng(1)
    x = (random_activations(rows, k) / 64).astype(np.float32)
    a, values = inputs(dtype, x)
    w = [random_weights(dtype, n + 3 * m, k, m) for m in range(3)]
    bias = [rng.standard_normal(len(v)).astype(np.float32) for v in w]
    y = [expected(dtype, v, values) for v in w]
    for splits in (1, 2):
        for large in (False, True):
            o = Options(splits=splits if dtype is not Q.F32 else 1, large=large)
            residual = rng.standard_normal((rows, n)).astype(np.float32)
            o.residual, o.cap, o.bucket = residual, 5.0, 40
            got = run_gemm(shim, a, k, [Side(dtype, v, b) for v, b in zip(w, bias, strict=True)], o)
            check(got[0], 5 * np.tanh((y[0][0] + bias[0]) / 5) + residual, y[0][1] + 1e-5)
            check(got[1], y[1][0] + bias[1], y[1][1] + 1e-5)
            check(got[2], y[2][0] + bias[2], y[2][1] + 1e-5)

            up = random_weights(dtype, n, k, 9)
            v, up_bound = expected(dtype, up, values)
            o.activation, o.pair, o.cap = ACT_SILU, True, 0
            got = run_gemm(shim, a, k, [Side(dtype, w[0], bias[0]), Side(dtype, up)], o)
            gate = y[0][0] + bias[0]
            bound = 1.2 * np.abs(v) * y[0][1] + (np.abs(silu(gate)) + y[0][1]) * up_bound + 1e-5
            check(got[0], silu(gate) * v + residual, bound)

            o.pair, o.residual, o.gate = False, None, gate.astype(np.float32)
            got = run_gemm(shim, a, k, [Side(dtype, up)], o)
            check(got[0], silu(gate) * v, np.abs(silu(gate)) * up_bound + 1e-5)


@pytest.mark.parametrize("activation", [ACT_GELU_TANH, ACT_GELU_ERF])
def test_gelu_of_a_pair(activation: int) -> None:
    shim = Shim(FILES)
    a = quantize(random_activations(9, 256) / 100)
    sides = [Side(Q.Q8_0, random_weights(Q.Q8_0, 16, 256, m)) for m in range(2)]
    plain = run_gemm(shim, a, 256, sides, Options())
    got = run_gemm(shim, a, 256, sides, Options(activation=activation, pair=True))[0]
    g = plain[0].astype(np.float64)
    erf = np.vectorize(__import__("math").erf)
    tanh = np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))
    gelu = 0.5 * g * (1 + (tanh if activation == ACT_GELU_TANH else erf(g / np.sqrt(2))))
    assert np.allclose(got, gelu * plain[1], rtol=3e-6, atol=1e-7)


def test_segments(shim: Shim) -> None:
    side = Side(Q.Q5_0, np.empty(0), align=5, stride=1, cuts=(1, 2, 30, 45))
    product(shim, Q.Q5_0, 9, 70, 288, side, Options())


def test_rows_do_not_depend_on_their_neighbours(shim: Shim, staged: Shim) -> None:
    """The bits of a row in any place of any step, in small and large blocks and staged or not."""
    k, n = 576, 40
    x = random_activations(45, k)
    sides = [Side(Q.Q5_1, random_weights(Q.Q5_1, n, k)), Side(Q.Q5_1, random_weights(Q.Q5_1, 21, k, 1))]
    whole = run_gemm(shim, quantize(x), k, sides, Options())
    for begin, end, s, o in (
        (0, 45, shim, Options(large=True)),
        (7, 20, shim, Options()),
        (33, 42, shim, Options(large=True, bucket=300)),
        (3, 45, staged, Options(staged=True)),
        (40, 45, staged, Options(large=True, staged=True)),
    ):
        got = run_gemm(s, quantize(x[begin:end]), k, sides, o)
        if s.wave != shim.wave:
            continue  # the order within a tile is the wave's own
        for y, part in zip(whole, got, strict=True):
            assert np.array_equal(y[begin:end].view(np.uint32), part.view(np.uint32))


@pytest.mark.parametrize("dtype", [Q.Q4_0, Q.BF16], ids=lambda t: t.name.lower())
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-14, 60000.0, 2.0**90])
def test_weights_that_halves_cannot_hold(shim: Shim, dtype: Q, size: float) -> None:
    """A tile whose weights leave the range of halves is made again with another exponent."""
    k, rows, n = 256, 9, 70
    x = random_activations(rows, k)
    a, values = inputs(dtype, x)
    if dtype is Q.BF16:
        w = random_weights(Q.F32, n, k).view(np.float32) * np.float32(size)
        weights = (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        weights = random_weights(dtype, n, k)
        scale = np.float16(min(max(size, 2.0**-24), 60000.0))
        weights.reshape(n, -1, 18)[:, :, :2] = np.full((n, 8, 1), scale, np.float16).view(np.uint8)
    with np.errstate(over="ignore"):
        y, bound = expected(dtype, weights, values)
    check(run_gemm(shim, a, k, [Side(dtype, weights)], Options(large=rows % 2 == 0))[0], y, bound)


def test_small_weights_beside_large_ones(shim: Shim) -> None:
    """What is far below the largest weight of a block's tile loses at most 2^-13 of 2^-10, once again below it."""
    k, rows, n = 64, 9, 16
    x = random_activations(rows, k)
    w = np.full((n, k), 2.0**-20, np.float32)
    w[3, 5] = 1.0
    weights = (w.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    got = run_gemm(shim, x, k, [Side(Q.BF16, weights)], Options())[0]
    y, bound = expected(Q.BF16, weights, x.astype(np.float64))
    check(got, y, bound + 2.0**-25 * np.abs(x).sum(1, keepdims=True))


def test_rows_as_halves(shim: Shim) -> None:
    x = random_activations(7, 300)
    x[2], x[3, 7], x[5] = 0, np.nan, x[5] * 1e-33
    for source in (x, quantize(x)):
        shim.clear()
        halves, scales = make_rows(shim, source, 300)
        h, s = halves.array[:7].astype(np.float64), scales.array.astype(np.float64)
        assert h.shape == (7, 512) and np.all(h[:, 300 if source is x else 304 :] == 0)
        values = x.astype(np.float64) if source is x else source.values(300)
        assert np.array_equal(np.frexp(s)[0], np.full(7, 0.5))
        good = np.isfinite(values)
        most = np.nanmax(np.abs(values), 1)[:, None]
        error = np.abs(h[:, :300] * s[:, None] - values)
        assert np.all(error[good] <= (2.0**-11 * np.abs(values) + 2.0**-38 * most)[good])
        assert np.isnan(h[:, :300][~good]).all()


def test_two_terms(shim: Shim) -> None:
    """Precision "fine": the input to 15 bits; weights are halves still."""
    k, n = 544, 20
    x = random_activations(9, k)
    a = quantize_fine(x)
    weights = random_weights(Q.Q8_0, n, k)
    scale = weights.reshape(n, -1, 34)[:, :, :2]
    scale[...] = np.full((n, k // 32, 1), 2.0**-8, np.float16).view(np.uint8)  # weights that halves hold exactly
    got = run_gemm(shim, a, k, [Side(Q.Q8_0, weights)], Options(), passes=2)[0]
    w = truth(Q.Q8_0, weights).astype(np.float64)
    check(got, x.astype(np.float64) @ w.T, 2.0**-14 * (np.abs(x).astype(np.float64) @ np.abs(w).T))
