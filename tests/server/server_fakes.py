"""A served model without a model: the real engine, text filter and HTTP stack over a runner that plays a script.

Tokens are bytes, so any text is a prompt and any bytes are an answer. `gate` holds steps open, `step_seconds` makes
them slow, `fail` makes them raise.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web

from apu_engine.config import EngineConfig
from apu_engine.engine.engine import Engine, StepCancelled
from apu_engine.engine.job import ContextLengthError, SamplingParams, TokenEvent
from apu_engine.engine.llm import ChatPrompt, check_template_options
from apu_engine.engine.scheduler import Chunk
from apu_engine.errors import MappingError
from apu_engine.server.app import Service, make_runner
from apu_engine.text.reasoning import Block, ReasoningSplit, thinking_variables
from apu_engine.text.stream import TextStream

EOS, BOS, MARK = 256, 257, 258
VOCABULARY = 260
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass(frozen=True)
class Group:
    window: int = 0
    page_count: int = 1024


class ScriptRunner:
    """Draws the bytes of `answer` one by one, then the end token."""

    def __init__(self, max_rows: int = 16) -> None:
        self.groups = (Group(),)
        self.vocabulary = VOCABULARY
        self.max_rows = max_rows
        self.max_outputs = 8
        self.answer: Sequence[int] = b"Hello, world."
        self.gate = threading.Event()
        self.gate.set()
        self.step_seconds = 0.0
        self.fail: Callable[[], None] = lambda: None
        self.entered = threading.Event()
        self._cancelled = threading.Event()
        self._chunks: list[Chunk] = []

    def submit(self, chunks: Sequence[Chunk]) -> None:
        self._cancelled.clear()
        self._chunks = list(chunks)

    def cancel(self) -> None:
        self._cancelled.set()

    def wait(self) -> list[TokenEvent]:
        self.entered.set()
        until = time.monotonic() + self.step_seconds
        while not self.gate.is_set() or time.monotonic() < until:
            if self._cancelled.wait(0.001):
                raise StepCancelled
        self.fail()
        return [self._draw(chunk) for chunk in self._chunks if chunk.sample]

    def _draw(self, chunk: Chunk) -> TokenEvent:
        job, index = chunk.sequence.job, chunk.sequence.generated
        if job.ignore_eos:
            index %= len(self.answer)
        token = self.answer[index] if index < len(self.answer) else EOS
        if not job.params.logprobs:
            return TokenEvent(token)
        top = tuple(((token + i) % VOCABULARY, -0.5 - i) for i in range(job.params.top_logprobs))
        return TokenEvent(token, -0.5, top)


class ByteTokenizer:
    """What TextStream asks of a tokenizer."""

    special_ids = frozenset((EOS, BOS, MARK))
    add_space_prefix = False

    control_tokens: Mapping[str, int] = {}

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()


class FakeLLM:
    """The members of LLM that the server uses."""

    def __init__(self, context: int = 256, parallel: int = 1, queue: int = 4) -> None:
        self.runner = ScriptRunner()
        self.changed: MappingError | None = None
        self.engine = Engine(self.runner, context=context, parallel=parallel, queue=queue, check=self.check)
        self.context = context
        self.sampling = SamplingParams()
        self.stop_ids = frozenset((EOS,))
        self.has_chat_template = True
        self.chat_stop: tuple[str, ...] = ()
        self.runtime = SimpleNamespace(
            notices=["a notice"], context=SimpleNamespace(reason="as asked"), device_line="cpu (as asked)"
        )
        self.render: Callable[[], None] = lambda: None
        self.rendered: dict[str, Any] = {}
        self.template, self.reads = "", ("enable_thinking",)
        self.block: Block | None = None
        self.closed = False

    def check(self) -> None:
        if self.changed is not None:
            raise self.changed

    def text_stream(
        self, stop: Sequence[str] = (), continuation: bool = False, block: Block | None = None
    ) -> TextStream:
        split = ReasoningSplit(block) if block else None
        return TextStream(ByteTokenizer(), stop, continuation=continuation, split=split)  # type: ignore[arg-type]

    def chat_prompt(
        self, messages: list[dict[str, Any]], reasoning_effort: str | None, options: dict[str, Any]
    ) -> ChatPrompt:
        self.render()
        check_template_options(options, frozenset({*self.reads, "enable_thinking"}))
        variables = thinking_variables(reasoning_effort, self.template, self.reads, options)
        self.rendered = {**options, **variables}
        block = None if self.rendered.get("enable_thinking") is False else self.block
        return ChatPrompt(self.tokenize("".join(f"{m['role']}: {m['content']}\n" for m in messages)), block)

    def check_length(self, texts: Iterable[str]) -> None:
        if (length := sum(map(len, texts))) > 100 * self.context:
            raise ContextLengthError(length, self.context, bound=True)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def detokenize(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return ByteTokenizer().token_bytes(token)

    @property
    def memory_report(self) -> dict[str, Any]:
        return {"strategy": "direct", "way": None, "weights": 7}

    def summary(self) -> str:
        return "weights 1 MiB mapped, copied 0, anonymous 0; ctx 256 (KV 1 MiB)"

    def close(self) -> None:
        self.closed = True
        self.engine.close()


@dataclass
class Served:
    """A running server: `url`, the model behind it, and an HTTP client."""

    service: Service
    llm: FakeLLM
    url: str
    http: aiohttp.ClientSession
    port: int

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        if "data" not in options:
            options["json"] = body
        async with self.http.post(self.url + path, **options) as answer:
            return answer.status, await answer.json()

    async def refused(self, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
        status, answer = await self.post(path, body, **options)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        return status, answer["error"]

    async def idle(self) -> None:
        """Until nothing runs or waits."""
        await eventually(lambda: (s := self.llm.engine.status()).running + s.waiting == 0)


@asynccontextmanager
async def serving(llm: FakeLLM | None = None, loaded: bool = True, **options: Any) -> AsyncIterator[Served]:
    llm = llm or FakeLLM()
    service = Service(EngineConfig(model="fake.gguf", **options))
    if loaded:
        service.llm = llm  # type: ignore[assignment]
    runner = make_runner(service)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.url = url = f"http://127.0.0.1:{site.port}"
    try:
        async with aiohttp.ClientSession() as http:
            yield Served(service, llm, url, http, site.port)
    finally:
        llm.runner.gate.set()
        await asyncio.to_thread(llm.close)
        await runner.cleanup()


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


async def exchange(port: int, data: bytes, seconds: float = 5.0) -> bytes:
    """Sends raw bytes and returns all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


def http_request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    """A raw HTTP/1.1 request with a JSON body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
