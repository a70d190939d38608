"""INDEX on a GPU: exact choices, through matrix tiles and through FMA, in any batch, from broken numbers too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_sparse as native_sparse
from numpy.typing import NDArray
from rig import Step
from test_sparse import TOKENS, indexer

from apu_engine._native import Device, lib

FP4 = lib.APU_ROUND_FP4
TILES: dict[str, Any] = {"d": 128, "rounding": FP4, "dtype": np.float16}


def test_the_best_512_of_32768_rows_for_32_tokens_in_exact_order(gpu: Device) -> None:
    native_sparse.test_the_best_512_of_32768_rows_for_32_tokens_in_exact_order(gpu)


def test_rows_that_are_few_are_all_chosen(gpu: Device) -> None:
    native_sparse.test_rows_that_are_few_are_all_chosen(gpu)


def choices(
    target: Device, options: dict[str, Any], counts: tuple[int, ...] = (32,), first: int = 0
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Of three sequences in turn, from position `first` on, in steps of so many rows; 12 pages each."""
    rig, ids, q = indexer(**options)
    tables = [(np.random.default_rng(s).permutation(12) + 12 * s).tolist() for s in range(3)]
    found, queries, at = [], [], [first, first + 1, first + 61]
    with rig.build(target) as plan:
        for i, count in enumerate(counts):
            s = i % 3
            step = Step(1).sequence([(at[s] + 5 * r) % TOKENS for r in range(count)], at[s], [tables[s]])
            if count < 20:
                step.sequence([7], at[(s + 1) % 3], [tables[(s + 1) % 3]])
            plan.run(step)
            at[s] += count
            rows = len(step.rows)
            found.append(plan.read(ids, rows))
            queries.append(plan.read(q, rows))
    return found, queries


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 64, "k": 128, "pages": 36, **TILES},
        {"heads": 5, "k": 40, "pages": 36, "tokens": 2, **TILES},
        {"heads": 17, "k": 30, "pages": 36, "tokens": 8, **TILES},
        {"heads": 7, "k": 20, "pages": 36, "tokens": 16, **TILES},
        {"heads": 64, "k": 128, "pages": 36, "d": 128, "rounding": FP4},
        {"heads": 9, "k": 50, "pages": 36, "d": 24, "dtype": np.float16},
        {"heads": 3, "k": 64, "pages": 36, "d": 12},
        {"heads": 2, "k": 5, "pages": 36, "d": 9, "tokens": 128, "dtype": np.float16},
    ],
    ids=str,
)
def test_choices_are_the_cpus(device: Device, gpu: Device, options: dict[str, Any]) -> None:
    """Of scores that are exact in float32, many of them equal."""
    counts = (32, 1, 5, 32, 9, 1)
    (expected, turned), (found, queries) = (
        choices(target, options | {"whole": True}, counts, 1200) for target in (device, gpu)
    )
    for a, b, x, y in zip(expected, found, turned, queries, strict=True):
        assert np.array_equal(y, x)
        assert np.array_equal(b, a)


@pytest.mark.parametrize("options", [{"heads": 37, **TILES}, {"heads": 6, "d": 32}], ids=str)
def test_waves_of_64_choose_the_same(device: Device, wide_gpu: Device, options: dict[str, Any]) -> None:
    test_choices_are_the_cpus(device, wide_gpu, options | {"k": 60, "pages": 36})


@pytest.mark.parametrize("options", [{"heads": 64, **TILES}, {"heads": 6, "d": 32}], ids=str)
def test_scores_of_any_numbers_choose_the_best(gpu: Device, options: dict[str, Any]) -> None:
    options = options | {"k": 60, "pages": 36}
    first, count = 1200, 32
    (found,), (queries,) = choices(gpu, options, (count,), first)
    rig, _, _ = indexer(**options)
    table = np.random.default_rng(0).permutation(12)
    weights, held = rig.keep[1], rig.memory(0)[table, 0].reshape(-1, options["d"]).astype(np.float64)
    for t in range(count):
        n, row = (first + t + 1) // 4, queries[t].reshape(options["heads"], -1).astype(np.float64)
        scores = weights[(first + 5 * t) % TOKENS] @ np.maximum(row @ held[:n].T, 0)
        chosen = found[t]
        assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < n
        left = np.delete(scores, chosen)
        assert scores[chosen].min() >= left.max() - 1e-5 * np.abs(scores).max()


@pytest.mark.parametrize("options", [{"heads": 64, **TILES}, {"heads": 6, "d": 32}], ids=str)
def test_a_row_chooses_the_same_alone_and_when_rows_take_turns(gpu: Device, options: dict[str, Any]) -> None:
    """A plan for a million positions has room for the scores of 15 rows at a time."""
    options = options | {"k": 60, "pages": 36}
    rig, ids, _ = indexer(**options)
    wide, wide_ids, _ = indexer(**options)
    wide.positions = 1 << 20
    table = np.random.default_rng(4).permutation(12).tolist()
    with rig.build(gpu) as plan, wide.build(gpu) as other:
        step = Step(1).sequence(range(32), 1400, [table])
        plan.run(step)
        found = plan.read(ids, 32)
        other.run(step)
        assert np.array_equal(other.read(wide_ids, 32), found)
        for row in (0, 13, 31):
            plan.run(Step(1).sequence([row], 1400 + row, [table]))
            assert np.array_equal(plan.read(ids, 1)[0], found[row])


@pytest.mark.parametrize("options", [{"heads": 64, **TILES}, {"heads": 6, "d": 32}], ids=str)
def test_broken_numbers_are_the_worst(device: Device, gpu: Device, options: dict[str, Any]) -> None:
    options = options | {"k": 60, "pages": 36, "whole": True}
    found = []
    for target in (device, gpu):
        rig, ids, _ = indexer(**options)
        rig.keep[0][3, 5] = np.nan  # a query
        rig.keep[1][4, 2] = np.nan  # a weight
        rig.keep[0][5] = np.inf
        rig.keep[1][6, 1] = -np.inf
        rig.memory(0)[::3, 0, 5, 1] = np.nan
        rig.memory(0)[1, 0, 7:19] = np.nan
        with rig.build(target) as plan:
            plan.run(Step(1).sequence(range(32), 1400, [list(range(12))]))
            found.append(plan.read(ids, 32))
    ids = found[1]
    assert (np.diff(ids, axis=1) > 0).all() and ids.min() >= 0 and ids.max() < 360
    fine = [t for t in range(32) if t not in (3, 4, 5, 6)]
    assert np.array_equal(ids[fine], found[0][fine])
    assert np.array_equal(ids[4], np.arange(60))
