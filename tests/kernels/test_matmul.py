"""Matrix products of every type at every instruction-set level, few rows and many."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quantize
from gguf import GGMLQuantizationType as Q
from kernel_cases import (
    BLOCK_TYPES,
    DEFAULT,
    EXACT,
    FINE,
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    Floats,
    GuardedBuffer,
    Level,
    bits,
    filled_weights,
    random_activations,
    random_weights,
    sizes,
    truth,
)

from apu_engine._native import InvalidError, UnsupportedError

ROWS = (*range(1, 10), 16, 33, 64)
TYPES = FLOAT_TYPES + QUANTIZED_TYPES
CASES = [pytest.param(dtype, k, id=f"{dtype.name}-{k}") for dtype in TYPES for k in sizes(dtype)]
QUANTIZED_CASES = [case for case in CASES if case.values[0] in QUANTIZED_TYPES]


def by_halves(a: Floats) -> Floats:
    """(rows, k) as (rows, half-blocks, 16)."""
    return a.reshape(len(a), -1, 16)


def activation_bound(w: Floats, x: Floats, terms: int = 1) -> Floats:
    """(T, N) largest difference to the exact product that int8 activations allow.

    A half-block of 16 activations with largest magnitude a is rounded to multiples of a / 127: each is off by at most
    half of that, which the weights' magnitudes weigh; a second term rounds what is left to 1 / 127 of it again.
    Float32 steps add 2^-24 each, of a block's part with and without its minimum; 1e-6 of the magnitudes covers all
    steps of the row lengths here.
    """
    wide, amax = np.abs(by_halves(w)).astype(np.float64), np.abs(by_halves(x)).max(2).astype(np.float64)
    rounding = amax * (0.5001 / 127) ** terms @ wide.sum(2).T
    return rounding + 1e-6 * (amax * 32) @ wide.max(2).T + 1e-30


@pytest.mark.parametrize(("dtype", "k"), CASES)
@pytest.mark.parametrize("n", [1, 3, 37])
def test_levels_and_row_counts_agree_bit_for_bit(levels: tuple[Level, ...], dtype: Q, k: int, n: int) -> None:
    w, x = random_weights(dtype, n, k), random_activations(max(ROWS), k)
    expected = levels[0].matmul(dtype, w, x)
    assert np.isfinite(expected).all()
    for level in levels:
        for rows in ROWS:
            found = level.matmul(dtype, w, x[:rows])
            assert np.array_equal(bits(found), bits(expected[:rows])), f"{level.name}, {rows} rows"
        last = level.matmul(dtype, w, x[-1:])
        assert np.array_equal(bits(last), bits(expected[-1:])), f"{level.name}, last row alone"


@pytest.mark.parametrize("dtype", QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_passes_over_blocks_of_weights_agree_bit_for_bit(levels: tuple[Level, ...], dtype: Q) -> None:
    """More weights than kernels keep near for several passes of activations: 300 KB and an odd number of rows."""
    n = 300_000 // random_weights(dtype, 1, 256).shape[1] | 1
    w, x = random_weights(dtype, n, 256), random_activations(15, 256)
    expected = levels[0].matmul(dtype, w, x)
    for level in levels[1:]:
        for rows in (1, 11, 15):
            found = level.matmul(dtype, w, x[:rows])
            assert np.array_equal(bits(found), bits(expected[:rows])), f"{level.name}, {rows} rows"


@pytest.mark.parametrize(("dtype", "k"), QUANTIZED_CASES)
def test_quantised_activations_stay_within_their_bound(levels: tuple[Level, ...], dtype: Q, k: int) -> None:
    w, x = random_weights(dtype, 24, k), random_activations(5, k)
    values = truth(dtype, w)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    difference = np.abs(levels[0].matmul(dtype, w, x) - exact)
    assert (difference <= activation_bound(values, x)).all()


@pytest.mark.parametrize(("dtype", "k"), QUANTIZED_CASES)
def test_two_terms_are_nearly_exact(levels: tuple[Level, ...], dtype: Q, k: int) -> None:
    """Fine precision: within its bound, far inside that of one term, and the same bits everywhere."""
    w, x = random_weights(dtype, 24, k), random_activations(9, k)
    values = truth(dtype, w)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    expected = levels[0].matmul(dtype, w, x, FINE)
    assert (np.abs(expected - exact) <= activation_bound(values, x, terms=2)).all()
    one = levels[0].matmul(dtype, w, x)
    assert np.linalg.norm(expected - exact) < 0.02 * np.linalg.norm(one - exact)
    for level in levels:
        for rows in (1, 2, 3, 9):
            found = level.matmul(dtype, w, x[:rows], FINE)
            assert np.array_equal(bits(found), bits(expected[:rows])), f"{level.name}, {rows} rows"


@pytest.mark.parametrize("dtype", QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_two_terms_are_the_sum_of_two_products(levels: tuple[Level, ...], dtype: Q) -> None:
    """The second product's input is what quantising the first lost, rounded once."""
    w, x = random_weights(dtype, 24, 512), random_activations(3, 512)
    halves = by_halves(x)
    d = (np.abs(halves).max(2, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 2.0**-100 / 127)
    q = np.rint(halves * inverse).astype(np.float32)
    rest = (halves.astype(np.float64) - d.astype(np.float64) * q).astype(np.float32).reshape(x.shape)
    for level in levels:
        both = level.matmul(dtype, w, x) + level.matmul(dtype, w, rest)
        assert np.array_equal(bits(level.matmul(dtype, w, x, FINE)), bits(both)), level.name


@pytest.mark.parametrize("dtype", BLOCK_TYPES, ids=lambda dtype: dtype.name)
def test_a_quantised_matrix_is_close_to_its_source(levels: tuple[Level, ...], dtype: Q) -> None:
    rng = np.random.default_rng(0)
    source, x = rng.standard_normal((64, 576)).astype(np.float32), random_activations(4, 576)
    y = levels[0].matmul(dtype, quantize(source, dtype), x)
    exact = x.astype(np.float64) @ source.astype(np.float64).T
    assert np.linalg.norm(y - exact) < 0.15 * np.linalg.norm(exact)


@pytest.mark.parametrize(("dtype", "k"), CASES)
def test_exact_precision(levels: tuple[Level, ...], dtype: Q, k: int) -> None:
    """Within 1e-5 of the sum of magnitudes, and the same bits at every level and row count."""
    w, x = random_weights(dtype, 11, k), random_activations(9, k)
    wide = truth(dtype, w).astype(np.float64)
    exact, magnitude = x.astype(np.float64) @ wide.T, np.abs(x).astype(np.float64) @ np.abs(wide).T
    expected = levels[0].matmul(dtype, w, x, EXACT)
    assert (np.abs(expected - exact) <= 1e-5 * magnitude + 1e-30).all()
    for level in levels:
        for rows in (1, 2, 4, 9):
            found = level.matmul(dtype, w, x[:rows], EXACT)
            assert np.array_equal(bits(found), bits(expected[:rows])), f"{level.name}, {rows} rows"


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("n", [3, 4, 7])
def test_float_rows_longer_than_the_first_cache(levels: tuple[Level, ...], dtype: Q, n: int) -> None:
    """One row of activations takes four rows of weights together there: the same bits as many rows."""
    w, x = random_weights(dtype, n, 6177), random_activations(6, 6177)
    expected = levels[0].matmul(dtype, w, x, EXACT)
    for level in levels:
        for rows in (1, 2, 6):
            found = level.matmul(dtype, w, x[:rows], EXACT)
            assert np.array_equal(bits(found), bits(expected[:rows])), f"{level.name}, {rows} rows"


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_unit_vectors_read_the_weights(levels: tuple[Level, ...], dtype: Q) -> None:
    """With exact precision and one-hot rows the product is the dequantised matrix itself, at every level."""
    k = 512
    w = random_weights(dtype, 7, k)
    for level in levels:
        found = level.matmul(dtype, w, np.eye(k, dtype=np.float32), EXACT)
        assert np.array_equal(found.T, truth(dtype, w)), level.name


@pytest.mark.parametrize("precision", [DEFAULT, EXACT, FINE], ids=["default", "exact", "fine"])
@pytest.mark.parametrize(("dtype", "k"), CASES)
def test_nothing_outside_the_rows_is_touched(levels: tuple[Level, ...], dtype: Q, k: int, precision: int) -> None:
    """Weights, activations and results each end where an unreadable page begins; weights start at an odd byte, with
    odd gaps between rows; a byte before the results keeps its value."""
    n, canary = 9, 0xA5
    packed = random_weights(dtype, n, k)
    row = packed.shape[1]
    stride = row + 13
    w = GuardedBuffer((n - 1) * stride + row)
    for i in range(n):
        w.array[i * stride : i * stride + row] = packed[i]
    for rows in (1, 2, 9):
        x = random_activations(rows, k)
        x_end, y_end = GuardedBuffer(x.nbytes), GuardedBuffer(4 * rows * n + 64)
        x_end.array[:] = x.view(np.uint8).ravel()
        expected = levels[0].matmul(dtype, packed, x, precision)
        for level in levels:
            y_end.array[:] = canary
            y = y_end.address + 64
            level.matmul_at(dtype, w.address, stride, x_end.address, y, rows, k, n, precision)
            found = y_end.array[64:].copy().view(np.float32).reshape(rows, n)
            assert np.array_equal(bits(found), bits(expected)), f"{level.name}, {rows} rows"
            assert (y_end.array[:64] == canary).all(), level.name


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_random_bytes_at_the_end_of_a_mapping(levels: tuple[Level, ...], dtype: Q) -> None:
    """Any bytes at all, infinite and NaN scales among them, up to an unreadable page, for 1 to 33 rows: the same
    bits at every level, or NaN at all of them."""
    elements, size = GGML_QUANT_SIZES[dtype]
    for blocks, n in ((max(1, 33 // elements), 7), (max(3, 577 // elements), 2)):
        k, rng = elements * blocks, np.random.default_rng((int(dtype), blocks))
        w = GuardedBuffer(n * blocks * size)
        w.array[:] = rng.integers(0, 256, len(w.array), dtype=np.uint8)
        w.array[-size:] = 255  # every field of the last block, MXFP4's and NVFP4's scales too
        x = rng.standard_normal((33, k)).astype(np.float32)
        weights = w.array.copy().reshape(n, -1)
        for precision in (DEFAULT, EXACT):
            expected = levels[0].matmul(dtype, weights, x, precision)
            for level in levels:
                for rows in range(1, 34):
                    found = np.empty((rows, n), np.float32)
                    inputs = x.ctypes.data, found.ctypes.data, rows, k, n, precision
                    level.matmul_at(dtype, w.address, blocks * size, *inputs)
                    same = (bits(found) == bits(expected[:rows])) | (np.isnan(found) & np.isnan(expected[:rows]))
                    assert same.all(), f"{level.name}, {rows} rows"


@pytest.mark.parametrize("dtype", QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_extreme_values_do_not_saturate(levels: tuple[Level, ...], dtype: Q) -> None:
    """All bits set or clear against activations that quantise to 127 and -127: the largest integer sums there are."""
    k = 512
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        w = filled_weights(dtype, 5, k, fill)
        values = truth(dtype, w)
        for pattern in (np.ones(k), -np.ones(k), np.resize((1, -1), k)):
            x = np.tile(pattern, (9, 1)).astype(np.float32)
            expected = x.astype(np.float64) @ values.astype(np.float64).T
            for level in levels:
                found = level.matmul(dtype, w, x)
                assert (np.abs(found - expected) <= activation_bound(values, x)).all(), (level.name, fill)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_a_row_that_is_not_finite_gives_nan_and_spares_the_others(
    levels: tuple[Level, ...], dtype: Q, value: float
) -> None:
    w, x = random_weights(dtype, 3, 512), random_activations(10, 512)
    clean = levels[0].matmul(dtype, w, x)
    x[4, 300] = value
    for level in levels:
        found = level.matmul(dtype, w, x)
        assert np.isnan(found[4]).all(), level.name
        assert np.isnan(level.matmul(dtype, w, x, FINE)[4]).all(), level.name
        others = np.arange(10) != 4
        assert np.array_equal(bits(found[others]), bits(clean[others])), level.name


def test_wrong_arguments_are_refused_by_name(levels: tuple[Level, ...]) -> None:
    level = levels[0]
    w, x = random_weights(Q.Q4_0, 2, 64), random_activations(1, 48)
    with pytest.raises(InvalidError, match=r"k is 48, expected a positive multiple of Q4_0's block"):
        level.matmul(Q.Q4_0, w, x)
    with pytest.raises(InvalidError, match=r"row_stride is 36, expected at least the row's 72"):
        level.matmul(Q.Q4_0, w, random_activations(1, 128))
    with pytest.raises(UnsupportedError, match=r"dtype 26 \(I32\)"):
        level.matmul(Q.I32, w, random_activations(1, 64))
    with pytest.raises(InvalidError, match="precision is 7"):
        level.matmul(Q.Q4_0, w, random_activations(1, 64), 7)
    for rows, k, n in ((1, 2**32 - 32, 1), (2**20, 64, 1), (1, 64, 2**25)):  # sizes that would overflow buffers
        with pytest.raises(InvalidError, match=f"{rows} rows, n {n}, k {k}: expected at most 65536 rows"):
            level.matmul_at(Q.Q4_0, w.ctypes.data, 2**40, x.ctypes.data, x.ctypes.data, rows, k, n)
