"""LATENT_STORE, HEAD_MATMUL, LATENT_ATTENTION, groups and bias of ROUTE on a GPU against the CPU, op by op; DeepSeek's
tiny models: their joined, older files, and what they decode with caches of every type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import test_latent as native_latent
from harness import running
from kernel_cases import random_weights
from numpy.typing import NDArray
from rig import NONE, Q8_0, Plan, Rig, Step
from test_plan_models import IDS, NEW, V3, greedy
from test_plan_ops import ROWS, close, compare, random, step_of

from apu_engine._native import Device, UnsupportedError, lib
from models import tiny_deepseek2_gguf

EPS = 1e-5


class Latent:
    """Queries and latent rows from tables by token, stored and attended; three ragged sequences of several steps."""

    def __init__(
        self, heads: int, d: int, value: int, rope: int, kv: Any = np.float32, window: int = 0, **more: Any
    ) -> None:
        rig = self.rig = Rig(rows=64, positions=1024)
        q, c = rig.input(random(64, heads * d), "q"), rig.input(random(64, d, seed=2), "c")
        state = self.state = rig.state("latent", 1, d, 12, dtype=kv, window=window)
        rig.memory(state)[...] = 0
        rig.op(
            lib.APU_OP_LATENT_STORE,
            ins=(q, c),
            outs=(q,),
            weights=(rig.weight("norm", random(d - rope, seed=3)),),
            states=(state,),
            ints=(rope, more.get("style", lib.APU_ROPE_PAIRS), 0, heads),
            floats=(EPS, 10000.0, 1.0, 0.0, 1.25),
        )
        self.q, self.out = q, rig.scratch("out", heads * value)
        sinks = rig.weight("sinks", random(heads, seed=6)) if more.get("sinks") else NONE
        rig.op(
            lib.APU_OP_LATENT_ATTENTION,
            ins=(q,),
            outs=(self.out,),
            weights=(sinks,),
            states=(state,),
            ints=(value,),
            floats=(d**-0.5, more.get("cap", 0.0)),
        )

    def run(self, plan: Plan, counts: tuple[int, int, int], at: list[int]) -> list[NDArray[np.float32]]:
        tables = [[7, 2, 9, 1], [0, 5, 11, 3], [4, 8, 10, 6]]
        step, rows = Step(1), 0
        for s, count in enumerate(counts):
            if count:
                step.sequence([(at[s] + 3 * i + s) % 64 for i in range(count)], at[s], [tables[s]])
                at[s] += count
                rows += count
        plan.run(step)
        return [plan.read(self.q, rows), plan.read(self.out, rows)]


STEPS = ((40, 1, 7), (60, 1, 1), (64, 0, 0), (64, 0, 0), (64, 0, 0), (0, 60, 4), (1, 1, 0), (0, 0, 58), (1, 1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 16, "d": 96, "value": 64, "rope": 32},
        {"heads": 16, "d": 96, "value": 64, "rope": 32, "kv": np.float16},
        {"heads": 16, "d": 96, "value": 64, "rope": 32, "kv": Q8_0},
        {"heads": 3, "d": 64, "value": 64, "rope": 16, "window": 100, "style": lib.APU_ROPE_HALVES},
        {"heads": 13, "d": 36, "value": 21, "rope": 6, "sinks": True, "kv": np.float16},
        {"heads": 9, "d": 576, "value": 512, "rope": 64, "kv": np.float16, "cap": 5.0},
        {"heads": 1, "d": 42, "value": 9, "rope": 2},
    ],
    ids=str,
)
def test_stored_latents_are_attended(device: Device, gpu: Device, options: dict[str, Any]) -> None:
    found: list[list[NDArray[np.float32]]] = []
    for target in (device, gpu):
        case, at = Latent(**options), [0, 0, 0]
        with case.rig.build(target) as plan:
            found.append([x for counts in STEPS for x in case.run(plan, counts, at)])
    bound = 2e-5 if options.get("kv", np.float32) is np.float32 else 2e-3  # a stored number may round to its neighbour
    for expected, got in zip(*found, strict=True):
        close(got, expected, bound)


@pytest.mark.parametrize("kv", [np.float32, np.float16, Q8_0])
def test_a_row_has_the_same_bits_alone(gpu: Device, kv: Any) -> None:
    options: dict[str, Any] = {"heads": 4, "d": 96, "value": 64, "rope": 32, "kv": kv}
    together, alone = Latent(**options), Latent(**options)
    with together.rig.build(gpu) as plan, alone.rig.build(gpu) as other:
        a, b = [0, 0, 0], [0, 0, 0]
        for count in (64, 64, 64, 64, 30):
            expected = together.run(plan, (count, 0, 0), a)[1]
            if count == 64:
                alone.run(other, (count, 0, 0), b)
                continue
            for row in range(count):
                step = Step(1).sequence([(256 + 3 * row) % 64], 256 + row, [[7, 2, 9, 1]])
                other.run(step)
                assert np.array_equal(other.read(alone.out, 1)[0], expected[row])


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    ("heads", "k", "n", "rest", "cuts"),
    [(5, 32, 64, 6, 5), (3, 160, 96, 4, 3), (2, 512, 128, 0, 7), (1, 1088, 32, 1, 1)],
)
def test_matrices_of_heads(
    device: Device, gpu: Device, across: bool, kind: str, heads: int, k: int, n: int, rest: int, cuts: int
) -> None:
    """In float on a GPU, as the CPU's precision "exact"."""

    def rig() -> tuple[Rig, list[int]]:
        r = Rig(rows=40)
        shape = (heads, k, n) if across else (heads, n, k)
        w = random(*shape, seed=2)
        number = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(w.reshape(-1, shape[-1]), number).reshape(*shape[:2], -1)
        weight = r.weight("w", packed, dtype=int(number), shape=shape, cuts=cuts)
        out = r.scratch("out", heads * (n + rest))
        x = r.input(random(64, heads * (k + rest)))
        r.op(lib.APU_OP_HEAD_MATMUL, ins=(x,), outs=(out,), weights=(weight,), ints=(int(across), 1, rest))
        return r, [out]

    compare(rig, (device, gpu), 1e-5)
    made, outs = rig()
    with made.build(gpu) as plan:
        plan.run(step_of(40))
        whole = plan.read(outs[0], 40)
        for rows in (1, 2, 7):
            plan.run(step_of(rows))
            assert np.array_equal(plan.read(outs[0], rows), whole[:rows])


@pytest.mark.parametrize(
    ("kind", "heads", "k", "n", "rest", "cuts"),
    [
        ("Q8_0", 5, 128, 80, 6, 1),
        ("Q8_0", 3, 512, 96, 0, 3),
        ("Q8_0", 2, 192, 30, 3, 7),
        ("Q8_0", 2, 2304, 40, 0, 1),
        ("Q5_0", 3, 128, 64, 64, 5),
        ("Q4_K", 2, 512, 128, 0, 1),
        ("Q4_K", 1, 4352, 33, 0, 1),
    ],
)
def test_int8_rows_of_heads(
    device: Device, gpu: Device, kind: str, heads: int, k: int, n: int, rest: int, cuts: int
) -> None:
    found = []
    for target in (device, gpu):
        rig = Rig(rows=16)
        w = rig.weight(
            "w",
            random_weights(gguf.GGMLQuantizationType[kind], heads * n, k).reshape(heads, n, -1),
            dtype=int(gguf.GGMLQuantizationType[kind]),
            shape=(heads, n, k),
            cuts=cuts,
        )
        out = rig.scratch("out", heads * (n + rest))
        x = rig.input(random(64, heads * (k + rest)))
        rig.op(lib.APU_OP_HEAD_MATMUL, ins=(x,), outs=(out,), weights=(w,), ints=(0, 0, rest))
        with rig.build(target) as plan:
            for rows in (8, 1, 2, 5):
                plan.run(step_of(rows))
                found.append(plan.read(out, rows))
    for expected, got in zip(found[:4], found[4:], strict=True):
        close(got, expected, 1e-5)
        assert np.array_equal(got, found[4][: len(got)])


@pytest.mark.parametrize(
    ("kind", "heads", "k", "n", "rest", "cuts"),
    [("F16", 5, 96, 80, 6, 1), ("BF16", 2, 40, 130, 0, 3), ("Q8_0", 3, 128, 96, 64, 3), ("Q2_K", 2, 512, 40, 1, 1)],
)
def test_many_rows_of_heads(
    device: Device, gpu: Device, kind: str, heads: int, k: int, n: int, rest: int, cuts: int
) -> None:
    """On matrix tiles: the CPU's exact products, rounded to halves."""
    number = gguf.GGMLQuantizationType[kind]
    packed = random_weights(number, heads * n, k).reshape(heads, n, -1)
    found = []
    for target, precision in ((device, 1), (gpu, 0)):
        rig = Rig(rows=130)
        w = rig.weight("w", packed, dtype=int(number), shape=(heads, n, k), cuts=cuts)
        out = rig.scratch("out", heads * (n + rest))
        x = rig.input(random(64, heads * (k + rest)))
        rig.op(lib.APU_OP_HEAD_MATMUL, ins=(x,), outs=(out,), weights=(w,), ints=(0, precision, rest))
        with rig.build(target) as plan:
            for rows in (40, 9, 130):
                plan.run(Step().sequence([i % 64 for i in range(rows)]))
                found.append(plan.read(out, rows))
    for expected, got in zip(found[:3], found[3:], strict=True):
        close(got, expected, 2e-3)
    assert np.array_equal(found[3][:9], found[4])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    ("E", "k", "groups", "used", "sum2"),
    [(16, 3, 4, 2, 1), (16, 3, 4, 2, 0), (256, 8, 8, 4, 1), (384, 8, 1, 1, 1), (320, 6, 8, 3, 1), (8, 3, 0, 0, 0)],
)
def test_groups_and_bias(
    device: Device, gpu: Device, biased: bool, sigmoid: bool, E: int, k: int, groups: int, used: int, sum2: int
) -> None:
    x, router = random(64, 96), random(E, 96, seed=2) / np.float32(8)
    bias = random(E, seed=3) * np.float32(0.3 if sigmoid else 0.05) if biased else None
    found = []
    for target in (device, gpu):
        rig, ids, weights = native_latent.route(router, x, k, (int(sigmoid), 1, groups, used, sum2), bias)
        with rig.build(target) as plan:
            for rows in ROWS:
                plan.run(step_of(rows))
                found.append((plan.read(ids, rows), plan.read(weights, rows)))
    for (expected, scores), (got, other) in zip(found[: len(ROWS)], found[len(ROWS) :], strict=True):
        assert np.array_equal(got, expected)
        np.testing.assert_allclose(other, scores, rtol=1e-5)


def test_equal_groups_and_a_broken_row(gpu: Device) -> None:
    native_latent.test_equal_groups_go_to_the_lowest_and_a_broken_row_to_k_experts(gpu)


def test_too_many_groups_are_refused(gpu: Device) -> None:
    router = random(600, 32)
    rig, _, _ = native_latent.route(router, random(64, 32), 3, (1, 1, 300, 20, 1), None)
    with pytest.raises(UnsupportedError, match=r"ROUTE.*groups.*at most 256.*--device cpu"):
        Plan(rig, gpu)


@pytest.mark.parametrize(
    ("options", "kv_type", "bound"),
    [
        (V3 | {"joined": True}, "f32", 1e-4),
        ({"q_rank": 0, "joined": True, "nope": 32, "rank": 64, "rope": 32, "value": 32}, "f16", 0.02),
        (V3 | {"nope": 32, "rank": 64, "rope": 32, "value": 32}, "q8_0", 0.05),
        ({"q_rank": 0, "H": 12, "D": 96}, "f32", 1e-4),
    ],
    ids=["v3-joined", "v2-lite-joined-f16", "v3-q8_0", "twelve-heads"],
)
def test_decodes_as_the_cpu_does(
    tmp_path: Path, device: Device, gpu: Device, options: dict[str, Any], kv_type: str, bound: float
) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device, kv_type=kv_type) as cpu:
        expected_tokens, expected = greedy(cpu, IDS[:40], NEW)
    with running(tiny.path, gpu, kv_type=kv_type) as other:  # the CPU's tokens
        found = [other.prefill(IDS[:40], chunk=16)[-1]]
        found += [other.logits([(0, 40 + i, [token])])[-1] for i, token in enumerate(expected_tokens[:-1])]
    wrong = np.abs(np.stack(found) - expected).max(1)
    # Tiles round queries: a token's expert may be another one that was as good.
    assert np.sort(wrong)[-1 if kv_type == "f32" else -2] <= bound


def test_a_context_of_many_spans(tmp_path: Path, device: Device, gpu: Device) -> None:
    ids = np.random.default_rng(3).integers(0, 320, 700).tolist()
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", layers=2, context=1024)
    found = []
    for target in (device, gpu):
        with running(tiny.path, target, ctx=1024) as model:
            model.prefill(ids[:-2], chunk=128)
            found.append(np.concatenate([model.logits([(0, 698 + i, [ids[698 + i]])]) for i in range(2)]))
    assert np.abs(found[1] - found[0]).max() <= 1e-4
