"""The HTTP service: loads the model beside the event loop, serves, and ends cleanly.

It listens before the model is loaded, so that /health can tell the stage (503 until ready). SIGTERM and the first
Ctrl-C stop accepting and let running requests end within `drain_timeout`; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from apu_engine.config import EngineConfig
from apu_engine.errors import ApuError, ConfigError
from apu_engine.server import schema
from apu_engine.server.errors import ApiError, api_error
from apu_engine.server.openai import OpenAI

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from apu_engine import LLM
    from apu_engine.memory.mapping import Progress

log = logging.getLogger("apu_engine.server")


class Service:
    """The one model that is served, and what /health says about it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.llm: LLM | None = None
        self.stage = "starting"
        self.progress: Progress | None = None
        self.error: Exception | None = None
        self.started = time.time()
        self.url = ""
        self.alias = config.alias or (Path(config.model).stem if config.model else "model")

    def ready(self) -> LLM:
        """The loaded model, or ApiError 503 saying why there is none."""
        if self.error is not None:
            raise api_error(self.error)
        if self.llm is None:
            raise ApiError(503, f"the model is loading ({self.stage}); try again", code="model_loading")
        return self.llm

    def load(self, cancel: threading.Event) -> None:
        """Loads the model; blocking, for a thread of its own."""
        from apu_engine import LLM
        from apu_engine.memory.progress import ProgressPrinter

        with ProgressPrinter() as printer:

            def on_progress(report: Progress) -> None:
                self.progress = report
                printer(report)

            def on_stage(stage: str) -> None:
                self.stage = stage

            self.llm = LLM.from_config(self.config, on_stage=on_stage, on_progress=on_progress, cancel=cancel)

    def ready_line(self) -> str:
        return f"{self.llm.summary()}; {self.url}" if self.llm is not None else ""

    # ---- handlers

    async def health(self, _: web.Request) -> web.Response:
        if self.llm is not None and self.error is None:
            status = self.llm.engine.status()
            if status.error is None:
                body: dict[str, Any] = {"status": "ok", "model": self.alias, "ready": self.ready_line()}
                body |= {
                    "running": status.running,
                    "waiting": status.waiting,
                    "chat": self.llm.has_chat_template,
                }
                return _json(body)
            return _json({"status": "error", "error": str(self.llm.engine.failure())}, 503)
        if self.error is not None:
            return _json({"status": "error", "error": str(self.error)}, 503)
        body = {"status": "loading", "stage": self.stage}
        if (p := self.progress) is not None:
            body["progress"] = {
                "stage": p.stage,
                "done_bytes": p.done_bytes,
                "total_bytes": p.total_bytes,
                "gib_per_s": p.gib_per_s,
                "eta_s": p.eta_s,
            }
        return _json(body, 503)

    async def tokenize(self, request: web.Request) -> web.Response:
        llm = self.ready()
        body = schema.decode(await request.read(), schema.TokenizeRequest)
        ids = await asyncio.to_thread(
            llm.tokenize, body.content, add_special=body.add_special, parse_special=body.parse_special
        )
        if not body.with_pieces:
            return _json({"tokens": ids})
        pieces = [{"id": i, "piece": llm.token_bytes(i).decode("utf-8", "replace")} for i in ids]
        return _json({"tokens": pieces})

    async def detokenize(self, request: web.Request) -> web.Response:
        llm = self.ready()
        body = schema.decode(await request.read(), schema.DetokenizeRequest)
        bad = next((t for t in body.tokens if not 0 <= t < llm.engine.vocabulary), None)
        if bad is not None:
            limit = llm.engine.vocabulary - 1
            raise ApiError(400, f"tokens: expected ids from 0 to {limit}, found {bad}", "tokens", "invalid_value")
        return _json({"content": await asyncio.to_thread(llm.detokenize, body.tokens)})


def make_app(service: Service) -> web.Application:
    """The application with all routes; errors of any kind leave it as error objects."""
    app = web.Application(client_max_size=service.config.max_body, middlewares=[_errors, _authorize(service)])
    app.add_routes(OpenAI(service).routes())
    app.router.add_get("/health", service.health)
    app.router.add_post("/tokenize", service.tokenize)
    app.router.add_post("/detokenize", service.detokenize)
    return app


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionResetError):
        raise  # the client left
    except web.HTTPRequestEntityTooLarge:
        limit = request.app._client_max_size
        return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large").response()
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        answer = ApiError(error.status, message, code="not_found" if error.status == 404 else None).response()
        if allow := error.headers.get("Allow"):
            answer.headers["Allow"] = allow
        return answer
    except Exception as error:
        return api_error(error).response()


def _authorize(service: Service) -> Any:
    key = service.config.api_key

    @web.middleware
    async def authorize(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if key and request.path != "/health":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(401, "missing or wrong API key (Authorization: Bearer KEY)", code="invalid_api_key")
        return await handler(request)

    return authorize


def run(config: EngineConfig) -> int:
    """Serves until a signal; returns the exit status. Raises ApuError when it cannot start."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    if config.model is None:
        raise ConfigError("serve needs a model: -m FILE", "model")
    return asyncio.run(_serve(Service(config)))


async def _serve(service: Service) -> int:
    config = service.config
    stop = asyncio.Event()
    cancel_load = threading.Event()
    _install_signals(stop, cancel_load)
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=config.drain_timeout
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror}", "port") from error
    service.url = _url(runner, config.host)
    loading = asyncio.create_task(asyncio.to_thread(service.load, cancel_load))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading  # raises what failed
            print(service.ready_line(), flush=True)
            await stop.wait()
        return 0
    finally:
        cancel_load.set()
        await asyncio.gather(loading, return_exceptions=True)
        await site.stop()
        if service.llm is not None:
            await asyncio.to_thread(service.llm.engine.drain, config.drain_timeout)
            await asyncio.to_thread(service.llm.engine.close)
        await runner.cleanup()
        if service.llm is not None:
            service.llm.close()


def _install_signals(stop: asyncio.Event, cancel_load: threading.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        log.info("shutting down; a second signal ends at once")
        cancel_load.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def _url(runner: web.AppRunner, host: str) -> str:
    address = runner.addresses[0]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{address[1]}"


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


__all__ = ["ApuError", "Service", "make_app", "run"]
