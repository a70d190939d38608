"""Which rows a step holds."""

from __future__ import annotations

import numpy as np
from engine_fakes import Group, make_job

from apu_engine.engine.pages import PagePool
from apu_engine.engine.scheduler import SHARED_PREFILL_ROWS, Scheduler
from apu_engine.engine.sequence import History, Sequence


def scheduler(parallel: int = 4, max_rows: int = 16, max_outputs: int = 4, pages: int = 64) -> Scheduler:
    return Scheduler(PagePool([Group(0, pages)]), parallel, max_rows, max_outputs)


def add(s: Scheduler, name: str, prompt: int, max_tokens: int = 5, logits: bool = False) -> Sequence:
    rows = np.zeros((prompt, 97), np.float32) if logits else None
    job, _ = make_job(range(prompt), max_tokens, id=name, logits=rows)
    reserved = s.reserve(prompt + max_tokens)
    assert reserved is not None
    sequence = Sequence(job, 0.0, s.pool.tables(), reserved)
    s.add(sequence)
    return sequence


def step(s: Scheduler) -> list[tuple[str, int, int, bool]]:
    """Build a step, pretend that it ran, and say what was in it."""
    chunks = s.next_step()
    for chunk in chunks:
        chunk.sequence.position += chunk.count
    return [(c.sequence.job.id, c.start, c.count, c.sample) for c in chunks]


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    s = scheduler()
    add(s, "a", 40)
    assert step(s) == [("a", 0, 16, False)]
    assert step(s) == [("a", 16, 16, False)]
    assert step(s) == [("a", 32, 8, True)]
    assert step(s) == [("a", 40, 1, True)]


def test_decode_rows_come_first_and_prompts_share_what_is_left() -> None:
    s = scheduler()
    add(s, "a", 3)
    step(s)
    add(s, "b", 10)
    add(s, "c", 10)
    assert step(s) == [("a", 3, 1, True), ("b", 0, 10, True), ("c", 0, 5, False)]
    assert step(s) == [("a", 4, 1, True), ("b", 10, 1, True), ("c", 5, 5, True)]
    assert step(s) == [("a", 5, 1, True), ("b", 11, 1, True), ("c", 10, 1, True)]


def test_a_long_prompt_takes_small_chunks_while_others_decode() -> None:
    s = scheduler(max_rows=512)
    add(s, "a", 2)
    step(s)
    long = add(s, "b", 600)
    assert step(s)[1] == ("b", 0, SHARED_PREFILL_ROWS, False)
    s.remove(next(x for x in s.running if x.job.id == "a"))
    assert step(s) == [("b", SHARED_PREFILL_ROWS, 600 - SHARED_PREFILL_ROWS, True)]
    assert not long.in_prefill


def test_outputs_are_limited() -> None:
    s = scheduler(max_outputs=2)
    for name in "abc":
        add(s, name, 3)
    assert step(s) == [("a", 0, 3, True), ("b", 0, 3, True), ("c", 0, 2, False)]
    assert step(s) == [("a", 3, 1, True), ("b", 3, 1, True)]


def test_logits_jobs_take_no_more_rows_than_outputs() -> None:
    s = scheduler(max_outputs=4)
    add(s, "a", 10, max_tokens=0, logits=True)
    assert [step(s) for _ in range(3)] == [
        [("a", 0, 4, False)],
        [("a", 4, 4, False)],
        [("a", 8, 2, False)],
    ]


def test_parallel_and_pages_limit_admission() -> None:
    s = scheduler(parallel=2, pages=4)
    add(s, "a", 300)
    assert s.reserve(300) is None
    b = add(s, "b", 100)
    assert s.reserve(1) is None
    s.remove(b)
    assert s.reserve(1) is not None


def test_a_sequence_that_is_alone_runs_alone() -> None:
    s = scheduler()
    add(s, "a", 3)
    add(s, "b", 3).alone = True
    assert step(s) == [("b", 0, 3, True)]


def test_history_counts_the_last_n() -> None:
    history = History([1, 2, 2, 3], 3)
    assert dict(zip(*(a.tolist() for a in history.arrays()), strict=True)) == {2: 2, 3: 1}
    history.add(3)
    assert dict(zip(*(a.tolist() for a in history.arrays()), strict=True)) == {2: 1, 3: 2}
    assert len(History([1, 2], 0).arrays()[0]) == 0
    every = History([1, 1, 2], -1)
    every.add(5)
    assert dict(zip(*(a.tolist() for a in every.arrays()), strict=True)) == {1: 2, 2: 1, 5: 1}
