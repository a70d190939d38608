"""Norms, activations and attention at every instruction-set level, through the ops that use the helpers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_cases import Level
from native.rig import NONE, PAGE_TOKENS, Rig, Step, rms_norm
from numpy.typing import NDArray

from apu_engine._native import lib

F64 = NDArray[np.float64]


def logistic(x: F64) -> F64:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def normal_cdf(x: F64) -> F64:
    from math import erfc

    return 0.5 * np.vectorize(erfc)(-x / np.sqrt(2))


ACTIVATIONS: dict[int, Callable[[F64], F64]] = {
    lib.APU_ACT_SILU: lambda x: x * logistic(x),
    lib.APU_ACT_GELU_TANH: lambda x: x * logistic(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    lib.APU_ACT_GELU_ERF: lambda x: x * normal_cdf(x),
}


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=["silu", "gelu_tanh", "gelu_erf"])
@pytest.mark.parametrize("reach", [3.0, 15.0, 90.0])
def test_activations(levels: tuple[Level, ...], kind: int, reach: float) -> None:
    """Within 1e-6, or 2e-7 of the argument where the result is a vanishing tail."""
    gate = np.linspace(-reach, reach, 4099, dtype=np.float32)  # x is 1, so the gate's products are these numbers
    rig = Rig(rows=1, sequences=1, outputs=1, vocabulary=1)
    out = rig.scratch("out", len(gate))
    matrices = (rig.weight("gate", gate[:, None].copy()), rig.weight("up", np.ones((len(gate), 1), np.float32)))
    x = rig.input(np.ones((1, 1), np.float32))
    rig.op(lib.APU_OP_MATMUL, ins=(x,), outs=(out,), weights=(NONE, *matrices), ints=(kind,))
    wide = gate.astype(np.float64)
    expected = ACTIVATIONS[kind](wide)
    for level in levels:
        with rig.build(level.device) as plan:
            plan.run(Step().sequence([0]))
            error = np.abs(plan.read(out, 1)[0] - expected)
        assert (error <= np.maximum(1e-6 * np.abs(expected), 2e-7 * np.abs(wide))).all(), level.name


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 97, 576])
def test_rms_norm(levels: tuple[Level, ...], size: int) -> None:
    rng = np.random.default_rng(size)
    x, residual, weight = (rng.standard_normal((rows, size)).astype(np.float32) for rows in (4, 4, 1))
    rig = Rig(rows=4, outputs=4, vocabulary=4)
    a, b = rig.input(x), rig.input(residual, "residual")
    out = rig.scratch("out", size)
    norm = rig.weight("norm", weight[0].copy())
    rig.op(lib.APU_OP_RMS_NORM, ins=(a, b), outs=(out,), weights=(norm,), floats=(1e-5,))
    expected = rms_norm(x, weight[0], 1e-5) + residual
    for level in levels:
        with rig.build(level.device) as plan:
            plan.run(Step().sequence(range(4)))
            np.testing.assert_allclose(plan.read(out, 4), expected, rtol=1e-6, atol=2e-6, err_msg=level.name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("size", "length"), [(8, 1), (20, 9), (64, 150), (128, 257)])
def test_attention(levels: tuple[Level, ...], dtype: type[np.floating], size: int, length: int) -> None:
    """One query over `length` cached tokens; what lies behind them in the last page is NaN."""
    heads, pages = 2, -(-length // PAGE_TOKENS)
    rng = np.random.default_rng(length)
    q = rng.standard_normal((1, heads * size)).astype(np.float32)
    rig = Rig(rows=1, sequences=1, outputs=1, vocabulary=1)
    k, v = (rig.state(name, heads, size, pages, dtype=dtype) for name in "kv")
    cache = []
    for state in (k, v):
        values = rng.standard_normal((heads, length, size)).astype(dtype)
        for p in range(pages):
            part = values[:, p * PAGE_TOKENS : (p + 1) * PAGE_TOKENS]
            rig.memory(state)[p, :, : part.shape[1]] = part
        cache.append(values.astype(np.float64))
    query = rig.scratch("q", (heads, size))
    identity = rig.weight("identity", np.eye(heads * size, dtype=np.float32))
    out = rig.scratch("out", heads * size)
    rig.op(lib.APU_OP_MATMUL, ins=(rig.input(q),), outs=(query,), weights=(NONE, identity))
    rig.op(lib.APU_OP_ATTENTION, ins=(query,), outs=(out,), states=(k, v), floats=(size**-0.5,))
    scores = np.einsum("hd,hsd->hs", q.reshape(heads, size).astype(np.float64), cache[0]) * size**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = np.einsum("hs,hsd->hd", weights / weights.sum(1, keepdims=True), cache[1])
    for level in levels:
        with rig.build(level.device) as plan:
            plan.run(Step(1).sequence([0], length - 1, tables=(range(pages),)))
            found = plan.read(out, 1).reshape(heads, size)
        np.testing.assert_allclose(found, expected, atol=3e-6, err_msg=level.name)
