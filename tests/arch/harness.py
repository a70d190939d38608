"""Runs a plan by hand: maps a file, loads it on a device and feeds chosen rows, without the engine's scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine import arch
from apu_engine._native import NO_PAGE, PAGE_TOKENS, Device
from apu_engine.memory.strategies import Job, open_weights
from apu_engine.plan import LOGITS
from apu_engine.weights.opening import open_model


class Running:
    """A loaded model whose sequence number s owns the pages s, s + parallel, s + 2 parallel, ... of each group."""

    def __init__(self, loaded: arch.LoadedModel, parallel: int) -> None:
        self.loaded = loaded
        self.parallel = parallel
        self.step = loaded.plan.new_step()

    def tables(self, sequence: int, first: int, last: int) -> list[list[int]]:
        """Page tables for rows [first, last); pages behind a window are gone, as the engine frees them."""
        out = []
        for group in self.loaded.groups:
            oldest = max(0, first - group.window + 1) // PAGE_TOKENS if group.window else 0
            count = -(-last // PAGE_TOKENS)
            per_sequence = group.page_count // self.parallel
            pages = [sequence + self.parallel * (p % per_sequence) for p in range(count)]
            out.append([NO_PAGE if p < oldest else page for p, page in enumerate(pages)])
        return out

    def logits(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> NDArray[np.float32]:
        """(T, V) of one step with rows (sequence, position, tokens) each."""
        self.step.clear()
        total = sum(len(tokens) for _, _, tokens in rows)
        out = np.zeros((total, self.loaded.vocabulary), np.float32)
        for sequence, position, tokens in rows:
            tables = self.tables(sequence, position, position + len(tokens))
            first = self.step.add_sequence(tokens, position, tables)
            for row in range(first, first + len(tokens)):
                self.step.add_output(row, LOGITS, logits=out[row])
        self.loaded.plan.run(self.step)
        return out

    def prefill(self, tokens: Sequence[int], chunk: int = 64, sequence: int = 0) -> NDArray[np.float32]:
        """(T, V) in chunks of at most `chunk` rows, from position 0."""
        parts = [self.logits([(sequence, at, tokens[at : at + chunk])]) for at in range(0, len(tokens), chunk)]
        return np.concatenate(parts)

    def same_in_chunks(self, tokens: Sequence[int], chunks: Sequence[int] = (1, 7, 64)) -> None:
        """Asserts that many rows of a step have the bits that they have in fewer."""
        whole = self.prefill(tokens, chunk=len(tokens))
        assert np.isfinite(whole).all()
        for chunk in chunks:
            assert np.array_equal(self.prefill(tokens, chunk=chunk), whole), chunk

    def same_in_turns(self, tokens: Sequence[int], chunk: int = 15) -> None:
        """Asserts that two sequences in the same steps, the other one backwards, have the bits that each has alone."""
        other = tokens[::-1]
        separate = np.stack([self.prefill(tokens), self.prefill(other)])
        for at in range(0, len(tokens), chunk):
            out = self.logits([(0, at, tokens[at : at + chunk]), (1, at, other[at : at + chunk])])
            assert np.array_equal(out.reshape(2, chunk, -1), separate[:, at : at + chunk])


@contextmanager
def running(path: Path, device: Device, *, ctx: int = 512, parallel: int = 1, **options: Any) -> Iterator[Running]:
    """The model at `path` on `device`, closed afterwards."""
    model = open_model(path)
    settings = arch.PlanOptions(ctx=ctx, parallel=parallel, max_outputs=256, **options)
    job = Job(device, model.files, model.file_sizes, arch.tensors_used(model, settings))
    weights = open_weights(job, "direct" if device.props.kind == "cpu" else "staged")
    try:
        loaded = arch.load(model, weights, device, settings)
        try:
            yield Running(loaded, parallel)
        finally:
            loaded.close()
    finally:
        weights.close()
