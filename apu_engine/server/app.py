"""The HTTP service: loads the model beside the event loop, serves, and ends cleanly.

It listens before the model is loaded, so that /health can tell the stage (503 until ready); a model that cannot be
loaded ends the process. SIGTERM and the first Ctrl-C stop accepting and let running requests end within
`drain_timeout`; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from apu_engine.config import EngineConfig
from apu_engine.doctor import verdict_line
from apu_engine.errors import ConfigError, MappingError
from apu_engine.server import body, schema
from apu_engine.server.errors import ApiError, api_error, one_line
from apu_engine.server.hints import curl_line
from apu_engine.server.openai import SAMPLING_FIELDS, OpenAI, json_response

if TYPE_CHECKING:
    from apu_engine import LLM
    from apu_engine.memory.mapping import Progress

log = logging.getLogger("apu_engine.server")
KEEPALIVE_SECONDS = 75.0  # an idle connection, or one that sends no whole request head, is closed after this
LINGER_SECONDS = 2.0  # for the rest of a body that is not wanted, so that the client reads the answer first
WATCHDOG_SECONDS = 300
CLEANUP_SECONDS = 1.0  # for clients that do not read their answer when the server ends
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """The one model that is served, and what /health says about it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.llm: LLM | None = None
        self.stage = "tokenizer"
        self.progress: Progress | None = None
        self.started = time.time()
        self.url = ""
        self.summary = ""
        self.memory: dict[str, Any] = {}
        self.alias = config.alias or _model_name(config.model or "model")

    def ready(self) -> LLM:
        """The loaded model, or ApiError 503 saying what it waits for."""
        if self.llm is None:
            raise ApiError(503, f"the model is loading ({self.stage}); try again", code="model_loading")
        return self.llm

    def load(self, cancel: threading.Event) -> None:
        """Loads the model; blocking, for a thread of its own. Raises what stands against it."""
        from apu_engine import LLM
        from apu_engine.engine.load import STAGES
        from apu_engine.memory.progress import ProgressPrinter

        with ProgressPrinter() as printer:

            def on_progress(report: Progress) -> None:
                self.progress = report
                printer(report)

            def on_stage(ended: str) -> None:
                self.stage, self.progress = STAGES[min(STAGES.index(ended) + 1, len(STAGES) - 1)], None

            llm = LLM.from_config(self.config, on_stage, on_progress, cancel, for_chat=True)
        self.summary = llm.summary()
        self.memory = llm.memory_report
        self.llm = llm

    @property
    def ready_line(self) -> str:
        return f"{self.summary}; {self.url}"

    # ---- handlers

    async def health(self, _: web.Request) -> web.Response:
        if self.llm is None:
            report: dict[str, Any] = {"status": "loading", "stage": self.stage}
            if (p := self.progress) is not None:
                report["progress"] = {
                    "stage": p.stage,
                    "done_bytes": p.done_bytes,
                    "total_bytes": p.total_bytes,
                    "gib_per_s": p.gib_per_s,
                    "eta_s": p.eta_s,
                }
            return json_response(report, 503)
        status = self.llm.engine.status()
        error: Exception | None = self.llm.engine.failure() if status.error is not None else None
        if error is None:
            try:
                self.llm.check()
            except MappingError as changed:
                error = changed
        if error is not None:
            return json_response({"status": "error", "error": one_line(str(error))}, 503)
        report = {
            "status": "ok" if status.state == "ready" else "shutting down",
            "model": self.alias,
            "ready": self.ready_line,
            "context": self.llm.context,
            "chat": self.llm.has_chat_template,
            "running": status.running,
            "waiting": status.waiting,
            "memory": self.memory,
        }
        return json_response(report, 200 if status.state == "ready" else 503)

    async def tokenize(self, request: web.Request) -> web.Response:
        llm = self.ready()
        asked = await body.read(request, schema.TokenizeRequest, self.config.max_body)
        ids = await asyncio.to_thread(llm.tokenize, asked.content, asked.add_special, asked.parse_special)
        if not asked.with_pieces:
            return json_response({"tokens": ids})
        return json_response({"tokens": [{"id": i, "piece": _piece(llm.token_bytes(i))} for i in ids]})

    async def detokenize(self, request: web.Request) -> web.Response:
        llm = self.ready()
        asked = await body.read(request, schema.DetokenizeRequest, self.config.max_body)
        top = llm.engine.vocabulary - 1
        if (bad := next((t for t in asked.tokens if not 0 <= t <= top), None)) is not None:
            schema.invalid("tokens", f"expected ids from 0 to {top}, found {bad}")
        return json_response({"content": await asyncio.to_thread(llm.detokenize, asked.tokens)})


def _piece(raw: bytes) -> str | list[int]:
    """A token as text, or as its bytes where they are no text by themselves."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _model_name(path: str) -> str:
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", one_line(Path(path).name))


def make_app(service: Service) -> web.Application:
    """The application with all routes; errors of any kind leave it as error objects."""
    app = web.Application(client_max_size=service.config.max_body, middlewares=[_errors, _authorize(service)])
    app.add_routes(OpenAI(service).routes())
    app.router.add_get("/health", service.health, expect_handler=body.expect)
    app.router.add_post("/tokenize", service.tokenize, expect_handler=body.expect)
    app.router.add_post("/detokenize", service.detokenize, expect_handler=body.expect)
    return app


def make_runner(service: Service) -> web.AppRunner:
    """The application behind aiohttp's HTTP protocol; a client's leaving cancels its handler."""
    logging.getLogger("aiohttp.server").addFilter(_not_about_clients)
    return web.AppRunner(
        make_app(service),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_SECONDS,
        lingering_time=LINGER_SECONDS,
        shutdown_timeout=CLEANUP_SECONDS,
    )


def _not_about_clients(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that aiohttp logs for what is not HTTP (a 400 tells whoever sent it) and for clients that
    leave in the middle of their body.
    """
    causes = (HttpProcessingError, web.RequestPayloadError, ConnectionResetError)
    return not (record.exc_info and isinstance(record.exc_info[1], causes))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        raise  # the client left
    except web.HTTPException as http:
        error = ApiError(http.status, f"{request.method} {request.raw_path[:80]}: {http.reason}")
        headers = {"Allow": http.headers["Allow"]} if "Allow" in http.headers else {}
    except Exception as other:
        error, headers = api_error(other), {}
    if not error.logged:
        log.info("%s %s: %d %s", request.method, request.raw_path[:80], error.status, error.message)
    response = error.response(close=request.can_read_body)
    response.headers.update(headers)
    return response


def _authorize(service: Service) -> Any:
    key = service.config.api_key

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key and request.path != "/health":
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
            if scheme.lower() != "bearer" or not right:
                raise ApiError(401, "missing or wrong API key (Authorization: Bearer KEY)", code="invalid_api_key")
        return await handler(request)

    return authorize


def run(config: EngineConfig) -> int:
    """Serves until a signal; returns the exit status. Raises ApuError when it cannot start."""
    if config.watchdog is None:
        config = replace(config, watchdog=WATCHDOG_SECONDS)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    verdict = verdict_line(config)
    log.log(logging.INFO if verdict.startswith("doctor: ok") else logging.WARNING, "%s", verdict)
    return asyncio.run(_serve(Service(config)))


async def _serve(service: Service) -> int:
    config = service.config
    stop = asyncio.Event()
    cancel_load = threading.Event()
    _install_signals(stop, cancel_load)
    runner = make_runner(service)
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
        if not stop.is_set():
            await loading  # raises what stands against the model
            _announce(service)
            await stopping
        return 0
    finally:
        cancel_load.set()
        await asyncio.gather(loading, return_exceptions=True)
        await site.stop()
        if service.llm is not None:
            await asyncio.to_thread(service.llm.engine.close, config.drain_timeout)
        await runner.cleanup()
        if service.llm is not None:
            service.llm.close()


def _announce(service: Service) -> None:
    """The ready line on standard output; notices and defaults in the log."""
    llm, config = service.ready(), service.config
    for notice in llm.runtime.notices:
        log.warning("%s", notice)
    sampling = ", ".join(f"{name} {getattr(llm.sampling, name):g}" for name in SAMPLING_FIELDS)
    log.info("device: %s", llm.runtime.device_line)
    log.info(
        "ctx %d: %s; requests: %d at a time, %d may wait",
        llm.context,
        llm.runtime.context.reason,
        config.parallel,
        config.queue,
    )
    log.info("requests that do not say: %s, max_tokens %s", sampling, config.max_tokens or "up to the end of ctx")
    print(service.ready_line)
    print(curl_line(service.url, llm.has_chat_template, config.api_key), flush=True)


def _install_signals(stop: asyncio.Event, cancel_load: threading.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("shutting down; a second signal ends at once")
        cancel_load.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


def _url(runner: web.AppRunner, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{runner.addresses[0][1]}"
