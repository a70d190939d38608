"""Steps: what lands in the native structs, the limits, and that filling one costs little."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from apu_engine._native import NO_PAGE
from apu_engine.errors import ApuError
from apu_engine.plan import HIDDEN, LOGITS, MAX_TOP, SAMPLE, Limits, Step

LIMITS = Limits(max_rows=8, max_sequences=2, max_outputs=3, max_positions=1000, vocabulary=50)


def _step(groups: int = 2) -> Step:
    return Step(LIMITS, groups, 16)


def test_rows_sequences_and_pages() -> None:
    step = _step()
    assert step.add_sequence([5, 6, 7], 200, [[0, 1], [NO_PAGE, 4]]) == 0
    assert step.add_sequence([-1], 9, [[3], np.array([2], np.uint32)], previous=1) == 3
    struct = step.prepared()
    assert (struct.row_count, struct.sequence_count, struct.page_count, struct.output_count) == (4, 2, 6, 0)
    rows = [(r.token, r.previous, r.position, r.sequence) for r in struct.rows[0:4]]
    assert rows == [(5, -1, 200, 0), (6, -1, 201, 0), (7, -1, 202, 0), (-1, 1, 9, 1)]
    assert [(s.row_begin, s.row_count) for s in struct.sequences[0:2]] == [(0, 3), (3, 1)]
    assert [(s.page_begin, s.page_count) for s in struct.slots[0:4]] == [(0, 2), (2, 2), (4, 1), (5, 1)]
    assert list(struct.pages[0:6]) == [0, 1, NO_PAGE, 4, 3, 2]
    step.clear()
    assert step.prepared().row_count == 0 and step.rows == 0


def test_outputs_are_reset_and_point_at_their_results() -> None:
    step = _step()
    step.add_sequence([1, 2], 0, [[0], [0]])
    ids, counts = np.array([3, 4], np.int32), np.array([1, 2], np.int32)
    bias = np.array([9], np.int32), np.array([-2.5], np.float32)
    mask = np.ones(2, np.uint32)
    step.add_output(0, SAMPLE, temperature=0.5, seed=2**63 + 1, history=(ids, counts), bias=bias, mask=mask)
    out = step.prepared().outputs[0]
    assert (out.temperature, out.seed, out.history_count, out.bias_count) == (0.5, 2**63 + 1, 2, 1)
    assert out.history_counts[1] == 2 and out.bias_values[0] == -2.5 and out.mask[1] == 1
    out.token[0] = 42
    assert step.tokens[0] == 42
    step.clear()
    step.add_output(1, LOGITS | HIDDEN, top_n=MAX_TOP)
    out = step.prepared().outputs[0]
    assert (out.temperature, out.history_count, out.bias_count, out.seed) == (0, 0, 0, 0)
    assert not out.history_ids and not out.mask
    out.logits[49], out.hidden[15] = 1.5, 2.5
    assert step.logits[0, 49] == 1.5 and step.hidden[0, 15] == 2.5


@pytest.mark.parametrize(
    "break_it",
    [
        lambda step: step.add_sequence(range(9), 0, [[0], [0]]),
        lambda step: step.add_sequence([], 0, [[0], [0]]),
        lambda step: step.add_sequence([1], 0, [[0]]),
        lambda step: step.add_sequence([1], 0, [range(1000), [0]]),
        lambda step: [step.add_sequence([1], 0, [[0], [0]]) for _ in range(3)],
        lambda step: [step.add_output(0) for _ in range(4)],
        lambda step: step.add_output(0, top_n=MAX_TOP + 1),
        lambda step: step.add_output(0, mask=np.ones(1, np.uint32)),
        lambda step: step.add_output(0, LOGITS, logits=np.zeros(50)),
        lambda step: step.add_output(0, LOGITS, logits=np.zeros((50, 2), np.float32)[:, 0]),
        lambda step: step.add_output(0, bias=(np.zeros(2, np.int32), np.zeros(1, np.float32))),
    ],
)
def test_limits_and_wrong_buffers(break_it: Any) -> None:
    with pytest.raises(ApuError, match="step: "):
        break_it(_step())


@pytest.mark.alone
def test_a_decode_step_is_filled_in_well_under_100_us() -> None:
    step = Step(Limits(512, 8, 64, 8192, 49152), 1, 576)
    pages = np.arange(40, dtype=np.uint32)
    history = np.arange(64, dtype=np.int32), np.ones(64, np.int32)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for i in range(50):
            step.clear()
            row = step.add_sequence((i,), 4000 + i, (pages,))
            step.add_output(row, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1, history=history)
            step.prepared()
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 50e-6
