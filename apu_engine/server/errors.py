"""Errors as OpenAI's error objects: {"error": {"message", "type", "param", "code"}} with the HTTP status that fits.

`api_error` is the one place where an exception of the engine becomes an answer.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from apu_engine.engine.job import ContextLengthError, EngineClosedError, QueueFullError
from apu_engine.errors import ApuError, ConfigError, MappingError, ModelError

log = logging.getLogger("apu_engine.server")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than 200; `param` names the request field that is at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return web.Response(
            body=msgspec.json.encode(self.body()),
            status=self.status,
            headers=headers,
            content_type="application/json",
        )


def api_error(error: BaseException) -> ApiError:
    """The answer for what a request ran into; anything unforeseen is logged with its traceback and is a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, MappingError):
        return ApiError(503, str(error), code="model_file_changed")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), error.option or None, "invalid_value")
    if isinstance(error, ModelError):
        return ApiError(400, str(error), code="unsupported_by_model")
    if isinstance(error, ApuError):
        log.error("%s", error)
        return ApiError(500, str(error), code="engine_error")
    log.error("request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
