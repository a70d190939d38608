"""OpenAI's endpoints: /v1/chat/completions, /v1/completions, /v1/models; streaming and plain share one path."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from apu_engine.engine.job import ContextLengthError, Job, SamplingParams, TokenEvent
from apu_engine.server import body, schema
from apu_engine.server.errors import ApiError
from apu_engine.server.generation import Generation
from apu_engine.server.sse import EventStream
from apu_engine.server.wording import ChatWording, CompletionWording, Wording

if TYPE_CHECKING:
    from apu_engine import LLM
    from apu_engine.server.app import Service
    from apu_engine.text.stream import TextStream

log = logging.getLogger("apu_engine.server")
COMPLETION_TOKENS = 16  # of /v1/completions when the request names no limit: OpenAI's default
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
)
Request = schema.ChatRequest | schema.CompletionRequest


class OpenAI:
    """Handlers over the service's one loaded model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat, expect_handler=body.expect),
            web.post("/v1/completions", self.completions, expect_handler=body.expect),
            web.get("/v1/models", self.models, expect_handler=body.expect),
            web.get("/v1/models/{name:.+}", self.model, expect_handler=body.expect),
        ]

    async def models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._service.alias:
            message = f"model {name[:80]!r} is not loaded; loaded: {self._service.alias!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return json_response(self._card())

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
        asked = await body.read(request, schema.ChatRequest, self._service.config.max_body)
        if asked.top_logprobs and not asked.logprobs:
            schema.invalid("top_logprobs", "needs logprobs to be true")
        params = self._params(llm, asked, bool(asked.logprobs), asked.top_logprobs)
        messages = schema.plain_messages(asked.messages)
        options = schema.template_options(asked.chat_template_kwargs)
        stop = [*schema.stop_strings(asked.stop), *llm.chat_stop]
        llm.text_stream(stop)  # refuses bad ones before anything is rendered
        _check_length(llm, (message["content"] for message in messages), "messages")
        with schema.template_errors():
            prompt = await asyncio.to_thread(llm.chat_prompt, messages, asked.reasoning_effort, options)
        stream = llm.text_stream(stop, block=prompt.block)
        limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        if limit is None:
            limit = self._service.config.max_tokens or llm.context
        return await self._answer(request, llm, asked, prompt.tokens, limit, stream, params, ChatWording(llm, params))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        llm = self._service.ready()
        asked = await body.read(request, schema.CompletionRequest, self._service.config.max_body)
        params = self._params(llm, asked, asked.logprobs is not None, asked.logprobs)
        stream = llm.text_stream(schema.stop_strings(asked.stop), continuation=True)
        prompt = await asyncio.to_thread(_prompt_tokens, llm, asked.prompt)
        limit = asked.max_tokens
        if limit is None:
            limit = self._service.config.max_tokens or COMPLETION_TOKENS
        return await self._answer(request, llm, asked, prompt, limit, stream, params, CompletionWording(llm, params))

    def _params(self, llm: LLM, asked: Request, logprobs: bool, top: int | None) -> SamplingParams:
        if asked.stream_options is not None and not asked.stream:
            schema.invalid("stream_options", "needs stream to be true")
        given: dict[str, Any] = {name: value for name in SAMPLING_FIELDS if (value := getattr(asked, name)) is not None}
        if asked.seed is not None:
            given["seed"] = schema.seed(asked.seed)
        given["logit_bias"] = schema.logit_bias(asked.logit_bias, llm.engine.vocabulary)
        return replace(llm.sampling, **given, logprobs=logprobs, top_logprobs=top or 0)

    async def _answer(
        self,
        request: web.Request,
        llm: LLM,
        asked: Request,
        prompt: Sequence[int],
        limit: int,
        stream: TextStream,
        params: SamplingParams,
        words: Wording,
    ) -> web.StreamResponse:
        if not prompt:
            schema.invalid(words.prompt_field, "the prompt is empty")
        room = llm.context - len(prompt)
        job = Job(
            prompt=prompt,
            params=params,
            max_tokens=min(limit, max(room, 1)),  # without room the engine says so, with both numbers
            stop_ids=llm.stop_ids,
            id=f"{words.prefix}-{uuid.uuid4().hex[:24]}",
            ignore_eos=bool(asked.ignore_eos),
        )
        generation = Generation(llm.engine, job, stream)
        head: dict[str, Any] = {"id": job.id, "created": int(time.time()), "model": self._service.alias}
        try:
            if asked.stream:
                usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
                return await self._stream(request, generation, words, head, usage)
            return await self._whole(generation, words, head)
        except ApiError as error:
            error.logged = True
            if isinstance(error.__cause__, ContextLengthError):
                error.param = words.prompt_field
            raise
        finally:
            log.info("%s %s: %s", request.path, job.id, generation.log_line())

    async def _whole(self, generation: Generation, words: Wording, head: dict[str, Any]) -> web.Response:
        text: list[str] = []
        reasoning: list[str] = []
        tokens: list[TokenEvent] = []
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if piece is not None:
                    text.append(piece.text)
                    reasoning.append(piece.reasoning)
                    tokens += piece.tokens
        choice = words.whole("".join(text), "".join(reasoning), tokens, generation.finish_reason)
        ending = {"usage": generation.usage(), "timings": generation.timings()}
        return json_response({**head, "object": words.object, "choices": [choice], **ending})

    async def _stream(
        self, request: web.Request, generation: Generation, words: Wording, head: dict[str, Any], usage: bool
    ) -> web.StreamResponse:
        head = {**head, "object": words.chunk_object}
        none_yet = {"usage": None} if usage else {}
        async with aclosing(generation.pieces()) as pieces:
            piece = await anext(pieces)  # an error before there is anything to send is an HTTP error
            async with EventStream(request) as events:
                try:
                    if (opening := words.opening()) is not None:
                        await events.send({**head, "choices": [opening], **none_yet})
                    while True:
                        if piece is None:
                            await events.ping()
                        elif piece.text or piece.reasoning or (piece.tokens and generation.job.params.logprobs):
                            part = words.part(piece.text, piece.reasoning, piece.tokens, None)
                            await events.send({**head, "choices": [part], **none_yet})
                        if generation.finish_reason:
                            break
                        piece = await anext(pieces)
                except ApiError as error:  # the status line is gone: the error travels as an event
                    await events.send(error.body())
                    return events.response
                last = words.part("", "", [], generation.finish_reason)
                await events.send({**head, "choices": [last], **none_yet, "timings": generation.timings()})
                if usage:
                    await events.send({**head, "choices": [], "usage": generation.usage()})
        return events.response


def _check_length(llm: LLM, texts: Iterable[str], field: str) -> None:
    """Refuses at once what encoding would only refuse after many seconds."""
    try:
        llm.check_length(texts)
    except ContextLengthError as error:
        raise ApiError(400, str(error), field, "context_length_exceeded") from error


def _prompt_tokens(llm: LLM, prompt: str | list[Any]) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        _check_length(llm, [prompt], "prompt")
        return llm.tokenize(prompt)
    if any(isinstance(item, (str, list)) for item in prompt):
        schema.invalid("prompt", "one prompt a request is supported, found several", "unsupported_field")
    top = llm.engine.vocabulary - 1
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= top:
            schema.invalid("prompt", f"expected token ids from 0 to {top}, found {str(item)[:40]}")
    return prompt


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
