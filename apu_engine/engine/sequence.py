"""One running job: its tokens, its pages, the counts that penalties need, and its clock.

`position` counts the tokens whose KV is stored. While it is below the prompt's length the sequence is in
prefill; after that each step feeds the token sampled last. Nothing here is undone when a step is cancelled or
fails: pages are append-only and a row run again writes the same values, so the step is simply built again.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from apu_engine.engine.job import Done, FinishReason, Job, Timings
from apu_engine.engine.pages import PageTable


class History:
    """Counts of the tokens that penalties look back over: the last `last_n`, or all when it is -1."""

    __slots__ = ("_counts", "_recent")

    def __init__(self, tokens: SequenceOf[int], last_n: int) -> None:
        self._recent: deque[int] | None = None if last_n < 0 else deque(maxlen=last_n)
        self._counts: dict[int, int] = {}
        for token in tokens if last_n < 0 else tokens[max(len(tokens) - last_n, 0) :]:
            self.add(token)

    def add(self, token: int) -> None:
        recent, counts = self._recent, self._counts
        if recent is not None:
            if recent.maxlen == 0:
                return
            if len(recent) == recent.maxlen:
                oldest = recent[0]
                counts[oldest] -= 1
                if not counts[oldest]:
                    del counts[oldest]
            recent.append(token)
        counts[token] = counts.get(token, 0) + 1

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(distinct tokens, their counts)."""
        n = len(self._counts)
        return (
            np.fromiter(self._counts.keys(), np.int32, n),
            np.fromiter(self._counts.values(), np.int32, n),
        )


class Sequence:
    """A job that was admitted: `tables` hold its pages, `reserved` what the pool promised it per group."""

    __slots__ = (
        "alone",
        "bias",
        "first_token_at",
        "generated",
        "history",
        "job",
        "last_token",
        "position",
        "prompt",
        "reserved",
        "seed",
        "started_at",
        "submitted_at",
        "tables",
    )

    def __init__(self, job: Job, submitted_at: float, tables: tuple[PageTable, ...], reserved: tuple[int, ...]) -> None:
        params = job.params
        self.job = job
        self.prompt: NDArray[np.int32] = np.asarray(job.prompt, np.int32)
        self.tables = tables
        self.reserved = reserved
        self.position = 0
        self.generated = 0
        self.last_token = -1
        self.alone = False  # after a failed step: run it by itself, to learn whose fault it was
        self.seed = params.seed if params.seed is not None else secrets.randbits(32)
        penalised = params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self.history = History(self.prompt.tolist(), params.repeat_last_n) if penalised else None
        n = len(params.logit_bias)
        self.bias = (
            (
                np.fromiter(params.logit_bias.keys(), np.int32, n),
                np.fromiter(params.logit_bias.values(), np.float32, n),
            )
            if n
            else None
        )
        self.submitted_at = submitted_at
        self.started_at = 0.0
        self.first_token_at = 0.0

    @property
    def in_prefill(self) -> bool:
        return self.position < len(self.prompt)

    def accept(self, token: int) -> FinishReason | None:
        """Count a sampled token that is delivered; "length" when it is the last the job asked for."""
        now = time.monotonic()
        if not self.generated:
            self.first_token_at = now
        self.generated += 1
        self.last_token = token
        if self.history is not None:
            self.history.add(token)
        return "length" if self.generated >= self.job.max_tokens else None

    def done(self, reason: FinishReason, error: Exception | None = None) -> Done:
        """The last event, with the job's timings up to now."""
        now = time.monotonic()
        started = self.started_at or now
        first = self.first_token_at
        return Done(
            reason,
            Timings(
                queued_seconds=started - self.submitted_at,
                prompt_seconds=(first or now) - started,
                decode_seconds=now - first if first else 0.0,
                prompt_tokens=len(self.prompt),
                cached_tokens=0,
                generated_tokens=self.generated,
                first_token_seconds=first - self.submitted_at if first else 0.0,
            ),
            self.seed,
            error,
        )
