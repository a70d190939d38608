"""OpenAI's endpoints: /v1/chat/completions, /v1/completions, /v1/models; streaming and plain share one path."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from apu_engine.engine.job import ContextLengthError, SamplingParams, TokenEvent
from apu_engine.server import schema
from apu_engine.server.errors import ApiError, api_error
from apu_engine.server.generation import Generation, Piece
from apu_engine.server.sse import EventStream

if TYPE_CHECKING:
    from apu_engine import LLM
    from apu_engine.server.app import Service

log = logging.getLogger("apu_engine.server")
FINGERPRINT = "apu_engine"


@dataclass(slots=True, frozen=True)
class Format:
    """How one endpoint words its objects: `choice(text, tokens, first, reason)` is a whole or a streamed choice."""

    prefix: str
    object: str
    chunk_object: str
    message: Callable[[str, list[TokenEvent], str], dict[str, Any]]
    delta: Callable[[str, list[TokenEvent], bool, str | None], dict[str, Any]]


class OpenAI:
    """Handlers over the service's one loaded model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
        ]

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._service.alias:
            raise ApiError(
                404,
                f"model {name!r} is not loaded; loaded: {self._service.alias!r}",
                "model",
                "model_not_found",
            )
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": self._service.alias,
            "object": "model",
            "created": int(self._service.started),
            "owned_by": "apu_engine",
        }
        if self._service.llm is not None:
            card["context_length"] = self._service.llm.context
        return card

    async def chat(self, request: web.Request) -> web.StreamResponse:
        llm = self._service.ready()
        body = schema.decode(await request.read(), schema.ChatRequest)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs", "invalid_value")
        messages = schema.plain_messages(body.messages)
        prompt = await asyncio.to_thread(llm.chat_tokens, messages, **(body.chat_template_kwargs or {}))
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        params = replace(self._sampling(llm, body), logprobs=bool(body.logprobs), top_logprobs=body.top_logprobs or 0)
        words = Format(
            "chatcmpl",
            "chat.completion",
            "chat.completion.chunk",
            _chat_choice(llm, params),
            _chat_delta(llm, params),
        )
        return await self._answer(request, llm, body, prompt, params, limit, words, "messages")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        llm = self._service.ready()
        body = schema.decode(await request.read(), schema.CompletionRequest)
        prompt = await asyncio.to_thread(_prompt_tokens, llm, body.prompt)
        params = replace(self._sampling(llm, body), logprobs=body.logprobs is not None, top_logprobs=body.logprobs or 0)
        limit = 16 if body.max_tokens is None else body.max_tokens
        choice = _text_choice(llm, params)
        words = Format("cmpl", "text_completion", "text_completion", choice, lambda t, k, _, r: choice(t, k, r))
        return await self._answer(request, llm, body, prompt, params, limit, words, "prompt")

    def _sampling(self, llm: LLM, body: schema.ChatRequest | schema.CompletionRequest) -> SamplingParams:
        given = {
            name: getattr(body, name)
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repeat_penalty",
                "repeat_last_n",
                "frequency_penalty",
                "presence_penalty",
            )
            if getattr(body, name) is not None
        }
        if body.seed is not None:
            given["seed"] = body.seed & 0xFFFFFFFFFFFFFFFF
        if body.logit_bias:
            given["logit_bias"] = schema.logit_bias(body.logit_bias, llm.engine.vocabulary)
        return replace(llm.sampling, **given)

    async def _answer(
        self,
        request: web.Request,
        llm: LLM,
        body: schema.ChatRequest | schema.CompletionRequest,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int | None,
        words: Format,
        field: str,
    ) -> web.StreamResponse:
        stop = schema.stop_strings(body.stop)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream to be true", "stream_options", "invalid_value")
        if not prompt:
            raise ApiError(400, f"{field}: the prompt is empty", field, "invalid_value")
        room = llm.context - len(prompt)
        wanted = room if limit is None else min(limit, room)
        if room < 1:
            raise context_error(ContextLengthError(len(prompt), llm.context), field)
        if limit is None and self._service.config.max_tokens:
            wanted = min(self._service.config.max_tokens, room)
        request_id = f"{words.prefix}-{uuid.uuid4().hex[:24]}"
        generation = Generation(llm, prompt, params, wanted, stop, request_id, body.ignore_eos)
        head = {"id": request_id, "created": int(time.time()), "model": self._service.alias}
        head["system_fingerprint"] = FINGERPRINT
        try:
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return await self._stream(request, generation, words, head, usage)
            return await self._whole(generation, words, head)
        finally:
            log.info("%s %s: %s", request.path, request_id, generation.log_line())

    async def _whole(self, generation: Generation, words: Format, head: dict[str, Any]) -> web.Response:
        text: list[str] = []
        tokens: list[TokenEvent] = []
        async for piece in generation.pieces():
            text.append(piece.text)
            if piece.token is not None:
                tokens.append(piece.token)
        choice = words.message("".join(text), tokens, generation.finish_reason)
        body = {**head, "object": words.object, "choices": [choice], "usage": generation.usage()}
        return _json({**body, "timings": generation.timings()})

    async def _stream(
        self, request: web.Request, generation: Generation, words: Format, head: dict[str, Any], usage: bool
    ) -> web.StreamResponse:
        head = {**head, "object": words.chunk_object}
        extra = {"usage": None} if usage else {}
        pieces = generation.pieces()
        first = await anext(pieces)  # an error before the first token is an HTTP error, not an event
        async with EventStream(request) as events:
            try:
                await events.send({**head, "choices": [words.delta("", [], True, None)], **extra})
                await self._forward(events, first, pieces, words, {**head}, extra)
                last = {**head, "choices": [words.delta("", [], False, generation.finish_reason)], **extra}
                await events.send({**last, "timings": generation.timings()})
                if usage:
                    await events.send({**head, "choices": [], "usage": generation.usage()})
            except (ConnectionResetError, asyncio.CancelledError):
                raise
            except Exception as error:  # the status line is gone: the error travels as an event
                await events.send(api_error(error).body())
            finally:
                await pieces.aclose()
            await events.done()
        return events.response

    async def _forward(
        self,
        events: EventStream,
        first: Piece,
        pieces: Any,
        words: Format,
        head: dict[str, Any],
        extra: dict[str, Any],
    ) -> None:
        held: list[TokenEvent] = []  # tokens whose text is not safe to send yet

        async def forward(piece: Piece) -> None:
            if piece.idle:
                await events.ping()
                return
            if piece.token is not None:
                held.append(piece.token)
            if piece.text:
                await events.send({**head, "choices": [words.delta(piece.text, held, False, None)], **extra})
                held.clear()

        await forward(first)
        async for piece in pieces:
            await forward(piece)


def context_error(error: ContextLengthError, field: str) -> ApiError:
    """The 400 that OpenAI's clients know, with both numbers."""
    return ApiError(400, str(error), field, "context_length_exceeded")


def _prompt_tokens(llm: LLM, prompt: str | list[Any]) -> list[int]:
    if isinstance(prompt, str):
        return llm.tokenize(prompt)
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _prompt_tokens(llm, prompt[0])
    if any(isinstance(item, str | list) for item in prompt):
        raise ApiError(400, "prompt: one prompt a request, found a batch", "prompt", "unsupported_field")
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < llm.engine.vocabulary:
            raise ApiError(
                400,
                f"prompt: expected token ids from 0 to {llm.engine.vocabulary - 1}, found {str(item)[:40]}",
                "prompt",
                "invalid_value",
            )
    return prompt


def _piece(llm: LLM, token: int) -> tuple[str, list[int]]:
    raw = llm.token_bytes(token)
    return raw.decode("utf-8", "replace"), list(raw)


def _chat_logprobs(llm: LLM, params: SamplingParams, tokens: list[TokenEvent]) -> dict[str, Any] | None:
    if not params.logprobs:
        return None

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text, raw = _piece(llm, token)
        return {"token": text, "logprob": logprob, "bytes": raw}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(i, p) for i, p in t.top[: params.top_logprobs]]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_choice(llm: LLM, params: SamplingParams) -> Callable[[str, list[TokenEvent], str], dict[str, Any]]:
    def choice(text: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _chat_logprobs(llm, params, tokens),
            "finish_reason": reason,
        }

    return choice


def _chat_delta(
    llm: LLM, params: SamplingParams
) -> Callable[[str, list[TokenEvent], bool, str | None], dict[str, Any]]:
    def delta(text: str, tokens: list[TokenEvent], first: bool, reason: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if text:
            body["content"] = text
        logprobs = _chat_logprobs(llm, params, tokens) if tokens else None
        return {"index": 0, "delta": body, "logprobs": logprobs, "finish_reason": reason}

    return delta


def _text_choice(llm: LLM, params: SamplingParams) -> Callable[[str, list[TokenEvent], str | None], dict[str, Any]]:
    offset = 0

    def choice(text: str, tokens: list[TokenEvent], reason: str | None) -> dict[str, Any]:
        nonlocal offset
        logprobs = None
        if params.logprobs and tokens:
            texts = [_piece(llm, t.token)[0] for t in tokens]
            offsets = []
            for piece in texts:
                offsets.append(offset)
                offset += len(piece)
            logprobs = {
                "tokens": texts,
                "token_logprobs": [t.logprob for t in tokens],
                "top_logprobs": [{_piece(llm, i)[0]: p for i, p in t.top} for t in tokens],
                "text_offset": offsets,
            }
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    return choice


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
