"""HTTP below the endpoints: Expect, chunked and slow bodies, sizes, pipelining, and what is not HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest
from server_fakes import CHAT, Served, exchange, http_request, serving

from apu_engine.server import body as server_body

PATH = "/v1/chat/completions"
BODY = json.dumps(CHAT).encode()
CLOSE = "Connection: close"


def parse(raw: bytes) -> tuple[int, dict[str, str], Any]:
    """(status, headers, JSON body) of one response."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, json.loads(rest)


async def test_expect_continue(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head, body = http_request(PATH, BODY, "Expect: 100-continue", CLOSE).split(b"\r\n\r\n", 1)
    writer.write(head + b"\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert parse(await reader.read())[0] == 200
    writer.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Content-Length: 2000000"], 413),
        (["Content-Length: 10", "Content-Type: text/plain"], 415),
        (["Content-Length: 10", "Authorization: Bearer no"], 401),
    ],
)
async def test_expect_is_answered_without_the_body(headers: list[str], status: int) -> None:
    async with serving(max_body=1 << 20, api_key="yes") as served:
        if status != 401:
            headers.append("Authorization: Bearer yes")
        kind = [] if any("text/plain" in h for h in headers) else ["Content-Type: application/json"]
        lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Expect: 100-Continue", *kind, *headers]
        found, answered, _ = parse(await exchange(served.port, "\r\n".join(lines).encode() + b"\r\n\r\n"))
        assert found == status and answered["connection"] == "close"


async def test_expect_while_loading() -> None:
    async with serving(loaded=False) as served:
        head = http_request(PATH, BODY, "Expect: 100-continue").partition(BODY)[0]
        status, headers, answer = parse(await exchange(served.port, head))
        assert status == 503 and answer["error"]["code"] == "model_loading" and headers["retry-after"] == "1"


async def test_unknown_expectation(served: Served) -> None:
    status, headers, answer = parse(await exchange(served.port, http_request(PATH, BODY, "Expect: coffee")))
    assert status == 417 and "coffee" in answer["error"]["message"] and headers["connection"] == "close"
    old = http_request(PATH, BODY, "Expect: coffee").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert parse(await exchange(served.port, old))[0] == 200


async def test_body_over_the_limit() -> None:
    async with serving(max_body=1024) as served:
        big = msg(2000)
        for data in (big, chunks(big)):
            headers = {"Content-Type": "application/json"}
            status, error = await served.refused(PATH, data=data, headers=headers)
            assert (status, error["code"]) == (413, "body_too_large") and "1024" in error["message"]
        bomb = gzip.compress(msg(1 << 20))
        assert len(bomb) < 2000
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        status, error = await served.refused(PATH, data=bomb, headers=headers)
        assert status == 413
        status, _ = await served.post(PATH, data=msg(200), headers={"Content-Type": "application/json"})
        assert status == 200


def msg(size: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()


async def chunks(data: bytes) -> Any:
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


async def test_chunked_and_compressed_bodies(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    assert (await served.post(PATH, data=chunks(BODY), headers=headers))[0] == 200
    headers["Content-Encoding"] = "gzip"
    assert (await served.post(PATH, data=gzip.compress(BODY), headers=headers))[0] == 200
    for broken in (b"not gzip", gzip.compress(BODY)[:-20]):
        status, _ = await served.refused(PATH, data=broken, headers=headers)
        assert status == 400


@pytest.mark.parametrize(
    "data",
    [
        http_request(PATH, b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        http_request(PATH, BODY, "Content-Length: -5"),
        http_request(PATH, BODY, "Content-Length: abc"),
        http_request(PATH, BODY, "Content-Length: 5", "Transfer-Encoding: chunked"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_broken_http_is_400(served: Served, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        answer = await exchange(served.port, data)
    assert answer.split(b" ")[1] == b"400", answer
    assert not any(record.exc_info for record in caplog.records), "a traceback for each port scan"
    assert (await served.post(PATH, CHAT))[0] == 200


async def test_slow_body(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_body, "BODY_SECONDS", 0.05)
    status, _, answer = parse(await exchange(served.port, http_request(PATH, BODY)[:-5]))
    assert status == 408 and answer["error"]["code"] == "body_timeout"


async def test_body_in_small_parts(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    data = http_request(PATH, BODY, CLOSE)
    for start in range(0, len(data), 7):
        writer.write(data[start : start + 7])
        await writer.drain()
        await asyncio.sleep(0)
    assert parse(await asyncio.wait_for(reader.read(), 5))[0] == 200
    writer.close()


async def test_pipelining(served: Served) -> None:
    """Answers come in the order of the requests, also behind a stream and a refusal."""
    streamed = json.dumps({**CHAT, "stream": True}).encode()
    bad = b'{"messages": 1}'
    health = http_request("/health", b"", CLOSE, method="GET")
    parts = [http_request(PATH, b) for b in (BODY, streamed, bad)]
    raw = await exchange(served.port, b"".join(parts) + health)
    statuses = [part.split(b" ")[0] for part in raw.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"400", b"200"]
    assert raw.index(b'"chat.completion"') < raw.index(b"data: [DONE]") < raw.index(b'"invalid_request_error"')


async def test_http_1_0_stream(served: Served) -> None:
    streamed = json.dumps({**CHAT, "stream": True}).encode()
    raw = await exchange(served.port, http_request(PATH, streamed).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert raw.endswith(b"data: [DONE]\n\n") and b"chunked" not in raw


async def test_connection_is_kept(served: Served) -> None:
    """A refusal does not cost the connection when the body was read."""
    bad = http_request(PATH, b'{"messages": 1}')
    raw = await exchange(served.port, bad + http_request("/health", b"", CLOSE, method="GET"))
    assert raw.count(b"HTTP/1.1 ") == 2
