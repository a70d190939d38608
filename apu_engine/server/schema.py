"""What requests may hold. Decoding is strict: a wrong type, a value out of range or an unknown field is a 400.

Fields that OpenAI's API defines and this server does not support yet are listed in `_UNSUPPORTED`: they are accepted
only with the value that means their absence, so that nothing a client asks for is silently ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from apu_engine.server.errors import ApiError

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "reasoning_effort": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "verbosity": (None,),
    "web_search_options": (None,),
}
# Accepted and without effect: they never change what is generated.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}

Stop = str | Annotated[list[str], Meta(max_length=16)] | None
Count = Annotated[int, Meta(ge=0, le=1 << 24)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None


class _Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share; None takes the server's default."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False


class ChatRequest(_Sampling, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Sampling, forbid_unknown_fields=True, kw_only=True):
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


def decode(body: bytes, kind: type[T]) -> T:
    """A checked request, or ApiError 400 whose `param` names the field."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        found = type(fields).__name__
        raise ApiError(400, f"the body must be a JSON object, found {found}", code="invalid_json")
    known = {f.encode_name for f in msgspec.structs.fields(kind)}
    for name in list(fields):
        if name in known:
            continue
        if name in _UNSUPPORTED:
            if fields[name] not in _UNSUPPORTED[name]:
                raise ApiError(400, f"{name}: not supported by this server", name, "unsupported_field")
            del fields[name]
        elif name in _IGNORED:
            del fields[name]
        else:
            raise ApiError(400, f"{name}: unknown field", name, "unknown_field")
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        match = re.search(r"at `\$\.([^`\[]+)", str(error)) or re.search(r"field `([^`]+)`", str(error))
        param = match.group(1).removesuffix("[...]") if match else None
        raise ApiError(400, f"{param or 'body'}: {error}", param, "invalid_value") from error


def stop_strings(stop: Stop) -> list[str]:
    """The stop strings of a request; an empty one would end everything and is refused."""
    found = [stop] if isinstance(stop, str) else list(stop or ())
    if any(not s for s in found):
        raise ApiError(400, "stop: an empty stop string would match everywhere", "stop", "invalid_value")
    return found


def logit_bias(bias: dict[str, float] | None, vocabulary: int) -> dict[int, float]:
    """Token ids as numbers, checked against the vocabulary."""
    result = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and int(key) < vocabulary):
            raise ApiError(
                400,
                f"logit_bias: expected token ids from 0 to {vocabulary - 1}, found {key[:40]!r}",
                "logit_bias",
                "invalid_value",
            )
        result[int(key)] = value
    return result


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content, `developer` as `system`; other content is refused."""
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.tool_calls or message.tool_call_id is not None or message.role == "tool":
            raise ApiError(400, f"{where}: tool calls are not supported by this server", where, "unsupported_field")
        content = message.content
        if isinstance(content, list):
            texts = []
            for part in content:
                if not isinstance(part, TextPart) or part.type != "text" or part.text is None:
                    kind = part.type if isinstance(part, TextPart) else part.get("type")
                    raise ApiError(
                        400,
                        f"{where}.content: parts of type {str(kind)[:40]!r} are not supported, only text",
                        where,
                        "unsupported_content",
                    )
                texts.append(part.text)
            content = "\n".join(texts)
        if content is None:
            raise ApiError(400, f"{where}.content: expected text, found null", where, "invalid_value")
        role = "system" if message.role == "developer" else message.role
        plain = {"role": role, "content": content}
        if message.name is not None:
            plain["name"] = message.name
        result.append(plain)
    return result
