"""Made-up request bodies: an answer or a refusal that names its cause, never a 500, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fakes import CHAT, FakeLLM, Served, serving

from apu_engine.server import schema

# Any JSON, and values that are nearly right.
TEXT = st.text(st.characters(), max_size=12)  # includes lone surrogates
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-3, 300),
    st.floats(),
    TEXT,
    st.sampled_from(["user", "assistant", "text", "auto", "none", "Hello", "\x00", "<|im_end|>"]),
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=10
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
PARTS = st.fixed_dictionaries({"type": st.just("text") | LEAVES}, optional={"text": TEXT | LEAVES, "x": JSON})
MESSAGE_FIELDS: dict[Any, Any] = dict.fromkeys(schema.Message.__struct_fields__[2:], JSON)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES | LEAVES, "content": TEXT | st.lists(PARTS, max_size=3) | JSON}, optional=MESSAGE_FIELDS
)
NEARLY: dict[Any, Any] = {
    "messages": st.lists(MESSAGE, max_size=3) | JSON,
    "prompt": TEXT | st.lists(st.integers(-1, 260), max_size=5) | JSON,
    "stop": TEXT | st.lists(TEXT, max_size=3) | JSON,
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | TEXT, st.floats(-101, 101), max_size=3) | JSON,
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": JSON, "x": JSON}) | JSON,
    "max_tokens": st.integers(-1, 20) | JSON,
    "stream": st.booleans() | JSON,
}
CHAT_BODY = st.fixed_dictionaries(
    {"messages": st.just(CHAT["messages"]) | NEARLY["messages"]},
    optional={**{n: NEARLY.get(n, JSON) for n in schema.ChatRequest.__struct_fields__ if n != "messages"}, "n": JSON},
)
COMPLETION_BODY = st.fixed_dictionaries(
    {"prompt": NEARLY["prompt"]},
    optional={**{n: NEARLY.get(n, JSON) for n in schema.CompletionRequest.__struct_fields__ if n != "prompt"}},
)
TOKENS_BODY = st.fixed_dictionaries({}, optional={"tokens": st.lists(st.integers(-1, 300)) | JSON, "content": JSON})
# One field at a time besides a good request gets past the other checks more often.
ONE_FIELD = st.sampled_from(sorted(schema.ChatRequest.__struct_fields__)).flatmap(
    lambda name: st.builds(lambda value: {**CHAT, name: value}, NEARLY.get(name, JSON))
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Background:
    """A server on a loop of its own, so that hypothesis can call it as a function."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.context = serving(FakeLLM(context=128), max_body=1 << 20)
        self.served: Served = self.call(self.context.__aenter__())

    def call(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(20)

    def close(self) -> None:
        self.call(self.context.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()

    def post(self, path: str, data: bytes) -> None:
        """Sends a body and checks that the answer is in order."""
        status, kind, text = self.call(self._post(path, data))
        assert status in (200, 400), (status, text)
        if kind == "text/event-stream":
            assert text.endswith("data: [DONE]\n\n") and '"error"' not in text, text
            return
        answer = json.loads(text)
        assert (status == 400) == ("error" in answer), text
        if status == 400:
            error = answer["error"]
            assert error["message"] and error["code"] and error["type"] == "invalid_request_error", text
            assert len(error["message"]) < 600, text

    async def _post(self, path: str, data: bytes) -> tuple[int, str, str]:
        headers = {"Content-Type": "application/json"}
        url = self.served.url + path
        async with self.served.http.post(url, data=data, headers=headers, timeout=aiohttp.ClientTimeout(10)) as answer:
            return answer.status, answer.content_type, await answer.text()


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    background = Background()
    yield background
    assert background.served.llm.engine.status().state == "ready"
    background.close()


def encode(value: Any) -> bytes:
    """JSON as Python writes it: NaN and lone surrogates included."""
    return json.dumps(value).encode()


@QUICK
@given(CHAT_BODY)
def test_chat(server: Background, body: Any) -> None:
    server.post("/v1/chat/completions", encode(body))


@QUICK
@given(ONE_FIELD)
def test_chat_with_one_odd_field(server: Background, body: Any) -> None:
    server.post("/v1/chat/completions", encode(body))


@QUICK
@given(COMPLETION_BODY)
def test_completions(server: Background, body: Any) -> None:
    server.post("/v1/completions", encode(body))


@QUICK
@given(st.sampled_from(["/tokenize", "/detokenize"]), TOKENS_BODY)
def test_tokens(server: Background, path: str, body: Any) -> None:
    server.post(path, encode(body))


@QUICK
@given(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), JSON)
def test_any_json(server: Background, path: str, body: Any) -> None:
    server.post(path, encode(body))


@QUICK
@given(st.data())
def test_damaged_bodies(server: Background, data: st.DataObject) -> None:
    body = bytearray(encode({**CHAT, "temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1}}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "cut", "repeat"]))
        if kind == "replace":
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            body[at:at] = data.draw(
                st.binary(max_size=4) | st.sampled_from([b"NaN", b"1e999", b'"', b"[[", b"\\ud800"])
            )
        elif kind == "cut":
            del body[at : data.draw(st.integers(at, len(body) - 1))]
        else:
            body[at:at] = body[at : data.draw(st.integers(at, len(body)))]
    server.post("/v1/chat/completions", bytes(body))


def test_json_is_what_json_allows() -> None:
    """The generator does reach NaN and surrogates."""
    assert encode(math.nan) == b"NaN" and encode("\ud800") == b'"\\ud800"'
