"""Device dequantisation (dequantize.h) bit for bit against the gguf package, at any alignment, inside guard zones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, QUANTIZED_TYPES, random_weights, truth
from shim import Shim, every_shim

FILE = Path(__file__).with_name("dequantize_kernels.hip")
PADDING = 16


@pytest.fixture(scope="module")
def shims() -> list[Shim]:
    return list(every_shim([FILE]))


def run(shim: Shim, dtype: Q, weights: np.ndarray, k: int, align: int) -> tuple[np.ndarray, np.ndarray]:
    row = shim.input(weights, align=align, padding=PADDING)
    groups = -(-k // 16)
    out, value = shim.output(k, np.float32), shim.output(groups, np.float32)
    args = shim.args("DequantizeArgs", row=row, out=out, value=value, type=int(dtype), k=k)
    shim.launch("dequantize_row", -(-groups // 64), 64, args)
    shim.clear()
    return out.array, value.array


@pytest.mark.parametrize("dtype", QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_quantised_types(dtype: Q, shims: list[Shim]) -> None:
    k = 1024
    for i, shim in enumerate(shims):
        weights = random_weights(dtype, 1, k, i)
        out, value = run(shim, dtype, weights, k, align=1)
        want = truth(dtype, weights)[0]
        assert np.array_equal(out.view(np.uint32), want.view(np.uint32))
        g = np.arange(k // 16)
        assert np.array_equal(value, want[16 * g + g % 16])


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=lambda dtype: dtype.name)
def test_float_types_of_any_length(dtype: Q, shims: list[Shim]) -> None:
    for shim in shims:
        for k, align in ((1, 1), (5, 16), (31, 2), (96, 1), (577, 4)):
            weights = random_weights(dtype, 1, k)
            assert np.array_equal(run(shim, dtype, weights, k, align)[0], truth(dtype, weights)[0])


@pytest.mark.filterwarnings("ignore:overflow")  # 12 * 2^127
@pytest.mark.parametrize(("dtype", "scales"), [(Q.MXFP4, 1), (Q.NVFP4, 4)], ids=lambda v: getattr(v, "name", ""))
def test_every_scale_of_one_byte(dtype: Q, scales: int, shims: list[Shim]) -> None:
    k = 256 * 64
    weights = random_weights(dtype, 256, 64)
    block = weights.shape[1] // (64 // (32 if dtype is Q.MXFP4 else 64))
    for begin in range(0, weights.shape[1], block):
        weights[:, begin : begin + scales] = np.arange(256, dtype=np.uint8)[:, None]
    out = run(shims[0], dtype, weights.reshape(1, -1), k, align=1)[0]
    assert np.array_equal(out.view(np.uint32), truth(dtype, weights).reshape(-1).view(np.uint32))
