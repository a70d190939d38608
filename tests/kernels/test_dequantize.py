"""Dequantisation and the plain read that bandwidths are compared with."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, QUANTIZED_TYPES, Bytes, Floats, Level, bits, random_weights, sizes, truth

from apu_engine._native import InvalidError, UnsupportedError, check, ffi, lib


def dequantize(dtype: int, weights: Bytes, k: int) -> Floats:
    out = np.empty((len(weights), k), np.float32)
    data, address = ffi.cast("void *", weights.ctypes.data), ffi.cast("float *", out.ctypes.data)
    check(lib.apu_kernel_dequantize(dtype, data, address, len(weights), k))
    return out


@pytest.mark.parametrize("dtype", FLOAT_TYPES + QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_equals_the_gguf_package_bit_for_bit(dtype: Q) -> None:
    for k in sizes(dtype):
        w = random_weights(dtype, 5, k)
        assert np.array_equal(bits(dequantize(dtype, w, k)), bits(truth(dtype, w)))


def test_every_half_precision_number() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    found = dequantize(Q.F16, halves.view(np.uint8).reshape(1, -1), 1 << 16)[0]
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow")  # 12 * 2^127
@pytest.mark.parametrize(("dtype", "scales"), [(Q.MXFP4, 1), (Q.NVFP4, 4)], ids=lambda v: getattr(v, "name", ""))
def test_every_scale_of_one_byte(dtype: Q, scales: int) -> None:
    """Powers of two down to denormals, and E4M3 with its odd ends: zero, NaN's code, the ignored sign."""
    w = random_weights(dtype, 256, 64)
    block = w.shape[1] * GGML_QUANT_SIZES[dtype][0] // 64
    for begin in range(0, w.shape[1], block):
        w[:, begin : begin + scales] = np.arange(256, dtype=np.uint8)[:, None]
    assert np.array_equal(bits(dequantize(dtype, w, 64)), bits(truth(dtype, w)))


def test_wrong_arguments_are_refused_by_name() -> None:
    w = random_weights(Q.Q4_K, 1, 256)
    with pytest.raises(InvalidError, match="k is 128, expected a positive multiple of Q4_K's block"):
        dequantize(Q.Q4_K, w, 128)
    with pytest.raises(UnsupportedError, match="dtype 99"):
        dequantize(99, w, 256)


def test_plain_read_reports_a_plausible_bandwidth(levels: tuple[Level, ...]) -> None:
    data = np.ones(8 << 20, np.uint8)
    device = levels[0].device
    for nbytes in (data.nbytes, (256 << 10) + 7, 1):  # whole units, a part of one, less than a load
        assert 1e3 < device.read_rate(data.ctypes.data, nbytes, 3) < 1e13
    for nbytes, passes in ((64, 0), (0, 1)):
        with pytest.raises(InvalidError, match="bytes and repeats must be positive"):
            device.read_rate(data.ctypes.data, nbytes, passes)
    assert device.read_rate(data.ctypes.data + 7, data.nbytes - 7) > 1e3  # any alignment


def test_gather_reads_parts_that_lie_anywhere(levels: tuple[Level, ...]) -> None:
    data = np.ones(8 << 20, np.uint8)
    device, base = levels[0].device, data.ctypes.data
    for nbytes in ((256 << 10) + 7, 1 << 20, 1):
        assert 1e3 < device.gather_rate([base + (5 << 20), base, base + 7], nbytes, 3) < 1e13
    for parts, nbytes, passes in (([], 64, 1), ([base], 0, 1), ([base], 64, 0), ([base, 0], 64, 1)):
        with pytest.raises(InvalidError, match="apu_kernel_gather: "):
            device.gather_rate(parts, nbytes, passes)
