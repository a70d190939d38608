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
from apu_engine.text.errors import TemplateError, TextError

log = logging.getLogger("apu_engine.server")

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_TRY_AGAIN = (429, 503)


class ApiError(Exception):
    """An answer other than 200; `param` names the request field that is at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        message = one_line(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.logged = False  # the request has its line in the log

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, close: bool = False) -> web.Response:
        """With `close` the connection ends after it, which a body that nobody read calls for."""
        response = web.Response(
            body=msgspec.json.encode(self.body()), status=self.status, content_type="application/json"
        )
        if self.status in _TRY_AGAIN:
            response.headers["Retry-After"] = "1"
        if self.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if close:
            response.force_close()
        return response


def one_line(text: str) -> str:
    """`text` without line breaks, and with an escape for each byte of a file name that is no UTF-8."""
    return " ".join(text.splitlines()).encode(errors="backslashreplace").decode()


def api_error(error: BaseException) -> ApiError:
    """The answer for what a request ran into; anything unforeseen is logged with its traceback and is a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, MappingError):
        return ApiError(503, str(error), code="model_file_changed")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), error.option or None, "invalid_value")
    if isinstance(error, ModelError):
        return ApiError(400, str(error), code="unsupported_by_model")
    if isinstance(error, TextError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, TemplateError) and error.reason != "worker":
        return ApiError(400, str(error), "messages", "template_error")
    if isinstance(error, ApuError):
        log.error("%s", error)
        return ApiError(500, str(error), code="engine_error")
    log.error("request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
