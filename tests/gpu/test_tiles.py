"""Matrix tiles on the CPU: products of halves and bfloat16, K contiguous or not, and the element map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shim import Shim

FILE = Path(__file__).with_name("tile_kernels.hip")


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("reverse", [False, True])
def test_products(wave: int, reverse: bool) -> None:
    rng = np.random.default_rng(wave)
    shim = Shim([FILE], wave, reverse)
    a, b = (rng.integers(-64, 64, (16, 16)).astype(np.float16) for _ in range(2))
    outs = [shim.output((16, 16), np.float32) for _ in range(3)]
    args = shim.args(
        "TileArgs",
        a=shim.input(a),
        b=shim.input(b),
        at=shim.input(np.ascontiguousarray(a.T)),
        bt=shim.input(np.ascontiguousarray(b.T)),
        halves=outs[0],
        transposed=outs[1],
        bfloats=outs[2],
    )
    shim.launch("tile_product", 1, 64, args, lds=64 * 24 * 2)
    product = a.astype(np.float32) @ b.astype(np.float32).T  # integers: exact in any order
    assert np.array_equal(outs[0].array, 2 * product)
    assert np.array_equal(outs[1].array, product)

    def bfloat16(v: np.ndarray) -> np.ndarray:
        return (v.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    got, exact = outs[2].array, bfloat16(a) @ bfloat16(b).T
    assert np.all(np.abs(got - exact) <= 1e-6 * (np.abs(bfloat16(a)) @ np.abs(bfloat16(b)).T))
