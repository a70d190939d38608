"""The sampler: exact rules against a plain reference, distributions by chi-square with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import Plan, Rig, Step

from apu_engine._native import Device, DeviceError, InvalidError, lib

Logits = NDArray[np.float32]
CHI_SQUARE_999 = {3: 16.27, 4: 18.47, 9: 27.88, 19: 43.82}  # quantile 0.999 by degrees of freedom


def rig_of(*rows: Sequence[float] | Logits, outputs: int = 16) -> Rig:
    values = np.zeros((min(16, len(rows[0])), len(rows[0])), np.float32)
    values[: len(rows)] = rows
    rig = Rig(vocabulary=values.shape[1], outputs=outputs)
    rig.logits(values)
    return rig


def sample(plan: Plan, *, position: int = 0, **options: Any) -> int:
    step = Step().sequence([0], position)
    result = step.output(0, lib.APU_OUT_SAMPLE, **options)
    plan.run(step)
    return int(result["token"][0])


def draws(plan: Plan, count: int, **options: Any) -> NDArray[np.int64]:
    """Tokens of `count` draws with different seeds, in steps of as many outputs as the plan takes."""
    out: list[int] = []
    most = plan.rig.outputs
    while len(out) < count:
        step = Step().sequence([0])
        results = [step.output(0, lib.APU_OUT_SAMPLE, seed=len(out) + i, **options) for i in range(most)]
        plan.run(step)
        out += [int(r["token"][0]) for r in results]
    return np.array(out[:count])


def kept(z: NDArray[np.float64], temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """Probabilities after the three cuts, by sorting; the reference of the rules."""
    order = np.lexsort((np.arange(len(z)), -z))
    p = np.exp((z - z.max()) / temperature)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        cut = before >= top_p * p.sum()
        cut[0] = False
        p[order[cut]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def test_greedy_takes_the_first_of_equals(device: Device) -> None:
    for size in (2, 33, 1000, 49152):
        z = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        z[[size // 2, size - 1]] = 9.0
        with rig_of(z).build(device) as plan:
            assert sample(plan) == size // 2


def test_penalties_bias_and_mask(device: Device) -> None:
    z = np.array([3.0, 2.9, -1.0, 0.5, 2.0], np.float32)
    with rig_of(z).build(device) as plan:
        assert sample(plan) == 0
        assert sample(plan, history={0: 1}, repeat_penalty=1.1) == 1  # 3.0 / 1.1
        assert sample(plan, history={0: 1, 1: 4}, repeat_penalty=1.1) == 0
        assert sample(plan, history={0: 1}, presence_penalty=0.05) == 0
        assert sample(plan, history={0: 1}, presence_penalty=0.2) == 1
        assert sample(plan, history={0: 3, 1: 1}, frequency_penalty=0.06) == 1
        assert sample(plan, history={0: 3, 1: 1}, frequency_penalty=0.04) == 0
        assert sample(plan, history={0: 1}) == 0  # no penalty, no effect
        # negative logits are multiplied: only token 2 is allowed beside token 3, both negative after the bias
        mask = np.array([False, False, True, True, False])
        assert sample(plan, mask=mask, bias={3: -1.2}) == 3
        assert sample(plan, mask=mask, bias={3: -1.2}, history={3: 1}, repeat_penalty=2.0) == 3  # 0.25 - 1.2
        assert sample(plan, mask=mask, bias={3: -1.2, 2: 0.3}) == 2 or z[2] + 0.3 < z[3] - 1.2
        assert sample(plan, bias={4: 5.0}) == 4
        assert sample(plan, bias={0: -np.inf, 1: -np.inf}) == 4
        assert sample(plan, mask=mask, bias={0: 50.0}) == 3  # a bias does not lift a mask
        with pytest.raises(InvalidError, match=r"output 0 \(row 0\): every token is excluded by its mask or bias"):
            sample(plan, mask=np.zeros(5, bool))
        with pytest.raises(InvalidError, match="every token is excluded"):
            sample(plan, temperature=1.0, bias=dict.fromkeys(range(5), -np.inf))
        assert sample(plan) == 0  # the plan goes on


def test_broken_logits_are_an_error(device: Device) -> None:
    for value in (np.nan, np.inf):
        rig = Rig()
        rig.logits(np.zeros((16, 64), np.float32))
        head = next(t for t in rig.tensors if t["name"] == "head")
        matrix = np.zeros((64, 16), np.float32)
        matrix[5] = value
        rig.keep.append(matrix)
        rig.segments[rig.planes[head["plane_begin"]]["segment_begin"]]["address"] = matrix.ctypes.data
        with (
            rig.build(device) as plan,
            pytest.raises(DeviceError, match=r"output 0 \(row 0\): its logits hold NaN or infinity"),
        ):
            sample(plan)


@pytest.mark.parametrize("size", [5, 64, 5000])
def test_log_probabilities_and_logits(device: Device, size: int) -> None:
    z = (np.random.default_rng(3).standard_normal(size) * 4).astype(np.float32)
    z[1] = z[3]  # equals: the lower id first
    n = min(size, 20)
    reference = z.astype(np.float64) - z.max() - np.log(np.exp(z.astype(np.float64) - z.max()).sum())
    with rig_of(z).build(device) as plan:
        step = Step().sequence([0])
        want = lib.APU_OUT_SAMPLE | lib.APU_OUT_TOP | lib.APU_OUT_LOGITS
        result = step.output(
            0,
            want,
            vocabulary=size,
            top_n=n,
            temperature=3.0,
            seed=9,
            bias={0: 2.0},
            history={1: 1},
            repeat_penalty=2.0,
        )
        plan.run(step)
        assert np.array_equal(result["logits"], z)
        order = np.lexsort((np.arange(size), -z))[:n]
        assert result["top_ids"].tolist() == order.tolist()
        np.testing.assert_allclose(result["top_logprobs"], reference[order], atol=1e-5)
        np.testing.assert_allclose(result["logprob"][0], reference[result["token"][0]], atol=1e-5)


RULES = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_cuts_keep_exactly_the_right_tokens(device: Device, rule: dict[str, Any]) -> None:
    """Every token that may come does, and no other."""
    z = np.concatenate([np.linspace(2, -2, 16)[np.random.default_rng(5).permutation(16)], np.full(2000, -60.0)])
    z = z.astype(np.float32)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **rule}
    p = kept(z.astype(np.float64), **full)
    with rig_of(z).build(device) as plan:
        seen = np.bincount(draws(plan, 1600, **rule), minlength=len(z))
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(p))
    likely = p > 0.01
    assert (seen[likely] > 0).all()
    np.testing.assert_allclose(seen[likely] / 1600, p[likely], atol=4.5 * np.sqrt(0.25 / 1600))


def test_small_and_large_paths_agree(device: Device) -> None:
    """top_k goes through a heap, a partial sort or nothing: the same set must be drawn from, hence the same tokens."""
    rng = np.random.default_rng(11)
    z = rng.standard_normal(3000).astype(np.float32) * 7
    with rig_of(z).build(device) as plan:
        for top_p, min_p in ((1.0, 0.0), (0.7, 0.0), (0.999, 0.01)):
            options = {"temperature": 0.9, "top_p": top_p, "min_p": min_p}
            whole = draws(plan, 200, **options)
            assert np.array_equal(whole, draws(plan, 200, top_k=3000, **options))
            # cut where nothing but a negligible tail is lost: 1,024 entries by heap, 1,500 by partial sort
            few, many = draws(plan, 200, top_k=1024, **options), draws(plan, 200, top_k=1500, **options)
            assert (few == many).mean() > 0.99 and (whole == many).mean() > 0.98


@pytest.mark.parametrize("top_k", [0, 20])
def test_distribution(device: Device, top_k: int) -> None:
    z = np.log(np.arange(1, 21) / 210).astype(np.float32)
    z = np.concatenate([z, np.full(44, -np.inf, np.float32)])
    with rig_of(np.where(np.isinf(z), -80, z)).build(device) as plan:
        count = 20_000
        seen = np.bincount(draws(plan, count, temperature=1.0, top_k=top_k), minlength=64)[:20]
        expected = np.arange(1, 21) / 210 * count
        assert ((seen - expected) ** 2 / expected).sum() < CHI_SQUARE_999[19]


def test_random_numbers_depend_on_seed_position_and_draw(device: Device) -> None:
    z = np.zeros(64, np.float32)
    with rig_of(z, outputs=4).build(device) as plan:
        base = {"temperature": 1.0, "seed": 123456789012345}
        assert len({sample(plan, position=7, draw=1, **base) for _ in range(3)}) == 1
        for varied in (
            [sample(plan, position=p, **base) for p in range(40)],
            [sample(plan, draw=d, **base) for d in range(40)],
            [sample(plan, temperature=1.0, seed=s << 32) for s in range(40)],
        ):
            assert len(set(varied)) > 15
        # company in the step changes nothing
        step = Step().sequence([1, 2, 0], 5)
        results = [step.output(row, **base) for row in (0, 1, 2)]
        plan.run(step)
        assert int(results[2]["token"][0]) == sample(plan, position=7, **base)


def test_known_random_numbers(device: Device) -> None:
    """Philox4x32-10: the published vector for key 0, counter 0 begins 6627e8d5 e169c58d."""
    u = (0xE169C58D << 32 | 0x6627E8D5) / 2**64
    size = 4096
    with rig_of(np.zeros(size, np.float32)).build(device) as plan:
        assert sample(plan, temperature=1.0, seed=0, draw=0, position=0) == int(u * size)


@pytest.mark.alone
def test_big_vocabulary_is_fast(device: Device) -> None:
    """Greedy and top_k sampling over 262,144 logits: no full sort. Generous bounds; a sort takes 20 ms."""
    import time

    z = np.random.default_rng(1).standard_normal(262144).astype(np.float32)
    with rig_of(z, outputs=1).build(device) as plan:
        last = len(plan.rig.ops)
        for options in ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}, {"temperature": 0.8, "top_p": 0.95}):
            step = Step().sequence([0])
            step.output(0, **options)
            plan.run(step)
            best = 1.0
            for _ in range(5):
                start = time.perf_counter()
                plan.run(step, last - 1)
                best = min(best, time.perf_counter() - start)
            assert best < 0.012, options
