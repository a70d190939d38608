"""What the server and the facade hand to the engine, and what comes back.

A Job crosses the boundary twice: once into the engine's queue, then as events through one callback. The
engine knows token ids only: no text, no HTTP. Callbacks run on the engine thread and must not block; a server
wraps them in `loop.call_soon_threadsafe`. Cancelling sets a flag that the engine looks at before every step,
and interrupts the step that is running.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from apu_engine.errors import ApuError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How one token is drawn from the logits; `temperature` 0 takes the most probable one.

    Penalties and bias act on the logits before temperature, then top_k, top_p and min_p cut in this order.
    """

    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95  # 1: all
    min_p: float = 0.05  # 0: all
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens that the three penalties look back over; -1: all, 0: none
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None  # None: drawn by the engine and reported in Done
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(slots=True, frozen=True)
class TokenEvent:
    """One generated token. End-of-generation tokens are not delivered, they end the job."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, frozen=True)
class Timings:
    """Seconds and counts of one job; `prompt_seconds` runs from the first prefill step to the first token."""

    queued_seconds: float
    prompt_seconds: float
    decode_seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    first_token_seconds: float  # from submission to the first token; 0 when none came


@dataclass(slots=True, frozen=True)
class Done:
    """The last event of a job, always delivered exactly once."""

    reason: FinishReason
    timings: Timings
    seed: int
    error: Exception | None = None


def _ignore(job: Job, event: TokenEvent | Done) -> None:
    pass


@dataclass(slots=True, eq=False)
class Job:
    """One sequence to generate. `on_event` gets TokenEvents, then one Done, on the engine thread."""

    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    on_event: Callable[[Job, TokenEvent | Done], None] = _ignore
    id: str = ""
    ignore_eos: bool = False
    logits: NDArray[np.float32] | None = None  # (T, V) filled for every prompt token; max_tokens is then 0
    _cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def mark_cancelled(self) -> None:
        """Only sets the flag; `Engine.cancel` also interrupts what runs and wakes the engine."""
        self._cancel.set()


class QueueFullError(ApuError):
    """As many jobs wait as may wait; try again later."""


class EngineClosedError(ApuError):
    """The engine takes no more jobs: it is shutting down."""


class ContextLengthError(ApuError):
    """A prompt does not fit the context: `prompt_tokens` and `context` are the two numbers.

    `bound`: `prompt_tokens` is what the text's length alone implies; it was not worth encoding.
    """

    def __init__(self, prompt_tokens: int, context: int, room: int = 1, bound: bool = False) -> None:
        super().__init__(prompt_tokens, context, room, bound)
        self.prompt_tokens = prompt_tokens
        self.context = context
        self.room = room
        self.bound = bound

    def __str__(self) -> str:
        least = "at least " if self.bound else ""
        tail = f" and needs room for {self.room} more" if self.room else ""
        return (
            f"the prompt has {least}{self.prompt_tokens} tokens{tail}, but the context holds {self.context}; "
            "shorten it or load the model with a larger ctx"
        )
