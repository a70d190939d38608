"""Every op against numpy in float64, on one to many rows, segmented weights, and one to four workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import NONE, OUTPUT, STEP, Plan, Rig, Step, rms_norm

from apu_engine._native import Device, InvalidError, lib

F64 = NDArray[np.float64]
EPS = 1e-5


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def workers(request: pytest.FixtureRequest) -> Iterator[Device]:
    with Device("cpu", threads=request.param) as device:
        yield device


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(plan: Plan, rows: int, outputs: int = 0) -> Step:
    step = Step().sequence(range(rows))
    for o in range(outputs):
        step.output(rows - 1 - o, 0)
    plan.run(step)
    return step


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_embed(device: Device, dtype: type[np.floating]) -> None:
    table = random(64, 48).astype(dtype)
    rig = Rig()
    out = rig.scratch("x", 48)
    rig.op(lib.APU_OP_EMBED, outs=(out,), weights=(rig.weight("table", table, cuts=5),), floats=(2.5,))
    with rig.build(device) as plan:
        plan.run(Step().sequence([63, 0, 12, 13, 25]))
        assert np.array_equal(plan.read(out, 5), table[[63, 0, 12, 13, 25]].astype(np.float32) * np.float32(2.5))


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("weight_dtype", [np.float32, np.float16, None])
def test_rms_norm(workers: Device, rows: int, weight_dtype: type[np.floating] | None) -> None:
    x, r = random(64, 96), random(64, 96, seed=2)
    rig = Rig()
    a, b = rig.input(x, "a"), rig.input(r, "b")
    w = None if weight_dtype is None else random(96, seed=3).astype(weight_dtype)
    weight = NONE if w is None else rig.weight("norm", w)
    out = rig.scratch("out", 96)
    rig.op(lib.APU_OP_RMS_NORM, ins=(a,), outs=(out,), weights=(weight,), floats=(EPS,))
    rig.op(lib.APU_OP_RMS_NORM, ins=(a, b), outs=(b,), weights=(weight,), floats=(EPS,))  # onto its residual
    rig.op(lib.APU_OP_RMS_NORM, ins=(a,), outs=(a,), weights=(weight,), floats=(EPS,))  # in place
    expected = rms_norm(x[:rows], w, EPS)
    with rig.build(workers) as plan:
        run(plan, rows)
        for tensor, reference in ((out, expected), (b, expected + r[:rows]), (a, expected)):
            np.testing.assert_allclose(plan.read(tensor, rows), reference, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("norm", [False, True])
def test_matmul_several(workers: Device, rows: int, norm: bool) -> None:
    """Three matrices of odd sizes and cuts over one input: bias, soft cap and residual on the first, two dtypes."""
    k, sizes = 320, (70, 33, 200)
    x, r = random(64, k), random(64, sizes[0], seed=2)
    matrices = [
        random(sizes[0], k, seed=3),
        random(sizes[1], k, seed=4).astype(np.float16),
        random(sizes[2], k, seed=5),
    ]
    biases = [random(sizes[0], seed=6), None, random(sizes[2], seed=7).astype(np.float16)]
    weight = random(k, seed=8)
    rig = Rig(rows=40)
    source, residual = rig.input(x), rig.input(r, "r")
    outs = [residual, rig.scratch("o1", sizes[1]), rig.scratch("o2", sizes[2])]
    ws = [rig.weight(f"w{i}", m, cuts=i + 2) for i, m in enumerate(matrices)]
    bs = [NONE if b is None else rig.weight(f"b{i}", b) for i, b in enumerate(biases)]
    rig.op(
        lib.APU_OP_MATMUL,
        ins=(source, residual),
        outs=outs,
        weights=(rig.weight("norm", weight) if norm else NONE, *ws, NONE, *bs, NONE),
        floats=(EPS, 5.0),
    )
    h = rms_norm(x[:rows], weight, EPS) if norm else x[:rows].astype(np.float64)
    expected = [h @ m.T.astype(np.float64) + (0 if b is None else b) for m, b in zip(matrices, biases, strict=True)]
    expected[0] = 5.0 * np.tanh(expected[0] / 5.0) + r[:rows]
    with rig.build(workers) as plan:
        run(plan, rows)
        for tensor, reference in zip(outs, expected, strict=True):
            np.testing.assert_allclose(plan.read(tensor, rows), reference, atol=3e-4)


def activate(kind: int, x: F64) -> F64:
    from math import erf

    if kind == lib.APU_ACT_SILU:
        return x / (1 + np.exp(-x))
    if kind == lib.APU_ACT_GELU_TANH:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))


@pytest.mark.parametrize("kind", [lib.APU_ACT_SILU, lib.APU_ACT_GELU_TANH, lib.APU_ACT_GELU_ERF])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_matmul_gated(workers: Device, rows: int, kind: int) -> None:
    k, n = 96, 332
    x, gate, up, weight = random(64, k), random(n, k, seed=2), random(n, k, seed=3), random(k, seed=4)
    bias = random(n, seed=5)
    rig = Rig(rows=40)
    out = rig.scratch("out", n)
    weights = (rig.weight("norm", weight), rig.weight("gate", gate, cuts=3), rig.weight("up", up, cuts=2), NONE, NONE)
    rig.op(
        lib.APU_OP_MATMUL,
        ins=(rig.input(x),),
        outs=(out,),
        weights=(*weights, NONE, rig.weight("bias", bias)),
        ints=(kind,),
        floats=(EPS,),
    )
    h = rms_norm(x[:rows], weight, EPS)
    expected = activate(kind, h @ gate.T.astype(np.float64)) * (h @ up.T.astype(np.float64) + bias)
    with rig.build(workers) as plan:
        run(plan, rows)
        np.testing.assert_allclose(plan.read(out, rows), expected, rtol=2e-4, atol=2e-4)


def quantize_q8_0(w: NDArray[np.float32]) -> NDArray[np.uint8]:
    blocks = w.reshape(len(w), -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    q = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), q.view(np.uint8)], -1).reshape(len(w), -1)


def test_matmul_quantized_rows_agree(workers: Device) -> None:
    """A row's bits do not depend on the other rows, the workers or the cuts; all precisions are near float64."""
    k, n = 1056, 300
    x, w = random(64, k), random(n, k, seed=2)
    packed = quantize_q8_0(w)
    blocks = packed.reshape(n, -1, 34)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float64)
    expected = x @ (blocks[..., 2:].view(np.int8) * scales).reshape(n, k).T
    tolerances = {lib.APU_PRECISION_DEFAULT: 0.01, lib.APU_PRECISION_FINE: 5e-5, lib.APU_PRECISION_EXACT: 1e-5}
    for precision, tolerance in tolerances.items():
        results = []
        for cuts in (1, 7):
            rig = Rig(rows=64)
            out = rig.scratch("out", n)
            weight = rig.weight("w", packed, dtype=lib.APU_Q8_0, shape=(n, k), cuts=cuts)
            rig.op(lib.APU_OP_MATMUL, ins=(rig.input(x),), outs=(out,), weights=(NONE, weight), ints=(0, precision))
            with rig.build(workers) as plan:
                run(plan, 64)
                results.append(plan.read(out, 64))
                single = []
                for token in (0, 1, 37, 63):
                    plan.run(Step().sequence([token]))
                    single.append(plan.read(out, 1)[0])
                assert np.array_equal(np.stack(single), results[-1][[0, 1, 37, 63]])
        assert np.array_equal(results[0], results[1])
        error = np.abs(results[0] - expected).max() / np.abs(expected).max()
        assert error < tolerance


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 300])
def test_matmul_fine(workers: Device, rows: int, gated: bool) -> None:
    """Two terms with norm, bias, soft cap, residual, a gate and a float neighbour: as with float activations."""
    k, n = 288, 332
    x, r, norm, bias = random(300, k), random(300, n, seed=2), random(k, seed=3), random(n, seed=4)
    packed = [quantize_q8_0(random(n, k, seed=5)), quantize_q8_0(random(n, k, seed=6))]
    floats = random(40, k, seed=7)
    results = {}
    for precision in (lib.APU_PRECISION_DEFAULT, lib.APU_PRECISION_FINE, lib.APU_PRECISION_EXACT):
        rig = Rig(rows=300, vocabulary=300)
        ins, out, other = (rig.input(x), rig.input(r, "r")), rig.scratch("out", n), rig.scratch("other", 40)
        pair = [rig.weight(f"w{i}", w, dtype=lib.APU_Q8_0, shape=(n, k), cuts=i + 2) for i, w in enumerate(packed)]
        matrices = (*pair, NONE) if gated else (pair[0], rig.weight("w", floats), pair[1])
        rig.op(
            lib.APU_OP_MATMUL,
            ins=ins,
            outs=(out,) if gated else (out, other, rig.scratch("out2", n)),
            weights=(rig.weight("norm", norm), *matrices, NONE, rig.weight("bias", bias)),
            ints=(lib.APU_ACT_SILU if gated else lib.APU_ACT_NONE, precision),
            floats=(EPS, 5.0),
        )
        with rig.build(workers) as plan:
            run(plan, rows)
            results[precision] = plan.read(out, rows)
            if not gated:
                expected = rms_norm(x[:rows], norm, EPS) @ floats.T.astype(np.float64)
                np.testing.assert_allclose(plan.read(other, rows), expected, atol=3e-4)
    exact = results[lib.APU_PRECISION_EXACT]
    error = {precision: np.abs(found - exact).max() for precision, found in results.items()}
    assert error[lib.APU_PRECISION_FINE] < 0.03 * error[lib.APU_PRECISION_DEFAULT]


def test_results_do_not_depend_on_workers() -> None:
    """The same plan with 1 to 4 workers, at the best level: identical bits, decode and prefill."""
    results = []
    for threads in (1, 2, 3, 4):
        with Device("cpu", threads=threads) as device:
            rig = Rig(rows=48)
            packed = quantize_q8_0(random(512, 512, seed=9))
            source, out = rig.input(random(64, 512)), rig.scratch("out", 512)
            weight = rig.weight("w", packed, dtype=lib.APU_Q8_0, shape=(512, 512))
            rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, weight))
            with rig.build(device) as plan:
                run(plan, 48)
                many = plan.read(out, 48)
                run(plan, 1)
                results.append((many, plan.read(out, 1)))
    for many, one in results[1:]:
        assert np.array_equal(many, results[0][0]) and np.array_equal(one, results[0][1])


def test_gather_norm(workers: Device) -> None:
    x, weight = random(64, 80), random(80, seed=2)
    rig = Rig()
    out = rig.scratch("hidden", 80, OUTPUT)
    rig.op(
        lib.APU_OP_GATHER_NORM, ins=(rig.input(x),), outs=(out,), weights=(rig.weight("norm", weight),), floats=(EPS,)
    )
    with rig.build(workers) as plan:
        step = Step().sequence(range(9))
        results = [step.output(row, lib.APU_OUT_HIDDEN, hidden=80) for row in (8, 0, 3, 3)]
        plan.run(step)
        expected = rms_norm(x[[8, 0, 3, 3]], weight, EPS)
        np.testing.assert_allclose(plan.read(out, 4), expected, atol=2e-6)
        np.testing.assert_allclose(np.stack([r["hidden"] for r in results]), expected, atol=2e-6)
        plan.run(Step().sequence(range(9)))  # no output: nothing to do


# ---- rotary embedding ----------------------------------------------------------------------------------------------


def rotate(x: F64, positions: NDArray[np.int64], frequency: F64, magnitude: float, halves: bool) -> F64:
    """x (T, H, d); rotates the first 2 * len(frequency) elements of each head."""
    out, pairs = x.copy(), len(frequency)
    angle = positions[:, None, None] * frequency
    c, s = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    first = slice(0, pairs) if halves else slice(0, 2 * pairs, 2)
    second = slice(pairs, 2 * pairs) if halves else slice(1, 2 * pairs, 2)
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kv", [np.float32, np.float16])
@pytest.mark.parametrize("variant", ["plain", "norms", "partial", "factors", "yarn", "none"])
def test_rope_store(workers: Device, variant: str, kv: type[np.floating], halves: bool) -> None:
    heads, kv_heads, d, dv, base = 6, 2, 64, 32, 10000.0
    q, k, v = random(64, heads * d), random(64, kv_heads * d, seed=2), random(64, kv_heads * dv, seed=3)
    rig = Rig()
    tq, tk, tv = rig.input(q, "q"), rig.input(k, "k"), rig.input(v, "v")
    sk, sv = rig.state("k", kv_heads, d, 5, dtype=kv, keys=True), rig.state("v", kv_heads, dv, 5, dtype=kv)
    dims = {"partial": 32, "none": 0}.get(variant, d)
    norms = [random(d, seed=4), random(d, seed=5)] if variant == "norms" else [None, None]
    factors = 1 + np.abs(random(dims // 2, seed=6)) if variant == "factors" else None
    weights = [NONE if w is None else rig.weight(f"w{i}", w) for i, w in enumerate((*norms, factors))]
    scale, mix, magnitude, context = (0.25, 1.0, 1.1386, 4096) if variant == "yarn" else (0.5, 0.0, 1.0, 0)
    rig.op(
        lib.APU_OP_ROPE_STORE,
        ins=(tq, tk, tv),
        outs=(tq,),
        weights=weights,
        states=(sk, sv),
        ints=(dims, lib.APU_ROPE_HALVES if halves else lib.APU_ROPE_PAIRS, context),
        floats=(EPS, base, scale, mix, magnitude, 32.0, 1.0),
    )
    own = base ** (-2.0 * np.arange(dims // 2) / max(dims, 1)) / (1 if factors is None else factors.astype(np.float64))
    frequency = own * scale
    if variant == "yarn":  # as published: a linear ramp between the dimensions of 32 turns and of 1 turn
        at = [d * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32.0, 1.0)]
        low, high = max(np.floor(at[0]), 0), min(np.ceil(at[1]), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
        frequency = own * scale * ramp + own * (1 - ramp)
    with rig.build(workers) as plan:
        step = Step(1).sequence([3, 4, 5], 126, [[4, 2]]).sequence([9], 2, [[1]])
        plan.run(step)
        tokens, positions = [3, 4, 5, 9], np.array([126, 127, 128, 2])
        rotated = []
        for x, norm in ((q[tokens].reshape(4, heads, d), norms[0]), (k[tokens].reshape(4, kv_heads, d), norms[1])):
            y = x.astype(np.float64) if norm is None else rms_norm(x, norm, EPS)
            rotated.append(rotate(y, positions, frequency, magnitude, halves))
        np.testing.assert_allclose(plan.read(tq, 4).reshape(4, heads, d), rotated[0], atol=1e-5)
        tolerance = 1e-5 if kv is np.float32 else 4e-3
        for memory, expected in ((rig.held(sk), rotated[1]), (rig.held(sv), v[tokens].reshape(4, kv_heads, dv))):
            for i, (page, row) in enumerate([(4, 126), (4, 127), (2, 0), (1, 2)]):
                np.testing.assert_allclose(memory[page, :, row], expected[i], atol=tolerance)
            written = np.isfinite(memory).all((1, 3))
            assert written.sum() == 4  # and nothing else


# ---- the step before -----------------------------------------------------------------------------------------------


def test_previous_tokens(workers: Device) -> None:
    """A row takes the token that the step before sampled, without the host in between."""
    values = np.zeros((16, 64), np.float32)
    values[0, 11] = values[1, 7] = 1.0
    rig = Rig()
    rig.logits(values)
    probe = rig.input(np.arange(64, dtype=np.float32)[:, None].repeat(4, 1), "probe")
    with rig.build(workers) as plan:
        with pytest.raises(InvalidError, match=r"row 0 takes the token of output 0, but the step before sampled 0"):
            plan.run(Step().sequence([-1], previous=0))
        step = Step().sequence([0, 1])
        step.output(0)
        step.output(1)
        step.output(1, 0)
        first = plan.submit(step)
        second = plan.submit(Step().sequence([-1], 0, previous=1).sequence([-1], 0, previous=0))
        assert lib.apu_event_wait(first, -1) == lib.APU_OK and lib.apu_event_wait(second, -1) == lib.APU_OK
        assert plan.read(probe, 2)[:, 0].tolist() == [7, 11]
        plan.run(step)
        with pytest.raises(InvalidError, match="output 2, which did not ask for one"):
            plan.run(Step().sequence([-1], previous=2))


def test_read(device: Device) -> None:
    rig = Rig()
    x = rig.input(random(64, 8))
    fixed = rig.scratch("y", 8, STEP)
    with rig.build(device) as plan:
        run(plan, 3)
        with pytest.raises(InvalidError, match=r'"x" holds 3 rows of 8 floats: expected 96 bytes, found 64'):
            plan.read(x, 2)
        assert plan.read(fixed, 3).shape == (3, 8)
        with pytest.raises(InvalidError, match="is a weight"):
            plan.read(0, 3)
