"""Loading, a model file that changes, shutdown, and what an idle server costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil
import pytest
from server_fakes import CHAT, FakeLLM, eventually, http_request, serving

import apu_engine
from apu_engine.config import EngineConfig
from apu_engine.engine.load import LoadCancelled
from apu_engine.errors import ConfigError, FormatError, MappingError
from apu_engine.memory.mapping import Progress
from apu_engine.server import app

PATH = "/v1/chat/completions"


class Loader:
    """Stands in for the LLM class: `from_config` waits for `release` between its stages."""

    def __init__(self, llm: FakeLLM, error: Exception | None = None) -> None:
        self.llm, self.error = llm, error
        self.release = threading.Event()
        self.reading = threading.Event()
        self.config: EngineConfig | None = None

    def from_config(
        self,
        config: EngineConfig,
        on_stage: Callable[[str], None],
        on_progress: Callable[[Progress], None],
        cancel: threading.Event,
        for_chat: bool,
    ) -> FakeLLM:
        self.config = config
        for stage in ("tokenizer", "pool", "map"):
            on_stage(stage)
        on_progress(Progress("readahead", 1 << 30, 4 << 30, 2.5, 1.2))
        self.reading.set()
        while not self.release.wait(0.002):
            if cancel.is_set():
                raise LoadCancelled("loading was cancelled")
        if self.error is not None:
            raise self.error
        on_stage("load")
        on_stage("ready")
        return self.llm


class Running:
    """`_serve` as a task of this loop; signals go to this process."""

    def __init__(self, service: app.Service, loader: Loader, task: asyncio.Task[int], http: aiohttp.ClientSession):
        self.service, self.loader, self.task, self.http = service, loader, task, http
        self.llm = loader.llm

    async def get(self, path: str) -> tuple[int, Any, Any]:
        async with self.http.get(self.service.url + path) as answer:
            return answer.status, answer.headers, await answer.json()

    async def ready(self) -> None:
        self.loader.release.set()
        await eventually(lambda: self.service.llm is not None)

    def post(self, **fields: Any) -> asyncio.Task[tuple[int, str]]:
        async def send() -> tuple[int, str]:
            async with self.http.post(self.service.url + PATH, json={**CHAT, **fields}) as answer:
                return answer.status, await answer.text()

        return asyncio.create_task(send())


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, **options: Any
) -> AsyncIterator[Running]:
    loader = Loader(FakeLLM(), error)
    monkeypatch.setattr(apu_engine, "LLM", loader, raising=False)
    service = app.Service(EngineConfig(model="fake.gguf", port=0, **options))
    task = asyncio.create_task(app._serve(service))
    try:
        await eventually(lambda: bool(service.url) or task.done())
        async with aiohttp.ClientSession() as http:
            yield Running(service, loader, task, http)
    finally:
        loader.release.set()
        loader.llm.runner.gate.set()
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.gather(task, return_exceptions=True)


async def test_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(monkeypatch) as server:
        await eventually(server.loader.reading.is_set)
        status, _, health = await server.get("/health")
        assert status == 503
        assert health == {
            "status": "loading",
            "stage": "load",
            "progress": {
                "stage": "readahead",
                "done_bytes": 1 << 30,
                "total_bytes": 4 << 30,
                "gib_per_s": 2.5,
                "eta_s": 1.2,
            },
        }
        async with server.http.post(server.service.url + PATH, json=CHAT) as answer:
            assert answer.status == 503 and answer.headers["Retry-After"] == "1"
            error = (await answer.json())["error"]
        assert error["code"] == "model_loading" and error["type"] == "service_unavailable_error"
        status, _, models = await server.get("/v1/models")
        assert status == 200 and models["data"][0]["id"] == "fake"
        await server.ready()
        status, _, health = await server.get("/health")
        assert status == 200 and health["status"] == "ok"
        assert (health["model"], health["context"], health["running"]) == ("fake", 256, 0)
        assert health["memory"] == server.llm.memory_report
        assert health["ready"] == f"{server.llm.summary()}; {server.service.url}"
        assert (await server.post())[0] == 200
    assert server.service.ready_line in capsys.readouterr().out


async def test_a_model_that_cannot_be_loaded_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, FormatError("m.gguf", "version", "expected 2 or 3, found 9")) as server:
        server.loader.release.set()
        with pytest.raises(FormatError, match="found 9"):
            await server.task
        with pytest.raises(aiohttp.ClientConnectionError):
            await server.get("/health")


async def test_signal_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch) as server:
        await eventually(server.loader.reading.is_set)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(server.task, 2) == 0


async def test_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        config = EngineConfig(model="fake.gguf", port=served.port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{served.port}"):
            await app._serve(app.Service(config))


@pytest.mark.parametrize("streaming", [False, True])
async def test_shutdown_lets_requests_end(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    async with running(monkeypatch) as server:
        await server.ready()
        server.llm.runner.step_seconds = 0.01
        first, second = server.post(stream=streaming), server.post(stream=streaming)
        await eventually(lambda: server.llm.engine.status().waiting == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        for status, text in (await first, await second):
            assert status == 200 and '"finish_reason":"stop"' in text
            assert text.endswith("data: [DONE]\n\n") or not streaming
        assert await asyncio.wait_for(server.task, 5) == 0
        assert server.llm.closed


async def test_shutdown_refuses_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections are refused; an open one gets 503."""
    async with running(monkeypatch) as server:
        await server.ready()
        await server.get("/health")  # leaves an idle connection in the pool
        server.llm.runner.gate.clear()
        first = asyncio.create_task(asyncio.open_connection("127.0.0.1", int(server.service.url.rsplit(":", 1)[1])))
        reader, writer = await first
        body = json.dumps(CHAT).encode()
        writer.write(http_request(PATH, body))
        await eventually(lambda: server.llm.engine.status().running == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: server.llm.engine.status().state == "draining")
        status, _, health = await server.get("/health")
        assert (status, health["status"]) == (503, "shutting down")
        status, text = await server.post()
        assert status == 503 and json.loads(text)["error"]["code"] == "engine_closed"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", int(server.service.url.rsplit(":", 1)[1]))
        server.llm.runner.gate.set()
        assert b"Hello, world." in await reader.read()
        assert await asyncio.wait_for(server.task, 5) == 0
        writer.close()


@pytest.mark.parametrize("streaming", [False, True])
async def test_shutdown_deadline(monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    """What does not end within drain_timeout ends with an error: an event in a stream, else 503."""
    async with running(monkeypatch, drain_timeout=0.1) as server:
        await server.ready()
        server.llm.runner.step_seconds = 0.02
        answer = server.post(stream=streaming, ignore_eos=True)
        await eventually(server.llm.runner.entered.is_set)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        status, text = await asyncio.wait_for(answer, 2)
        if streaming:
            events = text.split("\n\n")
            assert status == 200 and events[-2] == "data: [DONE]"
            assert json.loads(events[-3][6:])["error"]["code"] == "shutting_down"
        else:
            assert status == 503 and json.loads(text)["error"]["code"] == "shutting_down"
        assert await asyncio.wait_for(server.task, 3) == 0


async def test_shutdown_with_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, drain_timeout=0.1) as server:
        server.loader.llm = FakeLLM(context=8192)
        await server.ready()
        monkeypatch.setattr(app, "CLEANUP_SECONDS", 0.1)
        body = {**CHAT, "stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        answer = await server.http.post(server.service.url + PATH, json=body)
        await eventually(lambda: server.loader.llm.engine.status().running == 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(server.task, 5) == 0
        answer.close()


async def test_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    async with running(monkeypatch) as server:
        await server.ready()
        server.llm.runner.gate.clear()
        answer = server.post()
        await eventually(lambda: server.llm.engine.status().running == 1)
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: server.llm.engine.status().state == "draining")
        assert not ended
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: bool(ended))
        server.llm.runner.gate.set()
        await answer
        assert await server.task == 0
    assert ended == [130]


@pytest.mark.parametrize("streaming", [False, True])
async def test_model_file_changed_before_a_request(streaming: bool) -> None:
    async with serving() as served:
        served.llm.changed = MappingError("/models/m.gguf", "was truncated from 9 to 3 bytes while it was mapped")
        async with served.http.get(served.url + "/health") as answer:
            assert answer.status == 503 and "/models/m.gguf: was truncated" in (await answer.json())["error"]
        for _ in range(2):  # the first one finds it, the second one finds the engine failed
            status, error = await served.refused(PATH, {**CHAT, "stream": streaming})
            assert (status, error["code"]) == (503, "model_file_changed")
            assert error["message"].startswith("/models/m.gguf: was truncated")
        served.llm.changed = None
        async with served.http.get(served.url + "/health") as answer:
            assert answer.status == 503 and "/models/m.gguf" in (await answer.json())["error"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_model_file_changed_during_a_request(streaming: bool) -> None:
    async with serving() as served:
        left = 5

        def fail() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise MappingError("/models/m.gguf", "was truncated")

        served.llm.runner.fail = fail
        async with served.http.post(served.url + PATH, json={**CHAT, "stream": streaming}) as answer:
            text = await answer.text()
            assert answer.status == (200 if streaming else 503)
        error = json.loads(text.split("\n\n")[-3][6:] if streaming else text)["error"]
        assert (error["code"], error["message"]) == ("model_file_changed", "/models/m.gguf: was truncated")


async def test_idle_costs_no_cpu() -> None:
    """A served model, an idle connection, and a request before: 20 ms per second at most for loop and engine."""
    async with serving() as served:
        await served.post(PATH, CHAT)
        await asyncio.sleep(0.1)
        process = psutil.Process()
        before, switches = process.cpu_times(), process.num_ctx_switches()
        await asyncio.sleep(1)
        after, now = process.cpu_times(), process.num_ctx_switches()
        assert after.user + after.system - before.user - before.system <= 0.02
        assert now.voluntary - switches.voluntary < 20
