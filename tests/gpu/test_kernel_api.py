"""The kernels alone on a GPU: products of every kind within their bounds, their time, the plain read, refusals.

With APU_TEST_DEVICE=cuda or hip on that device, all types and sizes; else on device "hip" as the CPU plays it, few.
"""

from __future__ import annotations

import os
from itertools import groupby

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import (
    DEFAULT,
    EXACT,
    FINE,
    FLOAT_TYPES,
    QUANTIZED_TYPES,
    Floats,
    Level,
    random_activations,
    random_weights,
    sizes,
    truth,
)
from test_matmul import activation_bound

from apu_engine._native import Device, InvalidError, Region, UnsupportedError

REAL = os.environ.get("APU_TEST_DEVICE", "")
MATVEC_ROWS = 8
ROWS = (1, 2, 3, 5, 8, 9, 33, 300) if REAL else (1, 3, 8)
CASES = (
    [(dtype, k) for dtype in FLOAT_TYPES + QUANTIZED_TYPES for k in sizes(dtype)]
    if REAL
    else [(Q.F32, 577), (Q.BF16, 96), (Q.Q8_0, 288), (Q.Q4_K, 512), (Q.Q3_K, 256)]
)


@pytest.fixture
def level(gpu: Device) -> Level:
    return Level(gpu.props.kind, gpu)


def bound(dtype: Q, values: Floats, x: Floats, precision: int, rows: int) -> Floats:
    """(T, N) largest difference to the exact product.

    Few rows: what int8 activations allow, or the rounding of float sums. Many: matrix tiles take both factors in 16
    bits, BF16 where the matrix is, which adds a relative 2^-10 (2^-8) of the magnitudes.
    """
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).astype(np.float64).T
    quantized = dtype in QUANTIZED_TYPES and precision != EXACT
    most = activation_bound(values, x, 2 if precision == FINE else 1) if quantized else 1e-5 * magnitude + 1e-30
    if rows > MATVEC_ROWS and dtype is not Q.F32 and (quantized or dtype in FLOAT_TYPES):
        most = most + magnitude * (2.0**-8 if dtype is Q.BF16 else 2.0**-10)
    return most


@pytest.mark.parametrize(("dtype", "k"), [pytest.param(d, k, id=f"{d.name}-{k}") for d, k in CASES])
def test_products(level: Level, dtype: Q, k: int) -> None:
    """Within their bounds, and in a class of kernels a row has the same bits beside any others."""
    w, x = random_weights(dtype, 9, k), random_activations(max(ROWS), k)
    values = truth(dtype, w)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    for precision in (DEFAULT, FINE, EXACT) if REAL else (DEFAULT, FINE):
        for _, same in groupby(ROWS, lambda rows: rows > MATVEC_ROWS):
            most = None
            for rows in sorted(same, reverse=True):
                found = level.matmul(dtype, w, x[:rows], precision)
                assert (np.abs(found - exact[:rows]) <= bound(dtype, values, x[:rows], precision, rows)).all(), rows
                most = found if most is None else most
                assert np.array_equal(found, most[:rows]), rows


def test_weights_at_any_address(level: Level) -> None:
    w, x = random_weights(Q.Q6_K, 5, 256), random_activations(2, 256)
    want = level.matmul(Q.Q6_K, w, x)
    row = w.shape[1]
    for shift, gap in ((1, 0), (7, 3)):
        spread = np.zeros(shift + 5 * (row + gap), np.uint8)
        for i in range(5):
            spread[shift + i * (row + gap) :][:row] = w[i]
        found = np.empty_like(want)
        level.matmul_at(Q.Q6_K, spread.ctypes.data + shift, row + gap, x.ctypes.data, found.ctypes.data, 2, 256, 5)
        assert np.array_equal(found, want)


def test_time_and_read(level: Level, device: Device) -> None:
    w, x = random_weights(Q.Q8_0, 8, 256), random_activations(1, 256)
    assert 0 < level.device.matmul_time(int(Q.Q8_0), w, x, copies=3, passes=2) < 10
    with pytest.raises(UnsupportedError, match="expected a GPU, found device cpu"):
        device.matmul_time(int(Q.Q8_0), w, x, copies=1, passes=1)
    with pytest.raises(InvalidError, match="count and repeats must be positive, they are 1, 8, 0, 1"):
        level.device.matmul_time(int(Q.Q8_0), w, x, copies=0, passes=1)
    assert 0 < level.device.read_time(np.zeros((4, 4096), np.uint8), copies=2, passes=2) < 10
    region = Region.alloc(level.device, 100_000)
    try:
        for begin, nbytes in ((0, 100_000), (3, 31), (16, 40_000)):
            assert level.device.read_rate(region.address + begin, nbytes, 2) > 1e3
        with pytest.raises(InvalidError, match="15 bytes hold no aligned 16"):
            level.device.read_rate(region.address + 1, 15, 1)
    finally:
        region.free()
