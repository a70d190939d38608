"""Hyper-connections, copies of EMBED, limits of gated products, sqrt-softplus and experts by token on a GPU against the
CPU, op by op; a row's bits in any batch; broken rows.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hip_double import HipDouble
from numpy.typing import NDArray
from rig import NONE, Rig, Step
from test_plan_ops import MOST, ROWS, close, compare, quantized, random, step_of

from apu_engine._native import Device, DeviceError, lib

EPS = 1e-6


def streams(
    S: int, D: int, kind: str, *, cuts: int = 1, iterations: int = 20, head: bool = False, broken: bool = False
) -> tuple[Rig, list[int]]:
    """STREAMS_IN over rows of a table, then STREAMS_OUT in place and to another tensor; `head`: without the mix."""
    rig = Rig(rows=MOST)
    x = random(64, S * D)
    if broken:
        x[2], x[5, 3], x[7], x[9] = np.nan, np.inf, 0, np.float32(3e38)
    n = S if head else S * (S + 2)
    number = gguf.GGMLQuantizationType[kind]
    fn = gguf.quants.quantize(random(n, S * D, seed=3) * np.float32((S * D) ** -0.5), number)
    w = [rig.weight("fn", fn, dtype=int(number), shape=(n, S * D), cuts=cuts)]
    w += [rig.weight("scale", random(1 if head else 3, seed=4)), rig.weight("offset", random(n, seed=5))]
    given, made = rig.input(x, "x"), rig.input(random(64, D, seed=2), "made")
    out, mix, apart = rig.scratch("out", D), rig.scratch("mix", S + S * S), rig.scratch("apart", S * D)
    outs = (out,) if head else (out, mix)
    rig.op(lib.APU_OP_STREAMS_IN, ins=(given,), outs=outs, weights=w, ints=(S, iterations), floats=(EPS, 1e-6))
    if head:
        return rig, [out]
    rig.op(lib.APU_OP_STREAMS_OUT, ins=(given, made, mix), outs=(apart,), ints=(S,))
    rig.op(lib.APU_OP_STREAMS_OUT, ins=(given, made, mix), outs=(given,), ints=(S,))
    return rig, [out, mix, apart, given]


SHAPES = [(4, 96, 1), (4, 1024, 5), (4, 530, 1), (4, 33, 3), (2, 32, 1), (1, 32, 3), (3, 40, 2), (16, 64, 7)]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize(("S", "D", "cuts"), SHAPES)
def test_streams(device: Device, gpu: Device, kind: str, S: int, D: int, cuts: int) -> None:
    if kind == "Q8_0" and S * D % 32:
        D = 64
    compare(lambda: streams(S, D, kind, cuts=cuts), (device, gpu), 2e-6)


def test_streams_of_true_width(device: Device, gpu: Device) -> None:
    compare(lambda: streams(4, 4096, "F16"), (device, gpu), 2e-6, (1, 9))


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_streams_of_few_iterations(device: Device, gpu: Device, iterations: int) -> None:
    for S in (3, 4):
        compare(lambda S=S: streams(S, 64, "F32", iterations=iterations), (device, gpu), 2e-6, (1, 9))


@pytest.mark.parametrize(("S", "D"), [(4, 256), (4, 33), (2, 64)])
def test_streams_behind_the_last_block(device: Device, gpu: Device, S: int, D: int) -> None:
    compare(lambda: streams(S, D, "F16", head=True), (device, gpu), 2e-6)


@pytest.mark.parametrize(("S", "D", "kind"), [(4, 512, "F16"), (4, 40, "F32"), (3, 33, "BF16"), (4, 64, "Q8_0")])
def test_a_row_of_streams_has_the_same_bits_in_any_batch(gpu: Device, S: int, D: int, kind: str) -> None:
    """Of its class: up to eight rows, and more."""
    rig, tensors = streams(S, D, kind)
    with rig.build(gpu) as plan:
        for most, counts in ((8, (1, 3, 7)), (MOST, (9, 17))):
            plan.run(step_of(most))
            expected = [plan.read(tensor, most) for tensor in tensors]
            for rows in counts:
                for first in (0, most - rows):
                    plan.run(Step().sequence(range(first, first + rows)))
                    for tensor, whole in zip(tensors, expected, strict=True):
                        assert np.array_equal(plan.read(tensor, rows), whole[first : first + rows])


def blocks(D: int, kind: str, layers: int = 3) -> tuple[Rig, list[int]]:
    """Blocks of four streams, each of which makes a norm of its input, and the sum of the streams behind them."""
    rig = Rig(rows=MOST)
    x = rig.input(random(64, 4 * D), "x")
    number = gguf.GGMLQuantizationType[kind]
    tensors = [x]

    def weights(name: str, n: int, seed: int) -> list[int]:
        fn = gguf.quants.quantize(random(n, 4 * D, seed=seed) * np.float32((4 * D) ** -0.5), number)
        scale, offset = random(3 if n > 4 else 1, seed=seed + 1), random(n, seed=seed + 2)
        parts = (("scale", scale), ("offset", offset))
        fn_id = rig.weight(f"{name} fn", fn, dtype=int(number), shape=(n, 4 * D))
        return [fn_id, *(rig.weight(f"{name} {part}", data) for part, data in parts)]

    for layer in range(layers):
        out, mix = rig.scratch(f"out{layer}", D), rig.scratch(f"mix{layer}", 20)
        w = weights(str(layer), 24, 10 * layer)
        rig.op(lib.APU_OP_STREAMS_IN, ins=(x,), outs=(out, mix), weights=w, ints=(4, 20), floats=(EPS, 1e-6))
        rig.op(lib.APU_OP_RMS_NORM, ins=(out,), outs=(out,), floats=(EPS,))
        rig.op(lib.APU_OP_STREAMS_OUT, ins=(x, out, mix), outs=(x,), ints=(4,))
        tensors += [out, mix]
    out = rig.scratch("head", D)
    w = weights("head", 4, 100)
    rig.op(lib.APU_OP_STREAMS_IN, ins=(x,), outs=(out,), weights=w, ints=(4,), floats=(EPS, 1e-6))
    return rig, [*tensors, out]


@pytest.mark.parametrize(("D", "kind"), [(512, "F16"), (100, "F32"), (33, "F16"), (64, "Q8_0")])
def test_a_block_closed_and_the_next_opened_in_one_launch(device: Device, gpu: Device, D: int, kind: str) -> None:
    """The same bits as launch by launch, and those of a row alone."""
    rig, tensors = blocks(D, kind)
    other, _ = blocks(D, kind)
    with rig.build(gpu) as plan, other.build(device) as cpu:
        for rows in (1, 8, 9):
            cpu.run(step_of(rows))
            plan.run(step_of(rows))
            found = [plan.read(tensor, rows) for tensor in tensors]
            for tensor, got in zip(tensors, found, strict=True):
                close(got, cpu.read(tensor, rows), 1e-5)
            for op in range(len(rig.ops)):
                plan.run(step_of(rows), op, op + 1)
            assert all(np.array_equal(plan.read(t, rows), got) for t, got in zip(tensors, found, strict=True))


@pytest.mark.parametrize(
    ("kernel", "rows", "whole"),
    [("joined_f16", 1, True), ("joined_f16", 8, True), ("f16", 2, False), ("f16_many", 9, True)],
)
def test_which_kernel_opens_a_block(hip: HipDouble, hip_device: Device, kernel: str, rows: int, whole: bool) -> None:
    rig, _ = blocks(64, "F16", layers=2)
    rig.limits["flags"] = lib.APU_PLAN_NO_GRAPH
    with rig.build(hip_device) as plan:
        plan.run(step_of(rows), 0, 3)
        hip.set(launch=f"streams_{kernel}")
        with pytest.raises(DeviceError, match=f"kernel streams_{kernel}: "):
            plan.run(step_of(rows), 3, len(rig.ops) if whole else 4)
            plan.run(step_of(rows), 4, len(rig.ops))
        hip.set()


@pytest.mark.parametrize("S", [3, 4])
def test_broken_streams_stay_alone(device: Device, gpu: Device, S: int) -> None:
    """Rows of NaN, infinity, zeros, and of squares that are too large; their neighbours do not change."""
    (clean, tensors), (rig, _) = streams(S, 64, "F16"), streams(S, 64, "F16", broken=True)
    (other, _) = streams(S, 64, "F16", broken=True)
    with clean.build(gpu) as plan, rig.build(gpu) as damaged, other.build(device) as cpu:
        for rows in (8, 12):
            for p in (plan, damaged, cpu):
                p.run(step_of(rows))
            good = [t for t in range(rows) if t not in (2, 5, 7, 9)]
            for tensor in tensors:
                found = damaged.read(tensor, rows)
                assert np.array_equal(found[good], plan.read(tensor, rows)[good])
                close(found[7], cpu.read(tensor, rows)[7], 2e-6)
                assert np.isnan(found[2]).all()
            damaged.run(step_of(rows))  # counters are as before
            assert np.array_equal(damaged.read(tensors[0], rows)[good], plan.read(tensors[0], rows)[good])


@pytest.mark.parametrize(("D", "copies", "kind"), [(96, 4, "F16"), (50, 3, "F32"), (64, 2, "Q8_0")])
def test_copies(device: Device, gpu: Device, D: int, copies: int, kind: str) -> None:
    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        data, number = quantized(kind, 64, D, 1)
        out = r.scratch("x", copies * D)
        table = r.weight("table", data, dtype=number, shape=(64, D), cuts=3)
        r.op(lib.APU_OP_EMBED, outs=(out,), weights=(table,), ints=(copies,), floats=(2.5,))
        return r, [out]

    compare(rig, (device, gpu), 0)


# ---------------------------------------------------------------- limits

PAIRS = [("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0"), ("Q5_1", "Q8_0"), ("F32", "Q8_0")]


def limited(kinds: tuple[str, str], limit: float, *, precision: int = 0) -> tuple[Rig, list[int]]:
    """A gated pair whose gate and up go well beyond the limit."""
    r = Rig(rows=MOST)
    x, out = r.input(random(64, 256)), r.scratch("out", 70)
    matrices = []
    for i, kind in enumerate(kinds):
        data, number = quantized(kind, 70, 256, 3 + i)
        matrices.append(r.weight(f"w{i}", data, dtype=number, shape=(70, 256), cuts=1 + i))
    ints, floats = (lib.APU_ACT_SILU, precision), (EPS, 0.0, limit)
    r.op(lib.APU_OP_MATMUL, ins=(x,), outs=(out,), weights=(NONE, *matrices), ints=ints, floats=floats)
    return r, [out]


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize("exact", [False, True])
def test_limit_of_a_pair(device: Device, gpu: Device, kinds: tuple[str, str], exact: bool) -> None:
    precision = lib.APU_PRECISION_EXACT if exact else lib.APU_PRECISION_DEFAULT
    bound = 1e-5 if exact or kinds == ("F32", "F32") else 5e-3
    compare(lambda: limited(kinds, 10.0, precision=precision), (device, gpu), bound)
    (rig, (out,)), (free, _) = limited(kinds, 10.0), limited(kinds, 0.0)
    with rig.build(gpu) as plan, free.build(gpu) as other:
        for rows in (1, 9):
            for p in (plan, other):
                p.run(step_of(rows))
            assert np.abs(plan.read(out, rows)).max() <= 100 < np.abs(other.read(out, rows)).max()


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_limit_of_experts(device: Device, gpu: Device, kinds: tuple[str, str]) -> None:
    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        x, ids, weights = r.input(random(64, 256)), r.scratch("ids", 3, dtype=lib.APU_I32), r.scratch("weights", 3)
        router = r.weight("router", random(5, 256, seed=2))
        r.op(lib.APU_OP_ROUTE, ins=(x,), outs=(ids, weights), weights=(NONE, router), floats=(EPS, 1.0))
        matrices = []
        for i, kind in enumerate(kinds):
            data, number = quantized(kind, 5 * 48, 256, 3 + i)
            matrices.append(r.weight(f"w{i}", data.reshape(5, 48, -1), dtype=number, shape=(5, 48, 256)))
        out = r.scratch("h", (3, 48))
        w, ints = (NONE, *matrices), (lib.APU_ACT_SILU,)
        r.op(lib.APU_OP_EXPERTS, ins=(x, ids), outs=(out,), weights=w, ints=ints, floats=(EPS, 10.0))
        return r, [out]

    compare(rig, (device, gpu), 1e-5 if kinds == ("F32", "F32") else 5e-3)
    made, (out,) = rig()
    with made.build(gpu) as plan:
        for rows in (1, 9):
            plan.run(step_of(rows))
            assert 90 < np.abs(plan.read(out, rows)).max() <= 100


def test_a_broken_gate_is_not_limited(gpu: Device) -> None:
    rig, (out,) = limited(("F32", "F32"), 10.0)
    rig.keep[0][1] = np.nan  # the input's table
    with rig.build(gpu) as plan:
        for rows in (2, 12):
            plan.run(step_of(rows))
            found = plan.read(out, rows)
            assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, 0)).all()


# ---------------------------------------------------------------- routing


def routed(E: int, k: int, kind: str, by_token: bool, biased: bool) -> tuple[Rig, list[int]]:
    r = Rig(rows=MOST)
    data, number = quantized(kind, E, 96, 2)
    x = r.input(random(64, 96))
    ids, weights = r.scratch("ids", k, dtype=lib.APU_I32), r.scratch("weights", k)
    table: NDArray[Any] = np.array([np.random.default_rng(t).permutation(E)[:k] for t in range(64)], np.int32)
    w = [r.weight("norm", random(96, seed=3)), r.weight("router", data, dtype=number, shape=(E, 96), cuts=2)]
    w.append(r.weight("bias", random(E, seed=5)) if biased else NONE)
    w.append(r.weight("table", table, dtype=lib.APU_I32, cuts=3) if by_token else NONE)
    ints, floats = (lib.APU_SCORE_SQRT_SOFTPLUS, 1), (EPS, 1.5, 2.0**-14)
    r.op(lib.APU_OP_ROUTE, ins=(x,), outs=(ids, weights), weights=w, ints=ints, floats=floats)
    return r, [ids, weights]


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("way", ["plain", "biased", "by token"])
@pytest.mark.parametrize(("E", "k"), [(8, 2), (256, 6), (300, 20)])
def test_sqrt_softplus_and_experts_by_token(device: Device, gpu: Device, kind: str, way: str, E: int, k: int) -> None:
    made = [routed(E, k, kind, way == "by token", way == "biased") for _ in range(2)]
    ids, weights = made[0][1]
    with made[0][0].build(device) as cpu, made[1][0].build(gpu) as other:
        for rows in ROWS:
            for plan in (cpu, other):
                plan.run(step_of(rows))
            assert np.array_equal(other.read(ids, rows), cpu.read(ids, rows))
            close(other.read(weights, rows), cpu.read(weights, rows), 1e-5)


def test_the_next_step_takes_the_experts_of_a_sampled_token(gpu: Device) -> None:
    rig, (ids, _) = routed(16, 4, "F32", True, False)
    logits = np.full((16, 64), -1, np.float32)
    logits[:, 13] = 1
    rig.logits(logits)
    table = rig.keep[3]
    with rig.build(gpu) as plan:
        step = Step().sequence([3])
        step.output(0, lib.APU_OUT_SAMPLE)
        plan.run(step)
        step = Step().sequence([-1], 1, previous=0)
        step.output(0, lib.APU_OUT_SAMPLE)
        plan.run(step)
        assert np.array_equal(plan.read(ids, 1)[0], np.sort(table[13]))
