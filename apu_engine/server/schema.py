"""What requests may hold. Decoding is strict: a wrong type, a value out of range or an unknown field is a 400.

Fields that OpenAI's API defines and this server does not support yet are listed in `_UNSUPPORTED`: they are accepted
only with a value that asks for nothing, so that nothing a client asks for is silently ignored. docs/api.md lists all
fields.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

import msgspec
from msgspec import Meta

from apu_engine.errors import ConfigError
from apu_engine.server.errors import ApiError
from apu_engine.text.reasoning import EFFORTS, Effort

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "reasoning_effort": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
}
# Accepted and without effect: they never change what is generated.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
# What answers of a chat carry and clients send back: unsupported unless empty.
_EMPTY_IN_MESSAGES = ("tool_calls", "tool_call_id", "function_call", "audio", "annotations", "refusal")

Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Stop = str | list[str] | None
Role = Literal["system", "developer", "user", "assistant", "tool"]
# what texts of few values may be, for messages
_WORDS: dict[str, tuple[str, ...]] = {"reasoning_effort": EFFORTS, "role": get_args(Role)}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None
    refusal: Any = None


class _Generate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share; None takes the server's default."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None


class ChatRequest(_Generate, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None


class CompletionRequest(_Generate, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    add_special: bool = False
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]


T = TypeVar("T", bound=msgspec.Struct)


def invalid(field: str, problem: str, code: str = "invalid_value") -> NoReturn:
    """Raises the 400 that names `field`."""
    raise ApiError(400, f"{field}: {problem}", field, code)


def decode(body: bytes, kind: type[T]) -> T:
    """A checked request, or ApiError 400 whose `param` names the field."""
    fields = _parse(body)
    known = kind.__struct_fields__
    for name in list(fields):
        if name in known:
            continue
        if name in _UNSUPPORTED:
            if fields[name] not in _UNSUPPORTED[name]:
                invalid(name, "not supported by this server", "unsupported_field")
            del fields[name]
        elif name in _IGNORED:
            del fields[name]
        else:
            close = difflib.get_close_matches(name, known, 1) if len(name) <= 40 else []
            hint = f"; did you mean {close[0]}?" if close else ""
            invalid(name[:80], f"unknown field{hint}", "unknown_field")
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _wrong(str(error)) from None


def _parse(body: bytes) -> dict[str, Any]:
    """The one JSON object in `body`: UTF-8, every name once, finite numbers, no lone surrogates."""
    try:
        fields = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_check_names)  # msgspec takes the last of several equal names
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is not valid JSON for this request: expected an object", code="invalid_json")
    return fields


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    seen = set()
    for name, _ in pairs:
        if name in seen:
            invalid(name[:80], "given twice", "duplicate_field")
        seen.add(name)


def _wrong(problem: str) -> ApiError:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" with the field in front."""
    at = " - at `$"  # a text of the client's may hold it too
    what, _, where = problem.rpartition(at) if at in problem else (problem, "", "")
    path = where.rstrip("`").lstrip(".")
    code = "invalid_value"
    if match := re.search(r"(required|unknown) field `(.+)`", what):
        path = f"{path}.{match[2][:80]}".lstrip(".")
        code, what = ("missing_field", "missing") if match[1] == "required" else ("unknown_field", "unknown field")
    if match := re.fullmatch(r"Invalid enum value '(.*)'", what, re.DOTALL):
        what = f"found '{match[1][:40]}'"  # escaped already
        words = _WORDS.get(path.rpartition(".")[2])
        what = f"expected one of {', '.join(words)}, {what}" if words else f"not supported: {what}"
    return ApiError(400, f"{path or 'body'}: {what}", path or None, code)


def stop_strings(stop: Stop) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


def logit_bias(bias: dict[str, float] | None, vocabulary: int) -> dict[int, float]:
    """Token ids as numbers, checked against the vocabulary."""
    result = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocabulary):
            invalid("logit_bias", f"expected token ids from 0 to {vocabulary - 1}, found {key[:40]!r}")
        result[int(key)] = value
    return result


def seed(value: int) -> int:
    """Signed and unsigned 64-bit seeds; negative ones, which OpenAI's API has, become large ones."""
    if not -(1 << 63) <= value < 1 << 64:
        invalid("seed", f"expected a 64-bit integer, found {str(value)[:40]}")
    return value % (1 << 64)


def template_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """What a request hands to the chat template besides its messages."""
    for name in ("messages", "tools", "self"):
        if name in (options or {}):
            invalid(f"chat_template_kwargs.{name}", "not supported by this server", "unsupported_field")
    return options or {}


@contextlib.contextmanager
def template_errors() -> Iterator[None]:
    """Errors of the chat template's options under the names that requests have for them."""
    try:
        yield
    except ConfigError as error:
        head, dot, name = error.option.partition(".")
        if head != "template_options":
            raise
        field = f"chat_template_kwargs{dot}{name}"
        raise ApiError(400, str(error).replace(error.option, field, 1), field, "unsupported_field") from None


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, `developer` as `system`; other content is refused."""
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        for name in _EMPTY_IN_MESSAGES:
            if getattr(message, name):
                invalid(f"{where}.{name}", "not supported by this server", "unsupported_field")
        if message.role == "tool":
            invalid(f"{where}.role", "tool messages are not supported by this server", "unsupported_field")
        role = "system" if message.role == "developer" else message.role
        plain = {"role": role, "content": _text(message.content, f"{where}.content")}
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        result.append(plain)
    return result


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        invalid(where, "expected text, found null")
    texts = []
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        if part.get("type") != "text":
            kind = str(part.get("type"))[:40]
            invalid(f"{at}.type", f"content of type {kind!r} is not supported, only text", "unsupported_content")
        if not isinstance(part.get("text"), str):
            invalid(f"{at}.text", "expected text")
        if other := sorted(part.keys() - {"type", "text"}):
            invalid(f"{at}.{other[0][:80]}", "unknown field", "unknown_field")
        texts.append(part["text"])
    return "\n".join(texts)
