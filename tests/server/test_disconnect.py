"""A client that leaves is cancelled at once, wherever its request is; one that waits gets pings."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import aiohttp
import pytest
from server_fakes import CHAT, FakeLLM, Served, eventually, http_request, serving

from apu_engine.server import generation

PATH = "/v1/chat/completions"
both = pytest.mark.parametrize("streaming", [False, True])


class Client:
    """A raw connection with one request under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def send(cls, served: Served, streaming: bool, **fields: Any) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", served.port))
        body = json.dumps({**CHAT, "stream": streaming, **fields}).encode()
        client.writer.write(http_request(PATH, body))
        await client.writer.drain()
        return client

    def leave(self) -> None:
        """A reset, as when a process is killed."""
        self.writer.transport.abort()


async def gone(served: Served) -> None:
    """The slot is free within a fraction of a second, and serves the next client."""
    await eventually(lambda: served.llm.engine.status().running == 0, 1)
    served.llm.runner.gate.set()
    status, answer = await served.post(PATH, CHAT)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello, world."


@both
async def test_in_prefill(served: Served, streaming: bool) -> None:
    served.llm.runner.gate.clear()
    client = await Client.send(served, streaming)
    await eventually(served.llm.runner.entered.is_set)
    client.leave()
    await gone(served)


@both
async def test_in_decode(served: Served, streaming: bool) -> None:
    served.llm.runner.step_seconds = 0.005
    client = await Client.send(served, streaming, ignore_eos=True)
    if streaming:
        await client.reader.readuntil(b'"content":"l"')
    else:
        await eventually(served.llm.runner.entered.is_set)
        await asyncio.sleep(0.03)
    client.leave()
    await gone(served)


@both
async def test_orderly_close_in_decode(served: Served, streaming: bool) -> None:
    served.llm.runner.step_seconds = 0.005
    client = await Client.send(served, streaming, ignore_eos=True)
    await eventually(served.llm.runner.entered.is_set)
    client.writer.close()
    await gone(served)


@both
async def test_in_the_queue(served: Served, streaming: bool) -> None:
    served.llm.runner.gate.clear()
    first = await Client.send(served, False)
    await eventually(lambda: served.llm.engine.status().running == 1)
    second = await Client.send(served, streaming)
    await eventually(lambda: served.llm.engine.status().waiting == 1)
    second.leave()
    await eventually(lambda: served.llm.engine._waiting[0][0].cancelled, 1)
    served.llm.runner.gate.set()
    assert b"Hello, world." in await first.reader.readuntil(b"}}")
    await served.idle()
    assert served.llm.runner.entered.is_set()
    first.leave()


@both
async def test_while_the_template_is_rendered(served: Served, streaming: bool) -> None:
    entered, release = threading.Event(), threading.Event()
    submitted = []
    submit = served.llm.engine.submit
    served.llm.engine.submit = lambda job: (submitted.append(job), submit(job))[1]  # type: ignore[method-assign]

    def render() -> None:
        entered.set()
        release.wait(5)

    served.llm.render = render
    client = await Client.send(served, streaming)
    await eventually(entered.is_set)
    client.leave()
    await asyncio.sleep(0.05)
    release.set()
    await asyncio.sleep(0.05)
    assert not submitted
    served.llm.render = lambda: None
    await gone(served)


async def test_in_the_body(served: Served) -> None:
    client = Client(*await asyncio.open_connection("127.0.0.1", served.port))
    client.writer.write(http_request(PATH, b"x" * 100)[:-50])
    await client.writer.drain()
    await asyncio.sleep(0.02)
    client.leave()
    await gone(served)


async def test_pipelined_requests_of_a_client_that_left(served: Served) -> None:
    served.llm.runner.gate.clear()
    client = await Client.send(served, False)
    client.writer.write(http_request(PATH, json.dumps(CHAT).encode()) * 3)
    await eventually(served.llm.runner.entered.is_set)
    client.leave()
    await gone(served)


async def test_others_go_on(served: Served) -> None:
    """The stream of one client is whole when its neighbours come and go."""
    async with serving(FakeLLM(parallel=3, queue=64)) as busy:
        busy.llm.runner.answer = bytes(range(97, 123)) * 8
        busy.llm.runner.step_seconds = 0.001
        steady = asyncio.create_task(busy.post(PATH, {**CHAT, "max_tokens": 200}))
        for number in range(10):
            client = await Client.send(busy, number % 2 == 0, ignore_eos=True)
            await asyncio.sleep(0.005)
            client.leave()
        status, answer = await steady
        assert status == 200 and answer["choices"][0]["message"]["content"] == (busy.llm.runner.answer[:200]).decode()
        await busy.idle()


async def test_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """It holds its connection, not the engine."""
    async with serving(FakeLLM(context=8192)) as served:
        with caplog.at_level(logging.INFO, "apu_engine.server"):
            client = await Client.send(served, True, ignore_eos=True, logprobs=True, top_logprobs=20)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await eventually(served.llm.runner.entered.is_set)
            await served.idle()
            assert (await served.post(PATH, CHAT))[0] == 200
            assert caplog.text.count(PATH) == 1, "the answer was written although nobody read it"
            client.leave()
            await eventually(lambda: "client left" in caplog.text)


async def test_leaving_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.llm.runner.gate.clear()
    with caplog.at_level(logging.INFO, "apu_engine.server"):
        client = await Client.send(served, True)
        await eventually(served.llm.runner.entered.is_set)
        client.leave()
        await eventually(lambda: "client left" in caplog.text)
        await gone(served)
    assert "10 prompt, 0 cached, 0 generated" in caplog.text
    assert "13 generated" in caplog.text and "first token" in caplog.text
    assert sum(PATH in record.message for record in caplog.records) == 2, "one line a request"


async def test_refusals_are_logged_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "apu_engine.server"):
        await served.refused(PATH, {**CHAT, "n": 2})
        await served.refused(PATH, {"messages": [{"role": "user", "content": "x" * 300}]})
        await served.refused("/v1/nothing", {})
    assert len(caplog.records) == 3, caplog.text
    assert "400 n: not supported" in caplog.text and "308 prompt" in caplog.text and "404" in caplog.text


@pytest.mark.parametrize("where", ["prefill", "queue"])
async def test_pings_before_the_first_token(served: Served, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The stream opens and pings while nothing is generated; the answer follows as usual."""
    monkeypatch.setattr(generation, "PING_SECONDS", 0.02)
    served.llm.runner.gate.clear()
    other = await Client.send(served, False)
    if where == "prefill":
        other.leave()
        await eventually(lambda: served.llm.engine.status().running == 0)
    async with served.http.post(served.url + PATH, json={**CHAT, "stream": True}) as answer:
        assert answer.status == 200
        opening = await answer.content.readuntil(b"\n\n")
        assert json.loads(opening[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        for _ in range(3):
            assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
        served.llm.runner.gate.set()
        rest = (await answer.text()).replace(": waiting\n\n", "")
    text = "".join(json.loads(e[6:])["choices"][0]["delta"].get("content", "") for e in rest.split("\n\n")[:-2])
    assert text == "Hello, world." and rest.endswith("data: [DONE]\n\n")
    other.leave()


async def test_pings_while_text_is_held(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_SECONDS", 0.02)
    served.llm.runner.step_seconds = 0.005
    body = {**CHAT, "stream": True, "stop": "a" * 50}
    served.llm.runner.answer = b"a" * 30
    async with served.http.post(served.url + PATH, json=body) as answer:
        text = await answer.text()
    assert text.count(": waiting\n\n") >= 3 and "a" * 30 in text


@both
async def test_queue_full_is_429(served: Served, streaming: bool) -> None:
    served.llm.runner.gate.clear()
    tasks = [asyncio.create_task(served.post(PATH, CHAT)) for _ in range(5)]
    await eventually(lambda: served.llm.engine.status().waiting == 4)
    async with served.http.post(served.url + PATH, json={**CHAT, "stream": streaming}) as answer:
        assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        assert (await answer.json())["error"]["code"] == "queue_full"
    served.llm.runner.gate.set()
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5


async def test_error_after_the_first_event(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status line is gone: the error is an event, and the stream ends in order."""
    monkeypatch.setattr(generation, "PING_SECONDS", 0.02)
    served.llm.runner.gate.clear()

    def fault() -> None:
        raise RuntimeError("a defect")

    served.llm.runner.fail = fault
    async with served.http.post(served.url + PATH, json={**CHAT, "stream": True}) as answer:
        assert answer.status == 200
        served.llm.runner.gate.set()
        events = [e for e in (await answer.text()).split("\n\n") if e.startswith("data: ")]
    assert json.loads(events[-2][6:])["error"]["code"] == "internal_error"
    assert events[-1] == "data: [DONE]"


async def test_client_with_a_timeout(served: Served) -> None:
    served.llm.runner.gate.clear()
    timeout = aiohttp.ClientTimeout(total=0.05)
    with pytest.raises(asyncio.TimeoutError):
        await served.post(PATH, CHAT, timeout=timeout)
    await gone(served)


async def test_leaving_within_the_body_leaves_no_traceback(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    address = served.url.rpartition("/")[2].split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
    for body in (b"", b'{"prompt"'):
        _, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(head + body)
        await writer.drain()
        await asyncio.sleep(0.05)  # the handler waits for the rest by now
        writer.transport.abort()
    await asyncio.sleep(0.1)
    assert (await served.http.get(served.url + "/health")).status == 200
    assert not [record for record in caplog.records if record.exc_info]
