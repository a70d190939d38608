"""Answers: plain and streamed, stop strings, characters cut in two, usage, log-probabilities, limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_fakes import BOS, CHAT, MARK, FakeLLM, Served, serving

CHAT_PATH = "/v1/chat/completions"


async def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer, which ends with [DONE]."""
    async with served.http.post(served.url + path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in (await answer.text()).split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed_text(events: list[dict[str, Any]]) -> str:
    choices = [c for e in events for c in e["choices"]]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


async def test_plain(served: Served) -> None:
    status, answer = await served.post(CHAT_PATH, {**CHAT, "model": "whatever"})
    assert status == 200
    assert answer["object"] == "chat.completion" and answer["model"] == "fake" and answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world.", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = len("user: Hi\n") + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 13,
        "total_tokens": prompt + 13,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    timings = answer["timings"]
    assert timings["prompt_n"] == prompt and timings["predicted_n"] == 13 and timings["cache_n"] == 0
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0 and timings["predicted_per_second"] > 0


async def test_stream(served: Served) -> None:
    events = await stream(served, CHAT_PATH, CHAT)
    assert len({e["id"] for e in events}) == 1 and {e["object"] for e in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_text(events) == "Hello, world."
    assert [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert events[-1]["timings"]["predicted_n"] == 13
    assert not any("usage" in e for e in events)


async def test_stream_usage(served: Served) -> None:
    events = await stream(served, CHAT_PATH, {**CHAT, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 13
    assert all(e["usage"] is None for e in events[:-1])


@pytest.mark.parametrize(
    ("answer", "stop", "text", "reason"),
    [
        (b"one two three", "two", "one ", "stop"),
        (b"one two three", ["xyz", "o three"], "one tw", "stop"),
        (b"one two three", "three!", "one two three", "stop"),  # held until the end, then flushed
        (b"one two three", None, "one two three", "stop"),
        ("grüße €".encode(), None, "grüße €", "stop"),
        ("a€".encode()[:-1], None, "a\ufffd", "stop"),
        (bytes([*b"a", MARK - 256]), None, "a\x02", "stop"),
    ],
)
async def test_stop_and_characters(
    served: Served, answer: bytes, stop: str | list[str] | None, text: str, reason: str
) -> None:
    """Streamed and plain answers are the same text, with the same number of tokens."""
    served.llm.runner.answer = answer
    body = {**CHAT, "stop": stop}
    _, plain = await served.post(CHAT_PATH, body)
    events = await stream(served, CHAT_PATH, {**body, "stream_options": {"include_usage": True}})
    assert plain["choices"][0]["message"]["content"] == streamed_text(events) == text
    assert plain["choices"][0]["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == reason
    assert plain["usage"] == events[-1]["usage"]


async def test_held_text_comes_out_at_max_tokens(served: Served) -> None:
    served.llm.runner.answer = b"abcSTOP"
    body = {**CHAT, "stop": "STOP", "max_tokens": 5}
    _, plain = await served.post(CHAT_PATH, body)
    assert plain["choices"][0]["message"]["content"] == "abcST"
    assert plain["choices"][0]["finish_reason"] == "length"
    assert streamed_text(await stream(served, CHAT_PATH, body)) == "abcST"


async def test_stop_string_frees_the_slot_at_once(served: Served) -> None:
    served.llm.runner.step_seconds = 0.002
    status, answer = await served.post(CHAT_PATH, {**CHAT, "stop": "lo", "ignore_eos": True})
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["usage"]["completion_tokens"] == 5
    assert served.llm.engine.status().running == 0


async def test_stop_strings_of_the_template(served: Served) -> None:
    served.llm.chat_stop = ("\nUser:",)
    served.llm.runner.answer = b"yes\nUser: no"
    _, answer = await served.post(CHAT_PATH, CHAT)
    assert answer["choices"][0]["message"]["content"] == "yes"
    _, answer = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 50})
    assert answer["choices"][0]["text"] == "yes\nUser: no"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens(served: Served, field: str) -> None:
    for limit, text in ((4, "Hell"), (0, "")):
        _, answer = await served.post(CHAT_PATH, {**CHAT, field: limit})
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == limit
        events = await stream(served, CHAT_PATH, {**CHAT, field: limit})
        assert streamed_text(events) == text and events[-1]["choices"][0]["finish_reason"] == "length"


async def test_answer_ends_with_the_context(served: Served) -> None:
    prompt = len("user: Hi\n") + 1
    for body in ({}, {"max_tokens": 1 << 20}):
        _, answer = await served.post(CHAT_PATH, {**CHAT, **body, "ignore_eos": True})
        assert answer["usage"]["total_tokens"] == 256
        assert answer["usage"]["completion_tokens"] == 256 - prompt
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("length", [248, 10_000])
async def test_prompt_over_the_context(served: Served, streaming: bool, length: int) -> None:
    body = {"messages": [{"role": "user", "content": "x" * length}], "stream": streaming}
    status, error = await served.refused(CHAT_PATH, body)
    assert status == 400 and error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert str(length + 8) in error["message"] and "256" in error["message"]
    status, error = await served.refused("/v1/completions", {"prompt": "x" * 256, "stream": streaming})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


async def test_a_prompt_far_over_the_context_is_refused_before_it_is_encoded(served: Served) -> None:
    text = "x" * 1_000_000
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body, field in ((CHAT_PATH, chat, "messages"), ("/v1/completions", {"prompt": text}, "prompt")):
        status, error = await served.refused(path, body)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert "at least 1000000 tokens" in error["message"] and "256" in error["message"]


async def test_chat_logprobs(served: Served) -> None:
    served.llm.runner.answer = "a€b".encode()
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    _, plain = await served.post(CHAT_PATH, body)
    content = plain["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert [t["bytes"] for t in content[1:4]] == [[b] for b in "€".encode()]
    events = await stream(served, CHAT_PATH, body)
    logprobs = [e["choices"][0]["logprobs"] for e in events]
    assert [t for found in logprobs if found for t in found["content"]] == content
    assert streamed_text(events) == "a€b"


@pytest.mark.parametrize("stop", ["ld", None])
async def test_logprobs_streamed_equal_plain(served: Served, stop: str | None) -> None:
    """Tokens whose text is held back, or never comes out, still have their entry."""
    body = {**CHAT, "logprobs": True, "stop": stop, "max_tokens": 12}
    _, plain = await served.post(CHAT_PATH, body)
    events = await stream(served, CHAT_PATH, body)
    streamed = [t for e in events if (found := e["choices"][0]["logprobs"]) for t in found["content"]]
    assert plain["choices"][0]["logprobs"]["content"] == streamed
    assert len(streamed) == 12


async def test_completions(served: Served) -> None:
    _, answer = await served.post("/v1/completions", {"prompt": "x"})
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "Hello, world.", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 2  # with BOS
    served.llm.runner.answer = b"0123456789" * 3
    _, answer = await served.post("/v1/completions", {"prompt": [BOS, 120, 121]})
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 16
    for prompt in (["x"], [[BOS, 120]]):
        _, answer = await served.post("/v1/completions", {"prompt": prompt, "max_tokens": 3})
        assert answer["choices"][0]["text"] == "012" and answer["usage"]["prompt_tokens"] == 2
    events = await stream(served, "/v1/completions", {"prompt": "x", "max_tokens": 20})
    assert streamed_text(events) == "01234567890123456789"
    assert {e["object"] for e in events} == {"text_completion"}


async def test_completion_logprobs(served: Served) -> None:
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 3}
    _, answer = await served.post("/v1/completions", body)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["H", "e", "l"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"H": -0.5, "I": -1.5}, {"e": -0.5, "f": -1.5}, {"l": -0.5, "m": -1.5}],
        "text_offset": [0, 1, 2],
    }
    events = await stream(served, "/v1/completions", body)
    offsets = [o for e in events if (found := e["choices"][0]["logprobs"]) for o in found["text_offset"]]
    assert offsets == [0, 1, 2]
    _, answer = await served.post("/v1/completions", {**body, "logprobs": 0})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}, {}]


async def test_sampling_reaches_the_engine(served: Served) -> None:
    jobs = []
    submit = served.llm.engine.submit
    served.llm.engine.submit = lambda job: (jobs.append(job), submit(job))[1]  # type: ignore[method-assign]
    fields = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "frequency_penalty": -1,
        "presence_penalty": 2,
    }
    await served.post(CHAT_PATH, {**CHAT, **fields, "seed": -1, "logit_bias": {"5": -100, "259": 1.5}})
    params = jobs[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.seed == (1 << 64) - 1 and params.logit_bias == {5: -100.0, 259: 1.5}
    nothing = dict.fromkeys([*fields, "seed", "logit_bias", "stop", "stream", "max_tokens", "logprobs", "ignore_eos"])
    await served.post(CHAT_PATH, {**CHAT, **nothing})
    assert jobs[1].params == served.llm.sampling


async def test_configured_max_tokens() -> None:
    async with serving(max_tokens=2) as served:
        _, answer = await served.post(CHAT_PATH, CHAT)
        assert answer["choices"][0]["message"]["content"] == "He"
        _, answer = await served.post("/v1/completions", {"prompt": "x"})
        assert answer["choices"][0]["text"] == "He"


async def test_messages(served: Served) -> None:
    said: list[Any] = []
    chat_prompt = served.llm.chat_prompt
    served.llm.chat_prompt = lambda messages, *rest: (said.append(messages), chat_prompt(messages, *rest))[1]  # type: ignore[method-assign]
    echoed = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None}
    messages = [
        {"role": "developer", "content": "a", "name": "n"},
        {**echoed, "function_call": None, "tool_calls": None, "reasoning_content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    status, _ = await served.post(CHAT_PATH, body)
    assert status == 200
    assert said == [
        [
            {"role": "system", "content": "a", "name": "n"},
            {"role": "assistant", "content": "b", "reasoning_content": "r"},
            {"role": "user", "content": "c\nd"},
        ]
    ]
    assert served.llm.rendered == {"enable_thinking": False}


async def test_several_at_once() -> None:
    import asyncio

    async with serving(FakeLLM(parallel=2, queue=64)) as served:
        served.llm.runner.step_seconds = 0.001
        answers = await asyncio.gather(*(served.post(CHAT_PATH, CHAT) for _ in range(20)))
    assert {a["choices"][0]["message"]["content"] for _, a in answers} == {"Hello, world."}
    assert len({a["id"] for _, a in answers}) == 20


async def test_models(served: Served) -> None:
    async with served.http.get(served.url + "/v1/models") as answer:
        listed = await answer.json()
    card = listed["data"][0]
    assert listed["object"] == "list" and len(listed["data"]) == 1
    assert card["id"] == "fake" and card["object"] == "model" and card["context_length"] == 256
    async with served.http.get(served.url + "/v1/models/fake") as answer:
        assert await answer.json() == card
    async with served.http.get(served.url + "/v1/models/other/name") as answer:
        assert answer.status == 404 and (await answer.json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"alias": "mine"}, "mine"),
        ({"model": "/x/Qwen3.6-35B-A3B-Q4_K_M-00001-of-00003.gguf"}, "Qwen3.6-35B-A3B-Q4_K_M"),
        ({"model": "/x/Qwen3.6-35B"}, "Qwen3.6-35B"),
    ],
)
def test_model_names(options: dict[str, str], name: str) -> None:
    from apu_engine.config import EngineConfig
    from apu_engine.server.app import Service

    assert Service(EngineConfig(**{"model": "fake.gguf", **options})).alias == name


async def test_tokenize(served: Served) -> None:
    assert await served.post("/tokenize", {"content": "hé"}) == (200, {"tokens": [104, 195, 169]})
    assert (await served.post("/tokenize", {"content": "h", "add_special": True}))[1] == {"tokens": [BOS, 104]}
    _, pieces = await served.post("/tokenize", {"content": "hé", "with_pieces": True})
    assert pieces["tokens"][:2] == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}]
    assert await served.post("/detokenize", {"tokens": [104, 195, 169]}) == (200, {"content": "hé"})
    status, error = await served.refused("/detokenize", {"tokens": [1, 260]})
    assert (status, error["param"]) == (400, "tokens") and "259" in error["message"]
