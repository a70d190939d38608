"""Server-sent events over aiohttp: data lines, comment pings while nothing is said, and the closing [DONE]."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

PING_SECONDS = 10.0  # below the idle limits of common proxies


class EventStream:
    """An open event stream; writing to a client that left raises ConnectionResetError."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._encoder = msgspec.json.Encoder()
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def __aenter__(self) -> EventStream:
        await self._response.prepare(self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self._response.write_eof()

    async def send(self, event: Any) -> None:
        await self._response.write(b"data: " + self._encoder.encode(event) + b"\n\n")

    async def ping(self) -> None:
        await self._response.write(b": waiting\n\n")

    async def done(self) -> None:
        await self._response.write(b"data: [DONE]\n\n")
