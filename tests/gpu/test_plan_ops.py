"""Plans of one op each on a GPU against the CPU's: every class of rows, segments, odd addresses, several outputs.

The CPU backend is the oracle (it is tested against numpy); both run the same rig. The sampler's and the states' own
tests are run again with a GPU in the CPU's place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import test_experts as native_experts
import test_ops as native_ops
import test_replay as native_replay
import test_sample as native_sample
from numpy.typing import NDArray
from rig import NONE, OUTPUT, Plan, Rig, Step, rms_norm

from apu_engine._native import Device, lib

ROWS = (1, 2, 3, 5, 8, 9, 40)
EPS = 1e-5
MOST = 40


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found: NDArray[Any], expected: NDArray[Any], bound: float) -> None:
    """Within `bound` of the largest magnitude."""
    scale = max(float(np.abs(expected).max()), 1e-6)
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= bound * scale, np.abs(found - expected).max() / scale


def step_of(rows: int, outputs: int = 0) -> Step:
    step = Step().sequence(range(rows))
    for o in range(outputs):
        step.output(rows - 1 - o % rows, 0)
    return step


def compare(
    rig: Callable[[], tuple[Rig, list[int]]],
    devices: tuple[Device, Device],
    bound: float,
    rows: tuple[int, ...] = ROWS,
    outputs: int = 0,
) -> None:
    """The tensors that `rig` returns, on both devices, for every number of rows."""
    made = [rig() for _ in devices]
    with made[0][0].build(devices[0]) as cpu, made[1][0].build(devices[1]) as gpu:
        for count in rows:
            for plan in (cpu, gpu):
                plan.run(step_of(count, outputs))
            for tensor in made[0][1]:
                held = outputs if cpu.rig.tensors[tensor]["rows"] == OUTPUT else count
                close(gpu.read(tensor, held), cpu.read(tensor, held), bound)


def quantized(name: str, n: int, k: int, seed: int) -> tuple[NDArray[np.uint8], int]:
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.quantize(random(n, k, seed=seed), kind), int(kind)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "Q8_0", "Q4_0"], ids=str)
def test_embed(device: Device, gpu: Device, dtype: Any) -> None:
    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        if isinstance(dtype, str):
            data, number = quantized(dtype, 64, 96, 1)
            table = r.weight("table", data, dtype=number, shape=(64, 96), cuts=5)
        else:
            table = r.weight("table", random(64, 96).astype(dtype), cuts=5)
        out = r.scratch("x", 96)
        r.op(lib.APU_OP_EMBED, outs=(out,), weights=(table,), floats=(2.5,))
        return r, [out]

    compare(rig, (device, gpu), 0)


@pytest.mark.parametrize("width", [96, 250, 4096])
def test_rms_norm(device: Device, gpu: Device, width: int) -> None:
    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        a, b = r.input(random(64, width), "a"), r.input(random(64, width, seed=2), "b")
        weight = r.weight("norm", random(width, seed=3).astype(np.float16))
        out = r.scratch("out", width)
        r.op(lib.APU_OP_RMS_NORM, ins=(a,), outs=(out,), weights=(weight,), floats=(EPS,))
        r.op(lib.APU_OP_RMS_NORM, ins=(a, b), outs=(b,), floats=(EPS,))
        r.op(lib.APU_OP_RMS_NORM, ins=(a,), outs=(a,), floats=(EPS,))
        return r, [out, b, a]

    compare(rig, (device, gpu), 1e-6)


# Largest error in units of the largest result. Few rows: the same integers as on the CPU, other orders of sums. Many
# rows of quantised and half matrices: f16 or bf16 tiles.
BOUNDS = {"F32": (1e-5, 1e-5), "F16": (1e-5, 2e-3), "BF16": (1e-5, 1e-2)}
QUANTIZED = (2e-5, 3e-3)


def products(kinds: tuple[str, ...], k: int, *, gated: int = 0, precision: int = 0, norm: bool = True) -> Any:
    """Matrices of several types over one input: biases, soft cap and residual on the first, or a gated pair."""

    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        sizes = (70, 70) if gated else (70, 33, 200, 64)
        x = r.input(random(64, k))
        residual = r.input(random(64, sizes[0], seed=2), "r")
        matrices, outs = [], []
        for i, kind in enumerate(kinds):
            name, n = f"w{i}", sizes[i]
            if kind == "F32":
                matrices.append(r.weight(name, random(n, k, seed=3 + i), cuts=1 + i))
            elif kind == "F16":
                matrices.append(r.weight(name, random(n, k, seed=3 + i).astype(np.float16), cuts=1 + i))
            else:
                data, number = quantized(kind, n, k, 3 + i)
                matrices.append(r.weight(name, data, dtype=number, shape=(n, k), cuts=1 + i))
            if not gated or i == 0:
                outs.append(r.scratch(f"out{i}", n))
        biases = [r.weight("bias", random(sizes[0], seed=8))]
        if gated and len(kinds) > 1:
            biases.append(r.weight("bias up", random(sizes[1], seed=9)))
        r.op(
            lib.APU_OP_MATMUL,
            ins=(x, residual),
            outs=outs,
            weights=(
                r.weight("norm", random(k, seed=7)) if norm else NONE,
                *matrices,
                *[NONE] * (4 - len(matrices)),
                *biases,
            ),
            ints=(gated, precision),
            floats=(EPS, 0.0 if gated else 30.0),
        )
        return r, outs

    return rig


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("k", [320, 1024])
def test_matmul(device: Device, gpu: Device, kind: str, k: int) -> None:
    few, many = BOUNDS.get(kind, QUANTIZED)
    rig = products((kind,) * 3, k)
    compare(rig, (device, gpu), few, ROWS[:5])
    compare(rig, (device, gpu), many, ROWS[5:])


def test_matmul_of_mixed_types(device: Device, gpu: Device) -> None:
    compare(products(("Q8_0", "F32", "Q4_1", "F16"), 256), (device, gpu), 3e-3)


@pytest.mark.parametrize("gated", [lib.APU_ACT_SILU, lib.APU_ACT_GELU_TANH, lib.APU_ACT_GELU_ERF])
@pytest.mark.parametrize("kinds", [("F32", "F32"), ("Q8_0", "Q8_0"), ("Q4_0", "Q8_0")], ids="-".join)
def test_gated_pair(device: Device, gpu: Device, gated: int, kinds: tuple[str, ...]) -> None:
    bound = 1e-5 if kinds[0] == "F32" else 5e-3
    compare(products(kinds, 256, gated=gated), (device, gpu), bound)


@pytest.mark.parametrize("precision", [lib.APU_PRECISION_EXACT, lib.APU_PRECISION_FINE])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_precisions(device: Device, gpu: Device, precision: int, kind: str) -> None:
    rig = products((kind, kind), 320, precision=precision, norm=False)
    compare(rig, (device, gpu), 2e-5, ROWS[:5])
    compare(rig, (device, gpu), 3e-3, ROWS[5:])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_row_does_not_depend_on_its_neighbours(gpu: Device, kind: str) -> None:
    """Within each class of rows a row has the same bits."""
    rig, outs = products((kind, kind), 320)()
    with rig.build(gpu) as plan:
        for counts in ((1, 2, 3, 8), (9, 16, 40)):
            found = []
            for count in counts:
                plan.run(step_of(count))
                found.append([plan.read(out, count)[0] for out in outs])
            for other in found[1:]:
                assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("outputs", [1, 3, 8, 16])
def test_rows_of_outputs(device: Device, gpu: Device, outputs: int) -> None:
    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=MOST)
        x = r.input(random(64, 64))
        hidden, out = r.scratch("hidden", 64, OUTPUT), r.scratch("logits", 200, OUTPUT)
        weights = (r.weight("norm", random(64, seed=2)),)
        r.op(lib.APU_OP_GATHER_NORM, ins=(x,), outs=(hidden,), weights=weights, floats=(EPS,))
        r.op(lib.APU_OP_MATMUL, ins=(hidden,), outs=(out,), weights=(NONE, r.weight("head", random(200, 64, seed=3))))
        return r, [hidden, out]

    compare(rig, (device, gpu), 1e-5, (1, 4, 20), outputs)


def test_hidden_rows_and_logits_reach_the_caller(gpu: Device) -> None:
    x = random(64, 32)
    rig = Rig(vocabulary=64)
    hidden, logits = rig.scratch("hidden", 32, OUTPUT), rig.scratch("logits", 64, OUTPUT)
    head = random(64, 32, seed=5)
    rig.op(lib.APU_OP_GATHER_NORM, ins=(rig.input(x),), outs=(hidden,), floats=(EPS,))
    rig.op(lib.APU_OP_MATMUL, ins=(hidden,), outs=(logits,), weights=(NONE, rig.weight("head", head)))
    rig.op(lib.APU_OP_SAMPLE, ins=(logits,))
    with rig.build(gpu) as plan:
        step = Step().sequence(range(6))
        wants = [lib.APU_OUT_SAMPLE, lib.APU_OUT_HIDDEN, lib.APU_OUT_LOGITS | lib.APU_OUT_HIDDEN, lib.APU_OUT_LOGITS]
        results = [step.output(5 - i, want, vocabulary=64, hidden=32) for i, want in enumerate(wants)]
        plan.run(step)
        expected = rms_norm(x, None, EPS)[[5, 4, 3, 2]]
        for want, result, row in zip(wants, results, expected, strict=True):
            for bit, name, values in ((4, "logits", head @ row), (8, "hidden", row)):
                if want & bit:
                    np.testing.assert_allclose(result[name], values, rtol=0, atol=1e-4)
                else:
                    assert not result[name].any()
        assert results[0]["token"][0] == int((head @ expected[0]).argmax())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv": np.float16},
        {"heads": 8, "kv_heads": 1, "d": 48, "dv": 80},
        {"window": 100, "kv": np.float16},
        {"cap": 1.5},
        {"sinks": True, "window": 64, "cap": 3.0},
    ],
    ids=str,
)
def test_stored_rows_are_attended(device: Device, gpu: Device, options: dict[str, Any]) -> None:
    """ROPE_STORE and ATTENTION on pages that the device wrote itself; the layout of its pages is its own."""
    found = []
    for target in (device, gpu):
        case = Attended(**options)
        with case.rig.build(target) as plan:
            found.append(case.run(plan))
    for expected, got in zip(*found, strict=True):
        close(got, expected, 2e-3 if options.get("kv") is np.float16 else 2e-5)


class Attended:
    """q, k, v from tables by token; three ragged sequences of several steps each."""

    def __init__(
        self,
        heads: int = 6,
        kv_heads: int = 2,
        d: int = 32,
        dv: int = 0,
        window: int = 0,
        kv: Any = np.float32,
        **more: Any,
    ) -> None:
        dv = dv or d
        rig = self.rig = Rig(rows=64, positions=1024)
        q = rig.input(random(64, heads * d), "q")
        k = rig.input(random(64, kv_heads * d, seed=2), "k")
        v = rig.input(random(64, kv_heads * dv, seed=3), "v")
        states = [
            rig.state("K", kv_heads, d, 12, dtype=kv, window=window, keys=True),
            rig.state("V", kv_heads, dv, 12, dtype=kv, window=window),
        ]
        for state in states:
            rig.memory(state)[...] = 0
        norms = [rig.weight(name, random(d, seed=seed)) for name, seed in (("qn", 4), ("kn", 5))]
        rig.op(
            lib.APU_OP_ROPE_STORE,
            ins=(q, k, v),
            outs=(q,),
            weights=norms,
            states=states,
            ints=(d // 4 * 2, lib.APU_ROPE_HALVES),
            floats=(EPS, 10000.0, 1.0, 0.0, 1.0),
        )
        self.out = rig.scratch("out", heads * dv)
        sinks = rig.weight("sinks", random(heads, seed=6)) if more.get("sinks") else NONE
        rig.op(
            lib.APU_OP_ATTENTION,
            ins=(q,),
            outs=(self.out,),
            weights=(sinks,),
            states=states,
            floats=(d**-0.5, more.get("cap", 0.0)),
        )

    def run(self, plan: Plan) -> list[NDArray[np.float32]]:
        tables = [[7, 2, 9, 1], [0, 5, 11, 3], [4, 8, 10, 6]]
        at, out = [0, 0, 0], []
        for counts in ((40, 1, 7), (60, 1, 1), (1, 1, 1), (64, 0, 0), (0, 60, 4), (1, 1, 0), (0, 0, 58), (1, 1, 1)):
            step, rows = Step(1), 0
            for s, count in enumerate(counts):
                if count:
                    step.sequence([(at[s] + 3 * i + s) % 64 for i in range(count)], at[s], [tables[s]])
                    at[s] += count
                    rows += count
            plan.run(step)
            out.append(plan.read(self.out, rows))
        return out


@pytest.mark.parametrize("kinds", ["fff", "qqq", "hqf"])
def test_mixture_of_experts(device: Device, gpu: Device, kinds: str) -> None:
    made = [
        native_experts.Mixture(
            random(64, 64) * np.float32(0.5),
            random(8, 64, seed=2),
            3,
            96,
            norm=random(64, seed=3),
            kinds=kinds,
            cuts=(2, 1, 3, 2),
            residual="apart",
        )
        for _ in range(2)
    ]
    with made[0].rig.build(device) as cpu, made[1].rig.build(gpu) as other:
        for rows in ROWS:
            for plan in (cpu, other):
                plan.run(step_of(rows))
            assert np.array_equal(other.read(made[1].ids, rows), cpu.read(made[0].ids, rows))
            close(other.read(made[1].weights, rows), cpu.read(made[0].weights, rows), 1e-5)
            bound = 1e-5 if kinds == "fff" or rows <= 8 else 3e-3
            close(other.read(made[1].h, rows), cpu.read(made[0].h, rows), bound)
            close(other.read(made[1].out, rows), cpu.read(made[0].out, rows), bound)


@pytest.mark.parametrize(
    "test",
    [
        native_sample.test_greedy_takes_the_first_of_equals,
        native_sample.test_penalties_bias_and_mask,
        native_sample.test_broken_logits_are_an_error,
        native_sample.test_random_numbers_depend_on_seed_position_and_draw,
        native_sample.test_known_random_numbers,
        native_ops.test_previous_tokens,
        native_ops.test_read,
        native_replay.test_queue_is_bounded_and_in_order,
    ],
    ids=lambda test: test.__name__,
)
def test_of_the_cpu(gpu: Device, test: Callable[[Device], None]) -> None:
    test(gpu)
