"""A runner without a model: the next token is a function of the tokens before it, kept in pages as a plan
would.

It checks what a plan would check: pages are in range and never shared, positions follow on, limits hold.
Gates let a test hold a step open and decide how it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from apu_engine._native import NO_PAGE, PAGE_TOKENS
from apu_engine.engine.engine import StepCancelled
from apu_engine.engine.job import Done, Job, SamplingParams, TokenEvent
from apu_engine.engine.scheduler import Chunk

VOCABULARY = 97
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Group:
    window: int
    page_count: int


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: a mix of all tokens so far, so that a lost or foreign one changes everything after it."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCABULARY


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    """Stores each token in its page of group 0 and reads the whole sequence back from there."""

    def __init__(
        self,
        groups: Sequence[Group] = (Group(0, 64),),
        max_rows: int = 16,
        max_outputs: int = 4,
        step_seconds: float = 0.0,
    ) -> None:
        self.groups = tuple(groups)
        self.vocabulary = VOCABULARY
        self.max_rows = max_rows
        self.max_outputs = max_outputs
        self.step_seconds = step_seconds
        self.memory = np.full((groups[0].page_count, PAGE_TOKENS), -1, np.int64)
        self.steps: list[list[tuple[str, int, int]]] = []
        self.cancels = 0
        self.before_wait: Callable[[list[Chunk]], None] = lambda chunks: None
        self.entered = threading.Event()
        self._cancelled = threading.Event()
        self._chunks: list[Chunk] = []

    def submit(self, chunks: Sequence[Chunk]) -> None:
        assert sum(chunk.count for chunk in chunks) <= self.max_rows
        assert sum(chunk.outputs for chunk in chunks) <= self.max_outputs
        for group in range(len(self.groups)):
            tables = [chunk.sequence.tables[group].entries for chunk in chunks]
            pages = [int(page) for table in tables for page in table if page != NO_PAGE]
            assert len(pages) == len(set(pages)), "two sequences share a page"
            assert all(page < self.groups[group].page_count for page in pages)
            for chunk, table in zip(chunks, tables, strict=True):
                window = self.groups[group].window or chunk.start + 1
                reach = range(max(chunk.start - window + 1, 0), chunk.start + chunk.count)
                assert NO_PAGE not in {int(table[position // PAGE_TOKENS]) for position in reach}
        self._cancelled.clear()
        self._chunks = list(chunks)
        self.steps.append([(chunk.sequence.job.id, chunk.start, chunk.count) for chunk in chunks])

    def cancel(self) -> None:
        self.cancels += 1
        self._cancelled.set()

    def wait(self) -> list[TokenEvent]:
        self.entered.set()
        self.before_wait(self._chunks)
        if self.step_seconds and self._cancelled.wait(self.step_seconds):
            raise StepCancelled
        if self._cancelled.is_set():
            raise StepCancelled
        events = []
        for chunk in self._chunks:
            sequence = chunk.sequence
            fed = sequence.prompt[chunk.start : chunk.start + chunk.count]
            if not len(fed):
                fed = np.array([sequence.last_token])
            table = sequence.tables[0].entries
            for position, token in enumerate(fed, chunk.start):
                page = int(table[position // PAGE_TOKENS])
                self.memory[page, position % PAGE_TOKENS] = token
                if sequence.job.logits is not None:
                    sequence.job.logits[position] = next_token(self._read(table, position + 1))
            if chunk.sample:
                events.append(TokenEvent(next_token(self._read(table, chunk.start + chunk.count))))
        return events

    def _read(self, table: np.ndarray, count: int) -> list[int]:
        return [int(self.memory[int(table[p // PAGE_TOKENS]), p % PAGE_TOKENS]) for p in range(count)]


class Collector:
    """Makes jobs and keeps what comes back."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.done: list[Done] = []
        self.finished = threading.Event()
        self.on_token: Callable[[int], None] = lambda count: None

    def __call__(self, job: Job, event: TokenEvent | Done) -> None:
        if isinstance(event, Done):
            self.done.append(event)
            self.finished.set()
        else:
            assert not self.done, "a token after Done"
            self.tokens.append(event.token)
            self.on_token(len(self.tokens))

    def wait(self) -> Done:
        assert self.finished.wait(10), "no Done within 10 s"
        assert len(self.done) == 1
        return self.done[0]


def make_job(
    prompt: Sequence[int], max_tokens: int = 5, params: SamplingParams = GREEDY, **fields: object
) -> tuple[Job, Collector]:
    out = Collector()
    fields.setdefault("stop_ids", frozenset())
    job = Job(prompt=list(prompt), params=params, max_tokens=max_tokens, on_event=out, **fields)  # type: ignore[arg-type]
    return job, out


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)
