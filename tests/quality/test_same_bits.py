"""On the real models a row's logits do not depend on how the rows were cut into steps, nor on its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import running

from apu_engine._native import Device

Prose = Callable[[Path, int], list[int]]
FIRST, ROWS = 96, 64  # the rows under test lie on both sides of a page's end


@pytest.mark.parametrize(
    ("fixture", "precision"),
    [("smollm2_path", "default"), ("smollm2_path", "exact"), ("gemma3_path", "default")],
)
def test_prefill_equals_decode(
    fixture: str, precision: str, request: pytest.FixtureRequest, prose: Prose, device: Device
) -> None:
    path: Path = request.getfixturevalue(fixture)
    ids = prose(path, FIRST + ROWS)
    with running(path, device, ctx=256, precision=precision) as model:
        model.logits([(0, 0, ids[:FIRST])])
        prefill = model.logits([(0, FIRST, ids[FIRST:])])
        for row, token in enumerate(ids[FIRST:]):
            (decode,) = model.logits([(0, FIRST + row, [token])])
            assert np.array_equal(decode, prefill[row]), f"row {row} differs from its prefill"


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_interleaved_sequences_equal_separate_ones(
    fixture: str, request: pytest.FixtureRequest, prose: Prose, device: Device
) -> None:
    path: Path = request.getfixturevalue(fixture)
    ids = prose(path, 160)
    first, second = ids[:96], ids[64:]
    with running(path, device, ctx=256) as model:
        separate = [model.prefill(first), model.prefill(second)]
    parts: list[list[np.ndarray]] = [[], []]
    cuts = [(0, 40, 0, 17), (40, 41, 17, 18), (41, 90, 18, 19), (90, 96, 19, 96)]  # chunks and single rows side by side
    with running(path, device, ctx=256, parallel=2) as model:
        for a, a_end, b, b_end in cuts:
            out = model.logits([(0, a, first[a:a_end]), (1, b, second[b:b_end])])
            parts[0].append(out[: a_end - a])
            parts[1].append(out[a_end - a :])
    for found, expected in zip(parts, separate, strict=True):
        assert np.array_equal(np.concatenate(found), expected)
