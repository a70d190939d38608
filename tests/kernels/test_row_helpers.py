"""Norms, activations and attention at every instruction-set level, through the ops that use the helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_cases import Level
from native.rig import NONE, PAGE_TOKENS, Q8_0, Rig, Step, decode, encode, rms_norm
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
    lib.APU_ACT_SWIGLU_OAI: lambda x: x * logistic(1.702 * x) * 2,  # up is 1
}


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=["silu", "gelu_tanh", "gelu_erf", "swiglu_oai"])
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


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e4])
def test_soft_cap(levels: tuple[Level, ...], cap: float) -> None:
    x = np.concatenate([np.linspace(-r, r, 2003) for r in (1e-3 * cap, cap, 40 * cap)]).astype(np.float32)
    rig = Rig(rows=1, sequences=1, outputs=1, vocabulary=1)
    out = rig.scratch("out", len(x))
    matrix = rig.weight("matrix", x[:, None].copy())
    ones = rig.input(np.ones((1, 1), np.float32))
    rig.op(lib.APU_OP_MATMUL, ins=(ones,), outs=(out,), weights=(NONE, matrix), floats=(0, cap))
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    for level in levels:
        with rig.build(level.device) as plan:
            plan.run(Step().sequence([0]))
            np.testing.assert_allclose(plan.read(out, 1)[0], expected, rtol=1e-6, err_msg=level.name)


@pytest.mark.parametrize(
    ("dtype", "size", "length"),
    [(t, *shape) for t in (np.float32, np.float16) for shape in ((8, 1), (20, 9), (64, 150), (128, 257))]
    + [(Q8_0, *shape) for shape in ((32, 1), (64, 150), (128, 257), (256, 300))],
)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention(levels: tuple[Level, ...], dtype: Any, size: int, length: int, group: int) -> None:
    """One query over `length` cached tokens; what lies behind them in the last page is NaN."""
    heads, pages = 2, -(-length // PAGE_TOKENS)
    rng = np.random.default_rng(length)
    q = rng.standard_normal((1, heads * group * size)).astype(np.float32)
    rig = Rig(rows=1, sequences=1, outputs=1, vocabulary=1)
    k, v = (rig.state(name, heads, size, pages, dtype=dtype, keys=name == "k") for name in "kv")
    cache = []
    for state in (k, v):
        values = np.full((pages, heads, PAGE_TOKENS, size), np.nan)
        for p in range(pages):
            values[p, :, : length - p * PAGE_TOKENS] = rng.standard_normal(
                (heads, min(length - p * PAGE_TOKENS, PAGE_TOKENS), size)
            )
        with np.errstate(invalid="ignore"):
            held = rig.fill(state, values)
        cache.append(held.swapaxes(0, 1).reshape(heads, -1, size)[:, :length])
    query = rig.scratch("q", (heads * group, size))
    out = rig.scratch("out", heads * group * size)
    rig.op(lib.APU_OP_EMBED, outs=(query,), weights=(rig.weight("q_rows", q),), floats=(1.0,))
    rig.op(lib.APU_OP_ATTENTION, ins=(query,), outs=(out,), states=(k, v), floats=(size**-0.5,))
    wide = q.reshape(heads, group, size).astype(np.float64)
    scores = np.einsum("hgd,hsd->hgs", wide, cache[0]) * size**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hgs,hsd->hgd", weights / weights.sum(-1, keepdims=True), cache[1])
    for level in levels:
        with rig.build(level.device) as plan:
            plan.run(Step(1).sequence([0], length - 1, tables=(range(pages),)))
            found = plan.read(out, 1).reshape(heads, group, size)
        # Q8_0: 16 bits of the query are an error of 1.5e-5 of its largest element in 32.
        np.testing.assert_allclose(found, expected, atol=3e-5 if dtype == Q8_0 else 3e-6, err_msg=level.name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, Q8_0])
def test_stored_keys_and_values_have_the_same_bits(levels: tuple[Level, ...], dtype: Any) -> None:
    """At every level, as numpy rounds them: ties, zeros, subnormal and huge blocks, infinities."""
    size, heads, tokens = 64, 2, 48
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((tokens, heads * size)) * np.exp2(rng.integers(-30, 20, (tokens, 1)))).astype(np.float32)
    x[0], x[1, ::2], x[2] = 0, 0, np.arange(heads * size) - 63.5  # ties where the scale is a power of two
    x[2, [0, 32, 64, 96]] = 127
    x[3, 5], x[4, 7], x[5, 1:] = 3e38, 1e-38, 1e-44
    images = []
    for level in levels:
        rig = Rig(rows=tokens, sequences=1, outputs=1, vocabulary=tokens)
        k, v = (rig.state(name, heads, size, 2, dtype=dtype, keys=name == "k") for name in "kv")
        q, rows = rig.input(np.zeros((tokens, heads * size), np.float32), "q"), rig.input(x)
        rig.op(lib.APU_OP_ROPE_STORE, ins=(q, rows, rows), outs=(q,), states=(k, v), ints=(0, 1))
        with rig.build(level.device) as plan:
            for first in (0, 100):  # the second time over two pages
                plan.run(Step(1).sequence(range(tokens), first, tables=((1, 0),)))
        expected = np.full((2, heads, PAGE_TOKENS, size), np.nan)
        for first in (0, 100):
            for t in range(tokens):
                expected[1 - (first + t) // 128, :, (first + t) % 128] = x[t].reshape(heads, size)
        with np.errstate(invalid="ignore", over="ignore"):
            for state, keys in ((k, True), (v, False)):
                held = decode(encode(expected, dtype, keys), size, keys)
                np.testing.assert_array_equal(rig.held(state), held, err_msg=level.name)
        images.append([rig.memory(state).tobytes() for state in (k, v)])
    assert all(image == images[0] for image in images)
