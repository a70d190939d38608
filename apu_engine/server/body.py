"""Request bodies: what is read at all, within which limits, and when `100 Continue` is sent.

A body is read only once nothing else stands against the request, so a client that sent `Expect: 100-continue` gets
its 401, 413, 415 or 503 before it sends anything. Only application/json is taken: web pages can send other types to
a server on this machine without being asked.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError

from apu_engine.server import schema
from apu_engine.server.errors import ApiError

BODY_SECONDS = 60.0  # for the whole body
T = TypeVar("T", bound=msgspec.Struct)


async def expect(request: web.Request) -> web.StreamResponse | None:
    """The expect handler of every route; it does not send `100 Continue`, `read` does."""
    if request.version < HttpVersion11 or request.headers.get("Expect", "").lower() == "100-continue":
        return None
    error = ApiError(417, f"Expect: expected 100-continue, found {request.headers['Expect'][:80]!r}")
    return error.response(close=True)


async def read(request: web.Request, kind: type[T], limit: int) -> T:
    """The checked request in a body of at most `limit` bytes, unpacked. Raises ApiError."""
    _check_type(request)
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if "Expect" in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    try:
        body = await asyncio.wait_for(request.read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="body_timeout") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(400, f"the body could not be read: {error}", code="invalid_body") from None
    return schema.decode(body, kind)


def _check_type(request: web.Request) -> None:
    found = request.headers.get("Content-Type", "none")[:80]
    kind, charset = request.content_type, request.charset
    if not (kind == "application/json" or kind.endswith("+json")) or (charset or "utf-8").lower() != "utf-8":
        message = f"Content-Type: expected application/json in UTF-8, found {found} (curl: -H 'Content-Type: {_JSON}')"
        raise ApiError(415, message, code="unsupported_media_type")


_JSON = "application/json"


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; --max-body sets the limit", code="body_too_large")
