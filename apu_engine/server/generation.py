"""One request's generation on the event loop: token events from the engine thread become text that is safe to send.

Two crossings: `Engine.submit` in, and out a deque with at most one wake-up of the loop under way: the pipe that wakes
a busy loop must not fill up, because signals come through it too. Streamed and plain answers consume the same
`pieces()`. Leaving the iteration early, by an error or because the client is gone, cancels the job at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apu_engine.engine.job import Done, Job, TokenEvent
from apu_engine.server.errors import ApiError, api_error

if TYPE_CHECKING:
    from apu_engine.engine.engine import Engine
    from apu_engine.text.stream import TextStream

PING_SECONDS = 10.0  # below the idle limits of common proxies and clients


@dataclass(slots=True, frozen=True)
class Piece:
    """Text that became safe to send, and the tokens that brought it: all tokens since the piece before."""

    text: str
    tokens: list[TokenEvent]
    reasoning: str = ""


class Generation:
    """Iterate over `pieces()`; afterwards `finish_reason`, `usage()` and `timings()` tell how it went.

    `job.on_event` is set here.
    """

    def __init__(self, engine: Engine, job: Job, stream: TextStream) -> None:
        self._engine = engine
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._events: deque[TokenEvent | Done] = deque()
        self._news = asyncio.Event()
        self._notified = False
        self._ping_at = 0.0
        self._started = time.monotonic()
        self._first_seconds = 0.0
        self._error: ApiError | None = None
        self.job = job
        self.finish_reason = ""
        self.generated = 0
        self.done: Done | None = None
        job.on_event = self._on_event

    def _on_event(self, _: Job, event: TokenEvent | Done) -> None:
        self._events.append(event)
        if not self._notified:
            self._notified = True
            self._loop.call_soon_threadsafe(self._notice)

    def _notice(self) -> None:
        self._notified = False
        self._news.set()

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """Pieces as they come, the last one possibly empty; None when there was nothing for PING_SECONDS.

        Raises what `Engine.submit` or the engine thread reports, as ApiError.
        """
        held: list[TokenEvent] = []  # tokens whose text is not safe to send yet
        self._quiet_from_now()
        try:
            self._engine.submit(self.job)
            while True:
                event = await self._next()
                if isinstance(event, Done):
                    text = self._end(event)
                    yield Piece(text, held, self._stream.reasoning)
                    return
                text = reasoning = ""
                if event is not None:
                    self.generated += 1
                    self._first_seconds = self._first_seconds or time.monotonic() - self._started
                    text, reasoning = self._stream.push(event.token), self._stream.reasoning
                    held.append(event)
                if self._stream.finished:
                    await self._stop()
                    yield Piece(text, held, reasoning)
                    return
                if text or reasoning:
                    yield Piece(text, held, reasoning)
                    held = []
                    self._quiet_from_now()
                elif self._loop.time() >= self._ping_at:
                    yield None
                    self._quiet_from_now()
        except Exception as error:
            self._error = api_error(error)
            raise self._error from error
        finally:
            if self.done is None:
                self._engine.cancel(self.job)

    def _quiet_from_now(self) -> None:
        self._ping_at = self._loop.time() + PING_SECONDS

    async def _next(self) -> TokenEvent | Done | None:
        """The next event; None when it is time for a sign of life."""
        if not self._events:
            self._news.clear()
            timer = self._loop.call_at(self._ping_at, self._news.set)
            try:
                await self._news.wait()
            finally:
                timer.cancel()
        return self._events.popleft() if self._events else None

    def _end(self, done: Done) -> str:
        self.done = done
        if done.error is not None:
            raise done.error
        if done.reason == "cancelled":
            raise ApiError(503, "the server shuts down; this request was not finished", code="shutting_down")
        self.finish_reason = done.reason
        return self._stream.flush()

    async def _stop(self) -> None:
        """A stop string is complete: what the engine may still deliver is beyond the answer's end."""
        self.finish_reason = "stop"
        self._engine.cancel(self.job)
        self._ping_at = math.inf
        event: TokenEvent | Done | None = None
        while not isinstance(event, Done):
            event = await self._next()
        self.done = event

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompt and of the answer; the token that ends an answer by itself is not counted."""
        timings = self._ended().timings
        return {
            "prompt_tokens": timings.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": timings.prompt_tokens + self.generated,
            "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._stream.reasoning_tokens},
        }

    def timings(self) -> dict[str, float]:
        """Milliseconds and rates, named as llama.cpp's server names them; the first token belongs to the prompt."""
        timings = self._ended().timings
        read = timings.prompt_tokens - timings.cached_tokens
        decoded = max(timings.generated_tokens - 1, 0)
        return {
            "cache_n": timings.cached_tokens,
            "prompt_n": read,
            "prompt_ms": round(timings.prompt_seconds * 1e3, 3),
            "prompt_per_token_ms": _ratio(timings.prompt_seconds * 1e3, read),
            "prompt_per_second": _ratio(read, timings.prompt_seconds),
            "predicted_n": self.generated,
            "predicted_ms": round(timings.decode_seconds * 1e3, 3),
            "predicted_per_token_ms": _ratio(timings.decode_seconds * 1e3, decoded),
            "predicted_per_second": _ratio(decoded, timings.decode_seconds),
        }

    def log_line(self) -> str:
        """What happened, for the request's one log line."""
        now = time.monotonic() - self._started
        cached, rate = 0, _ratio(max(self.generated - 1, 0), now - self._first_seconds)
        if self.done is not None:
            t = self.done.timings
            cached, rate = t.cached_tokens, _ratio(max(t.generated_tokens - 1, 0), t.decode_seconds)
        how = self.finish_reason or (self._error.message if self._error else f"client left after {now:.2f} s")
        first = f"first token {self._first_seconds:.3f} s" if self._first_seconds else "no token"
        return (
            f"{len(self.job.prompt)} prompt, {cached} cached, {self.generated} generated, "
            f"{rate:.1f} tok/s, {first}, {how}"
        )

    def _ended(self) -> Done:
        assert self.done is not None, "the generation has not ended"
        return self.done


def _ratio(amount: float, per: float) -> float:
    return round(amount / per, 3) if per > 0 else 0.0
