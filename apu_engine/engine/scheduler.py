"""What runs next: one step's rows, chosen from all admitted sequences.

A step holds the decode row of every sequence that is past its prompt, then prompt chunks in order of
admission, up to `max_rows` rows and `max_outputs` output rows. While anything decodes, prompts get at most
`SHARED_PREFILL_ROWS` rows a step, so that a long prompt delays running answers by a small chunk and not by a
full one. Sequences are never moved or evicted: their pages were reserved when they were admitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from apu_engine.engine.pages import PagePool
from apu_engine.engine.sequence import Sequence

SHARED_PREFILL_ROWS = 128


@dataclass(slots=True)
class Chunk:
    """Rows of one sequence in a step: tokens at [start, start + count).

    `sample`: the last row is an output that draws a token. A chunk of a logits job has every row as an
    output.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool

    @property
    def outputs(self) -> int:
        return self.count if self.sequence.job.logits is not None else int(self.sample)


class Scheduler:
    """Admitted sequences and the pages they share."""

    def __init__(self, pool: PagePool, parallel: int, max_rows: int, max_outputs: int) -> None:
        self.pool = pool
        self.parallel = parallel
        self.max_rows = max_rows
        self.max_outputs = max_outputs
        self.running: list[Sequence] = []

    def reserve(self, tokens: int) -> tuple[int, ...] | None:
        """Pages for one more sequence of up to `tokens` tokens, or None when it has to wait."""
        if len(self.running) >= self.parallel:
            return None
        return self.pool.reserve(tokens, self.max_rows)

    def add(self, sequence: Sequence) -> None:
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its pages."""
        self.running.remove(sequence)
        for table in sequence.tables:
            table.release()
        self.pool.unreserve(sequence.reserved)

    def next_step(self) -> list[Chunk]:
        """The chunks of the next step, their pages in place; empty when nothing runs."""
        alone = next((s for s in self.running if s.alone), None)
        running = self.running if alone is None else [alone]
        chunks: list[Chunk] = []
        rows, outputs = self.max_rows, self.max_outputs
        for sequence in running:
            if not sequence.in_prefill and rows and outputs:
                chunks.append(Chunk(sequence, sequence.position, 1, True))
                rows, outputs = rows - 1, outputs - 1
        if chunks:
            rows = min(rows, SHARED_PREFILL_ROWS)
        for sequence in running:
            if not sequence.in_prefill or not rows:
                continue
            left = len(sequence.prompt) - sequence.position
            count = min(left, rows)
            if sequence.job.logits is not None:
                count = min(count, outputs)
            elif count == left and not outputs:
                count -= 1  # the last row needs an output; it comes with the next step
            if count:
                chunk = Chunk(sequence, sequence.position, count, count == left and sequence.job.max_tokens > 0)
                chunks.append(chunk)
                rows, outputs = rows - count, outputs - chunk.outputs
        for chunk in chunks:
            for table in chunk.sequence.tables:
                table.cover(chunk.start, chunk.start + chunk.count)
        return chunks
