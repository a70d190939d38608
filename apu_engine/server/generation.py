"""One request's generation on the event loop: token events from the engine thread become text that is safe to send.

Two crossings: `Engine.submit` in, one `call_soon_threadsafe` per event out. Leaving the iteration early, by an error
or because the client is gone, cancels the job at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apu_engine.engine.job import Done, Job, SamplingParams, TokenEvent
from apu_engine.server.errors import ApiError
from apu_engine.server.sse import PING_SECONDS

if TYPE_CHECKING:
    from apu_engine import LLM


@dataclass(slots=True, frozen=True)
class Piece:
    """Text that became safe to send, possibly empty, and the token that brought it; None when flushed or idle."""

    text: str
    token: TokenEvent | None
    idle: bool = False  # nothing happened for PING_SECONDS


class Generation:
    """Iterate over `pieces()`; afterwards `finish_reason` and `done` hold how it ended."""

    def __init__(
        self,
        llm: LLM,
        prompt: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        stop: list[str],
        request_id: str,
        ignore_eos: bool = False,
    ) -> None:
        self._llm = llm
        self._queue: asyncio.Queue[TokenEvent | Done] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._stream = llm.text_stream(stop)
        self.job = Job(
            prompt=prompt,
            params=params,
            max_tokens=max_tokens,
            stop_ids=llm.stop_ids,
            on_event=self._on_event,
            id=request_id,
            ignore_eos=ignore_eos,
        )
        self.started = time.monotonic()
        self.finish_reason = ""
        self.done: Done | None = None

    def _on_event(self, _: Job, event: TokenEvent | Done) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Raises what the engine reports; QueueFullError and the like before the first piece."""
        self._llm.engine.submit(self.job)
        try:
            async for event in self._events():
                if event is None:
                    yield Piece("", None, idle=True)
                elif isinstance(event, Done):
                    yield self._end(event)
                    return
                else:
                    text = self._stream.push(event.token)
                    yield Piece(text, event)
                    if self._stream.finished:
                        self._llm.engine.cancel(self.job)
                        await self._drain()
                        self.finish_reason = "stop"
                        return
        finally:
            if self.done is None:
                self._llm.engine.cancel(self.job)

    async def _events(self) -> AsyncIterator[TokenEvent | Done | None]:
        while True:
            try:
                yield await asyncio.wait_for(self._queue.get(), PING_SECONDS)
            except asyncio.TimeoutError:
                yield None

    def _end(self, done: Done) -> Piece:
        self.done = done
        if done.error is not None:
            raise done.error
        if done.reason == "cancelled":
            raise ApiError(503, "the server is shutting down; the request was not finished", code="shutting_down")
        self.finish_reason = done.reason
        return Piece(self._stream.flush(), None)

    async def _drain(self) -> None:
        while not isinstance(event := await self._queue.get(), Done):
            pass
        self.done = event

    def usage(self) -> dict[str, Any]:
        timings = self._done().timings
        return {
            "prompt_tokens": timings.prompt_tokens,
            "completion_tokens": timings.generated_tokens,
            "total_tokens": timings.prompt_tokens + timings.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
        }

    def timings(self) -> dict[str, float]:
        """Milliseconds and rates, named as llama.cpp's server names them."""
        timings = self._done().timings
        read = timings.prompt_tokens - timings.cached_tokens
        return {
            "cache_n": timings.cached_tokens,
            "prompt_n": read,
            "prompt_ms": round(timings.prompt_seconds * 1e3, 3),
            "prompt_per_second": _rate(read, timings.prompt_seconds),
            "predicted_n": timings.generated_tokens,
            "predicted_ms": round(timings.decode_seconds * 1e3, 3),
            "predicted_per_second": _rate(max(timings.generated_tokens - 1, 0), timings.decode_seconds),
        }

    def log_line(self) -> str:
        """The end of the request's log line; what is not known yet is left out."""
        if self.done is None:
            return f"{len(self.job.prompt)} prompt, cancelled after {time.monotonic() - self.started:.2f} s"
        t = self.done.timings
        rate = _rate(max(t.generated_tokens - 1, 0), t.decode_seconds)
        return (
            f"{t.prompt_tokens} prompt, {t.cached_tokens} cached, {t.generated_tokens} generated, "
            f"{rate:.1f} tok/s, first token {t.first_token_seconds:.3f} s, {self.finish_reason or self.done.reason}"
        )

    def _done(self) -> Done:
        assert self.done is not None, "the generation has not ended"
        return self.done


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
