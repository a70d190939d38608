"""Server-sent events over aiohttp: data lines, comments as pings while nothing is said, and the closing [DONE]."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web


class EventStream:
    """An open event stream; writing to a client that left raises ConnectionResetError."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def __aenter__(self) -> EventStream:
        await self.response.prepare(self._request)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()

    async def send(self, event: Any) -> None:
        await self.response.write(b"data: " + self._encoder.encode(event) + b"\n\n")

    async def ping(self) -> None:
        await self.response.write(b": waiting\n\n")
