"""SHARED_STORE, COMPRESS and the roundings on a GPU: against numpy, against the CPU, and the same bits in any batch."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import test_sparse as native_sparse
from numpy.typing import NDArray
from rig import Plan, Rig, Step
from test_sparse import EPS, TOKENS, indexer, random, rows_state

from apu_engine._native import Device, lib

Bits = NDArray[np.uint32]


def test_rows_are_rounded_to_e4m3(gpu: Device) -> None:
    native_sparse.test_rows_are_rounded_to_e4m3(gpu)


def test_queries_are_rounded_to_fp4(gpu: Device) -> None:
    native_sparse.test_queries_are_rounded_to_fp4(gpu)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "series", "d"), [(4, 2, 40), (128, 1, 48), (8, 1, 16), (1, 1, 8), (2, 2, 24)])
def test_compressed_rows(gpu: Device, tokens: int, series: int, d: int, kind: Any) -> None:
    native_sparse.test_compressed_rows(gpu, tokens, series, d, kind)


@pytest.mark.parametrize("rounding", [lib.APU_ROUND_E4M3, lib.APU_ROUND_FP4])
@pytest.mark.parametrize("d", [8, 64, 128, 512])
def test_roundings_have_the_bits_of_the_cpu(device: Device, gpu: Device, rounding: int, d: int) -> None:
    """At position 0, where a rotation changes nothing: magnitudes of all sizes, zeros, infinities, NaN."""
    draw = np.random.default_rng(d)
    values = draw.standard_normal((TOKENS, 2 * d)) * np.exp2(draw.integers(-20, 20, (TOKENS, 2 * d)))
    values *= np.exp2(draw.integers(-100, 80, (TOKENS, 1)))
    values[0] = 0
    values[1, ::3] = 0
    values[2, 1], values[3, 0], values[4, 2] = np.inf, -np.inf, np.nan
    found: list[Bits] = []
    for target in (device, gpu):
        rig, _, q = indexer(heads=2, d=d, k=4, pages=TOKENS, rope=4, rounding=rounding, rows=TOKENS)
        rig.sequences = TOKENS
        rig.keep[0][...] = values.astype(np.float32)
        with rig.build(target) as plan:
            step = Step(1)
            for row in range(TOKENS):
                step.sequence([row], 0, [[row]])
            plan.run(step)
            found.append(plan.read(q, TOKENS))
    nan = np.isnan(found[0])
    assert np.array_equal(np.isnan(found[1]), nan)
    assert np.array_equal(found[1].view(np.uint32)[~nan], found[0].view(np.uint32)[~nan])


class Layer:
    """What a layer stores of the rows of three sequences: its own rows, compressed ones, and the index's."""

    def __init__(self, tokens: int, kv: Any, bias: str = "F16", style: int = lib.APU_ROPE_PAIRS) -> None:
        rig = self.rig = Rig(rows=64, vocabulary=TOKENS, positions=1024)
        d, small, heads, rope, series = 160, 64, 5, 32, 2 if tokens == 4 else 1
        number = gguf.GGMLQuantizationType[bias]
        self.q, kv_rows = rig.input(random(TOKENS, heads * d) * 3, "q"), rig.input(random(TOKENS, d, seed=2), "kv")
        window = rows_state(rig, "window", d, 12, 128, window=128, dtype=kv)
        factors = rig.weight("factors", np.linspace(1, 2, rope // 2, dtype=np.float32))
        norm = rig.weight("norm", random(d, seed=3))
        floats = (EPS, 1e4, 0.5, 0.0, 1.25)
        ints = (rope, style, 0, lib.APU_ROUND_E4M3)
        rig.op(
            lib.APU_OP_SHARED_STORE,
            ins=(self.q, kv_rows),
            outs=(self.q,),
            weights=(norm, -1, factors),
            states=(window,),
            ints=ints,
            floats=floats,
        )
        self.states = [window]
        for size, rounding in ((d, lib.APU_ROUND_E4M3), (small, lib.APU_ROUND_FP4)):
            width = series * size
            ins = [rig.input(random(TOKENS, width, seed=size + i), f"in{size}_{i}") for i in range(2)]
            packed = gguf.quants.quantize(random(tokens, width, seed=5), number)
            offset = rig.weight(f"ape{size}", packed, dtype=int(number), shape=(tokens, width), cuts=min(tokens, 3))
            weights = (offset, rig.weight(f"norm{size}", random(size, seed=6)), factors)
            made = rows_state(rig, f"rows{size}", size, 12, 128 // tokens, group=1, dtype=kv)
            states = (rows_state(rig, f"open{size}", 2 * width, 12, 128, window=128, group=2), made)
            for state in states:
                rig.memory(state)[...] = 0
            rig.op(
                lib.APU_OP_COMPRESS,
                ins=ins,
                weights=weights,
                states=states,
                ints=(rope, style, 0, rounding),
                floats=floats,
            )
            self.states += states
        rig.memory(window)[...] = 0

    def run(self, plan: Plan, counts: tuple[int, int, int], at: list[int]) -> NDArray[np.float32]:
        tables = [[7, 2, 9, 1], [0, 5, 11, 3], [4, 8, 10, 6]]
        step, rows = Step(3), 0
        for s, count in enumerate(counts):
            if count:
                tokens = [(at[s] + 3 * i + s) % TOKENS for i in range(count)]
                turned = [tables[s], tables[(s + 1) % 3], tables[(s + 2) % 3]]
                step.sequence(tokens, at[s], turned)
                at[s] += count
                rows += count
        plan.run(step)
        out: NDArray[np.float32] = plan.read(self.q, rows)
        return out

    def held(self, plan: Plan) -> list[NDArray[Any]]:
        for state in self.states:
            plan.fetch(self.rig.memory(state))
        return [self.rig.memory(state) for state in self.states]


STEPS = ((40, 1, 7), (60, 1, 1), (64, 0, 0), (64, 0, 0), (64, 0, 0), (0, 60, 4), (1, 1, 0), (0, 0, 58), (1, 1, 1))


@pytest.mark.parametrize(
    ("tokens", "kv", "bias", "style"),
    [
        (4, np.float32, "F16", lib.APU_ROPE_PAIRS),
        (4, np.float16, "BF16", lib.APU_ROPE_HALVES),
        (128, np.float16, "F32", lib.APU_ROPE_PAIRS),
        (128, np.float32, "Q8_0", lib.APU_ROPE_PAIRS),
    ],
)
def test_what_a_layer_stores_is_the_cpus(
    device: Device, gpu: Device, tokens: int, kv: Any, bias: str, style: int
) -> None:
    found, queries = [], []
    for target in (device, gpu):
        case, at = Layer(tokens, kv, bias, style), [0, 0, 0]
        with case.rig.build(target) as plan:
            queries.append([case.run(plan, counts, at) for counts in STEPS])
            found.append(case.held(plan))
    for expected, got in zip(*queries, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    for name, expected, got in zip(("window", "open", "rows", "open", "rows"), *found, strict=True):
        if name == "open":
            assert np.array_equal(got, expected)
            continue
        expected, got = expected.astype(np.float32), got.astype(np.float32)
        near = np.abs(got - expected) <= 2e-5 * np.abs(expected).max() + (
            1e-3 * np.abs(expected) if kv == np.float16 else 0
        )
        assert near.mean() > 0.998  # others lie where a rounding changes sides
        assert np.abs(got - expected).max() <= 0.26 * np.abs(expected).max()
        assert np.abs(expected).max() > 1


@pytest.mark.parametrize("tokens", [4, 128])
def test_waves_of_64_store_the_same(device: Device, wide_gpu: Device, tokens: int) -> None:
    test_what_a_layer_stores_is_the_cpus(device, wide_gpu, tokens, np.float16, "F16", lib.APU_ROPE_HALVES)


@pytest.mark.parametrize("rounding", [lib.APU_ROUND_E4M3, lib.APU_ROUND_FP4])
def test_waves_of_64_round_the_same(device: Device, wide_gpu: Device, rounding: int) -> None:
    test_roundings_have_the_bits_of_the_cpu(device, wide_gpu, rounding, 256)


@pytest.mark.parametrize("tokens", [4, 128])
def test_a_prefill_stores_what_single_rows_do(gpu: Device, tokens: int) -> None:
    together, alone = Layer(tokens, np.float16), Layer(tokens, np.float16)
    with together.rig.build(gpu) as plan, alone.rig.build(gpu) as other:
        a, b = [0, 0, 0], [0, 0, 0]
        for count in (61, 64, 8, 7):
            queries = together.run(plan, (count, 0, 0), a)
            for row in range(count):
                # the token that the row has in the step of all
                tables = [[7, 2, 9, 1], [0, 5, 11, 3], [4, 8, 10, 6]]
                token = (b[0] + 3 * row) % TOKENS
                other.run(Step(3).sequence([token], b[0] + row, tables))
                assert np.array_equal(other.read(alone.q, 1)[0], queries[row])
            b[0] += count
        for expected, got in zip(together.held(plan), alone.held(other), strict=True):
            assert np.array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_broken_rows_break_only_what_is_made_of_them(gpu: Device) -> None:
    case = Layer(4, np.float32)
    for array in case.rig.keep:
        if array.ndim == 2 and len(array) == TOKENS:
            array[9] = np.nan  # the token of position 3
            array[21, ::5] = np.inf  # of position 7
    with case.rig.build(gpu) as plan:
        case.run(plan, (16, 0, 0), [0, 0, 0])
        held = case.held(plan)
    rows = held[2][0, 0, :4]
    assert np.isnan(rows[0]).all() and np.isnan(rows[1]).any()
    assert np.isfinite(held[0][7, 0, :3]).all() and np.isnan(held[0][7, 0, 3]).all()
    assert np.isfinite(rows[3]).all()
