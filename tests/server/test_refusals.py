"""What is refused: fields, values, bodies, media types, methods, keys; each as an error object that names the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_fakes import CHAT, Served, serving

from apu_engine.config import spec
from apu_engine.engine.job import EngineClosedError
from apu_engine.errors import ApuError, ConfigError, MappingError, ModelError
from apu_engine.server import schema
from apu_engine.server.errors import ApiError, api_error
from apu_engine.server.openai import SAMPLING_FIELDS
from apu_engine.text.errors import TemplateError, TextError

CHAT_PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1 << 70}, "max_tokens", "invalid_value"),
        ({"seed": 1 << 64}, "seed", "invalid_value"),
        ({"seed": -(1 << 63) - 1}, "seed", "invalid_value"),
        ({"seed": "1"}, "seed", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_value"),
        ({"stop": ["x"] * 65}, "stop", "invalid_value"),
        ({"stop": "x" * 1025}, "stop", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"260": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "invalid_value"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_field"),
        ({"temprature": 1}, "temprature", "unknown_field"),
        ({"x" * 5000: 1}, "x" * 80, "unknown_field"),
        ({"n": 2}, "n", "unsupported_field"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_field"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_field"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
        ({"reasoning_effort": 1}, "reasoning_effort", "invalid_value"),
        ({"reasoning_effort": "max"}, "reasoning_effort", "invalid_value"),  # a model that thinks or does not
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "invalid_value",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "unsupported_field"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "unsupported_field"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_value"),
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_value"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_field"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{**USER, "weight": 1}]}, "messages[0].weight", "unknown_field"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_field"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls", "unsupported_field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "unsupported_content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages[0].content[0].y",
            "unknown_field",
        ),
    ],
)
async def test_chat_fields(served: Served, change: dict[str, Any], param: str | None, code: str) -> None:
    status, error = await served.refused(CHAT_PATH, {**CHAT, **change})
    assert (status, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
    assert param is None or error["message"].startswith(param), error
    assert len(error["message"]) < 300


async def test_words_are_listed(served: Served) -> None:
    _, error = await served.refused(CHAT_PATH, {**CHAT, "reasoning_effort": "x" * 5000})
    words = "none, minimal, low, medium, high, xhigh, max"
    assert error["message"] == f"reasoning_effort: expected one of {words}, found '{'x' * 40}'"
    _, error = await served.refused(CHAT_PATH, {**CHAT, "reasoning_effort": "x - at `$.y`"})
    assert error["param"] == "reasoning_effort", error
    _, error = await served.refused(CHAT_PATH, {"messages": [{"role": "bot", "content": "x"}]})
    assert error["message"].startswith("messages[0].role: expected one of system, ") and "'bot'" in error["message"]


async def test_close_name_is_suggested(served: Served) -> None:
    _, error = await served.refused(CHAT_PATH, {**CHAT, "max_token": 1})
    assert error["message"] == "max_token: unknown field; did you mean max_tokens?"


async def test_missing_fields(served: Served) -> None:
    assert (await served.refused(CHAT_PATH, {}))[1]["param"] == "messages"
    assert (await served.refused("/v1/completions", {}))[1]["param"] == "prompt"
    assert (await served.refused("/tokenize", {}))[1]["param"] == "content"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], None, 1, [-1], [260], [1.5], [True], [None], ["a", "b"], [[1], [2]], [1, "a"], [{}], [[["a"]]]],
)
async def test_completion_prompts(served: Served, prompt: Any) -> None:
    if prompt == "":
        served.llm.tokenize = lambda *_, **__: []  # type: ignore[method-assign]  # a model without BOS
    status, error = await served.refused("/v1/completions", {"prompt": prompt})
    assert (status, error["param"]) == (400, "prompt"), error


@pytest.mark.parametrize("field", [{"n": 2}, {"best_of": 2}, {"echo": True}, {"suffix": "x"}, {"logprobs": True}])
async def test_completion_fields(served: Served, field: dict[str, Any]) -> None:
    status, error = await served.refused("/v1/completions", {"prompt": "x", **field})
    assert (status, error["param"]) == (400, next(iter(field)))


async def test_values_that_ask_for_nothing(served: Served) -> None:
    absent = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "reasoning_effort": None,
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
    }
    status, _ = await served.post(CHAT_PATH, {**CHAT, **absent})
    assert status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b"1", "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"temperature": Infinity}', "invalid_json"),
        (b'{"temperature": 1e999}', "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b'{"prompt": "a"} {}', "invalid_json"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "invalid_json"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_json"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_field"),
        (b'{"prompt": "a", "logit_bias": {"1": 0, "1": 1}}', "duplicate_field"),
    ],
)
async def test_bodies(served: Served, body: bytes, code: str) -> None:
    headers = {"Content-Type": "application/json"}
    status, error = await served.refused("/v1/completions", data=body, headers=headers)
    assert (status, error["code"]) == (400, code), error


@pytest.mark.parametrize("depth", [10, 100, 300, 500, 900, 990, 1100])
async def test_nesting_is_400_or_answered(served: Served, depth: int) -> None:
    nested = b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":'
    body = nested + b"[" * depth + b"]" * depth + b"}}"
    headers = {"Content-Type": "application/json"}
    async with served.http.post(served.url + CHAT_PATH, data=body, headers=headers) as answer:
        assert answer.status in (200, 400)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/problem+json", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("nonsense", 415),
        ("", 415),
    ],
)
async def test_media_types(served: Served, content_type: str, status: int) -> None:
    headers = {"Content-Type": content_type}
    async with served.http.post(served.url + CHAT_PATH, data=msgspec.json.encode(CHAT), headers=headers) as answer:
        assert answer.status == status
        if status == 415:
            error = (await answer.json())["error"]
            assert "application/json" in error["message"] and content_type in error["message"]


async def test_methods_and_paths(served: Served) -> None:
    for method, path, status, allow in (
        ("GET", CHAT_PATH, 405, "POST"),
        ("OPTIONS", CHAT_PATH, 405, "POST"),
        ("POST", "/health", 405, "GET,HEAD"),
        ("GET", "/nothing", 404, None),
        ("POST", "/v1", 404, None),
        ("GET", "/../etc/passwd", 404, None),
        ("GET", "/v1/models/%00", 404, None),
    ):
        async with served.http.request(method, served.url + path) as answer:
            assert (answer.status, answer.headers.get("Allow")) == (status, allow)
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
    for path, status in (("/health", 200), ("/v1/models", 200), ("/nothing", 404)):
        async with served.http.head(served.url + path) as answer:
            assert answer.status == status and await answer.read() == b""


async def test_log_and_errors_are_single_lines(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "apu_engine.server")
    async with served.http.get(served.url + "/a%0aERROR%20forged") as answer:
        assert answer.status == 404
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, error = await served.refused("/v1/completions", data=b"abcde", headers=headers)
    assert status == 400 and "\n" not in error["message"]
    lines = [record.getMessage() for record in caplog.records if record.name == "apu_engine.server"]
    assert len(lines) == 2 and not any("\n" in line for line in lines)
    assert api_error(MappingError("odd-\udcff\n.gguf", "is gone")).message == "odd-\\udcff .gguf: is gone"


async def test_api_key() -> None:
    async with serving(api_key="schlüssel") as served:
        for header in (None, "Bearer wrong", "Basic schlüssel", "Bearer", "Bearer \udcff", "schlüssel"):
            headers = {} if header is None else {"Authorization": header}
            status, error = await served.refused(CHAT_PATH, CHAT, headers=headers)
            assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
        for scheme in ("Bearer", "bearer"):
            status, _ = await served.post(CHAT_PATH, CHAT, headers={"Authorization": f"{scheme} schlüssel"})
            assert status == 200
        async with served.http.get(served.url + "/health") as answer:
            assert answer.status == 200
        async with served.http.get(served.url + "/v1/models") as answer:
            assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("streaming", [False, True])
async def test_template_refuses(served: Served, streaming: bool) -> None:
    def refuse() -> None:
        raise TemplateError("roles must alternate", "raised", 3)

    served.llm.render = refuse
    status, error = await served.refused(CHAT_PATH, {**CHAT, "stream": streaming})
    assert (status, error["param"], error["code"]) == (400, "messages", "template_error")
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("x: bad", "x"), 400, "invalid_value"),
        (ModelError("no tokenizer"), 400, "unsupported_by_model"),
        (TextError("surrogate"), 400, "invalid_value"),
        (TemplateError("slow", "time"), 400, "template_error"),
        (TemplateError("died", "worker"), 500, "engine_error"),
        (MappingError("/m.gguf", "was truncated"), 503, "model_file_changed"),
        (EngineClosedError("closing"), 503, "engine_closed"),
        (ApuError("kernel"), 500, "engine_error"),
        (ZeroDivisionError("secret detail"), 500, "internal_error"),
        (ApiError(418, "tea", code="pot"), 418, "pot"),
    ],
)
def test_errors_have_their_status(error: Exception, status: int, code: str) -> None:
    answer = api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in answer.message


@pytest.mark.parametrize("streaming", [False, True])
async def test_engine_fault_is_500(served: Served, streaming: bool) -> None:
    def fault() -> None:
        raise RuntimeError("a defect")

    served.llm.runner.fail = fault
    status, error = await served.refused(CHAT_PATH, {**CHAT, "stream": streaming})
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    served.llm.runner.fail = lambda: None
    assert (await served.post(CHAT_PATH, CHAT))[0] == 200


def test_sampling_fields_have_the_ranges_of_the_options() -> None:
    info = msgspec.inspect.type_info(schema.ChatRequest)
    fields = {field.name: field.type for field in info.fields}  # type: ignore[attr-defined]
    for name in SAMPLING_FIELDS:
        number: Any = next(kind for kind in fields[name].types if not isinstance(kind, msgspec.inspect.NoneType))
        assert (number.ge, number.le) == (spec(name).lo, spec(name).hi), name


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8")
    kinds = (schema.ChatRequest, schema.CompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest)
    names = {name for kind in kinds for name in kind.__struct_fields__}
    names |= set(schema._UNSUPPORTED) | set(schema._IGNORED) | set(schema.Message.__struct_fields__)
    missing = sorted(name for name in names if f"`{name}`" not in text)
    assert not missing, f"docs/api.md lacks {missing}"
