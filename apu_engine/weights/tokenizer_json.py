"""A folder's tokenizer and chat template as the metadata keys that a GGUF file has for them.

tokenizer.json gives vocabulary, merges and added tokens; its normaliser and pre-tokenizer stay JSON, which the
tokenizers library builds (text/pretokenizers.py), but without what they put before a text: that is a flag here, as
text comes in parts. Names of special tokens and flags come from tokenizer_config.json, ids that end an answer from
generation_config.json, else from config.json. Without a tokenizer.json, tokenizer.model has SentencePiece's pieces. A
tokenizer that cannot be used leaves the reason under `tokenizer.problem`, and the model runs on token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from apu_engine.errors import FormatError
from apu_engine.weights.families import Hyper
from apu_engine.weights.model_file import StringArray
from apu_engine.weights.sentencepiece import sentencepiece_keys
from apu_engine.weights.strict_json import read_object, read_whole

MAX_TOKENIZER = 128 << 20
MAX_CONFIG = 8 << 20
MAX_TEMPLATE = 1 << 20
MAX_TOKENS = 1 << 24
PROBLEM = "tokenizer.problem"
PIPELINE = "tokenizer.pipeline"  # JSON: {"normalizer": ..., "pre_tokenizer": ...}
_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    type: str = "BPE"
    vocab: Any = None
    merges: list[str | tuple[str, str]] = []
    unk_token: str | None = None
    byte_fallback: bool = False
    ignore_merges: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def tokenizer_keys(folder: Path, hyper: Hyper, generation: dict[str, Any], rows: int = 0) -> dict[str, Any]:
    """The `tokenizer.ggml.*` keys of a folder, or the reason why there are none.

    An embedding table of more `rows` than there are tokens is padded, so that every id is one.
    Raises FormatError for a file that is malformed.
    """
    path, own = folder / "tokenizer.json", folder / "tokenizer.model"
    config_path = folder / "tokenizer_config.json"
    config = read_object(config_path, MAX_CONFIG) if config_path.is_file() else {}
    if path.is_file():
        tokenizer = _read(path)
        if problem := _unsupported(tokenizer):
            return {PROBLEM: f"{path}: {problem}, which is not supported; the model can run on token ids only"}
        return _keys(path, tokenizer, config, hyper, generation, rows)
    if not own.is_file():
        return {PROBLEM: f"{folder}: has no tokenizer.json or tokenizer.model, so it can run on token ids only"}
    keys, problem = sentencepiece_keys(own)
    if problem:
        return {PROBLEM: f"{own}: {problem}, which is not supported; the model can run on token ids only"}
    return _with_config(own, keys, config, hyper, generation, rows)


def _read(path: Path) -> _Tokenizer:
    data = read_whole(path, MAX_TOKENIZER)
    try:
        return msgspec.json.decode(data, type=_Tokenizer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(path, "", f"is no tokenizer that can be read: {error}") from None


def _unsupported(tokenizer: _Tokenizer) -> str:
    model = tokenizer.model
    if model.type != "BPE" or not isinstance(model.vocab, dict):
        return f"model.type is {model.type!r:.40}"
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return "model has marks for the parts of words"
    return ""


def _keys(
    path: Path, tokenizer: _Tokenizer, config: dict[str, Any], hyper: Hyper, generation: dict[str, Any], rows: int
) -> dict[str, Any]:
    byte_level = _holds(tokenizer.pre_tokenizer, "ByteLevel") or _holds(tokenizer.decoder, "ByteLevel")
    ids = _vocabulary(path, tokenizer)
    tokens, types = _tokens(path, tokenizer, ids, byte_level, rows)
    normalizer, first = _without_prefix(tokenizer.normalizer)
    pre_tokenizer, second = _without_prefix(tokenizer.pre_tokenizer)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer.model.merges]
    out: dict[str, Any] = {
        "model": "gpt2" if byte_level else "llama",
        "tokens": _strings(tokens, path, "model.vocab"),
        "token_type": types,
        "merges": _strings(merges, path, "model.merges"),
        "add_space_prefix": first or second,
        "space_prefix_joins": second,
        "ignore_merges": tokenizer.model.ignore_merges,
    }
    for name, role in _ROLES.items():
        token = _content(config.get(name))
        if token is None and role == "unknown":
            token = tokenizer.model.unk_token
        if token is not None and token in ids:
            out[f"{role}_token_id"] = ids[token]
    ends = _id_list(generation.get("eos_token_id")) or _id_list(hyper.get("eos_token_id"))
    ends = [end for end in ends if end < len(tokens)]
    if "bos_token_id" not in out and type(bos := hyper.get("bos_token_id")) is int and 0 <= bos < len(tokens):
        out["bos_token_id"] = bos
    if ends:
        out.setdefault("eos_token_id", ends[0])
        out["eog_token_ids"] = np.unique(np.array(ends, np.int64))
    out |= _frame(tokenizer.post_processor, config, out)
    pipeline = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    return {f"{_KEY}{name}": value for name, value in out.items()} | {PIPELINE: json.dumps(pipeline)}


def _with_config(
    path: Path, keys: dict[str, Any], config: dict[str, Any], hyper: Hyper, generation: dict[str, Any], rows: int
) -> dict[str, Any]:
    """SentencePiece's pieces with the tokens that tokenizer_config.json adds or renames, up to as many as `rows`."""
    tokens, types = list(keys["tokens"]), keys["token_type"].tolist()
    added = config.get("added_tokens_decoder", {})
    for number, token in added.items() if isinstance(added, dict) else ():
        if not number.isdecimal() or _content(token) is None or not 0 <= int(number) < MAX_TOKENS:
            raise FormatError(path.parent / "tokenizer_config.json", "added_tokens_decoder", f"holds {number!r:.40}")
        at = int(number)
        if at > 2 * len(keys["tokens"]) + 1024:
            raise FormatError(path.parent / "tokenizer_config.json", "added_tokens_decoder", f"has an id of {at:,}")
        _pad(tokens, types, at + 1)
        tokens[at] = _content(token)
        if types[at] in (_NORMAL, _UNUSED):
            types[at] = _CONTROL if token.get("special") else _USER_DEFINED
    _pad(tokens, types, min(rows, MAX_TOKENS))
    scores = np.full(len(tokens), -1e6, np.float32)
    scores[: len(keys["scores"])] = keys["scores"]
    out = keys | {"tokens": _strings(tokens, path, "pieces"), "scores": scores, "token_type": np.array(types, np.int32)}
    ids = {token: number for number, token in enumerate(tokens)}
    for name, role in _ROLES.items():
        if (special := _content(config.get(name))) in ids:
            out[f"{role}_token_id"] = ids[special]
    ends = _id_list(generation.get("eos_token_id")) or _id_list(hyper.get("eos_token_id"))
    if ends := [end for end in ends if end < len(tokens)]:
        out["eog_token_ids"] = np.unique(np.array(ends, np.int64))
    for role in ("bos", "eos"):
        if isinstance(said := config.get(f"add_{role}_token"), bool):
            out[f"add_{role}_token"] = said and f"{role}_token_id" in out
    return {f"{_KEY}{name}": value for name, value in out.items()}


def _pad(tokens: list[str], types: list[int], size: int) -> None:
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        types.append(_UNUSED)


def _vocabulary(path: Path, tokenizer: _Tokenizer) -> dict[str, int]:
    ids: dict[str, int] = dict(tokenizer.model.vocab)
    if ids and (set(map(type, ids.values())) != {int} or not 0 <= min(ids.values()) <= max(ids.values()) < MAX_TOKENS):
        raise FormatError(path, "model.vocab", f"expected ids from 0 to {MAX_TOKENS:,}")
    for added in tokenizer.added_tokens:
        if not 0 <= added.id < MAX_TOKENS:
            raise FormatError(path, "added_tokens", f"{added.content!r:.80} has id {added.id}")
        ids[added.content] = added.id
    if not ids:
        raise FormatError(path, "model.vocab", "is empty")
    return ids


def _tokens(
    path: Path, tokenizer: _Tokenizer, ids: dict[str, int], byte_level: bool, rows: int
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    """(tokens by id, their types); ids without a token are unused ones."""
    size = max(ids.values()) + 1
    if size > 2 * len(ids) + 1024:
        raise FormatError(path, "model.vocab", f"has {len(ids):,} tokens, but ids up to {size - 1:,}")
    size = max(size, min(rows, MAX_TOKENS))
    tokens: list[str] = [""] * size
    types = np.full(size, _UNUSED, np.int32)
    for token, token_id in ids.items():
        tokens[token_id] = token
    numbers = np.fromiter(ids.values(), np.int64, len(ids))
    types[numbers] = _NORMAL
    if not byte_level:
        for byte in range(256):
            if (found := ids.get(f"<0x{byte:02X}>")) is not None:
                types[found] = _BYTE
    if (unknown := tokenizer.model.unk_token) is not None and unknown in ids:
        types[ids[unknown]] = _UNKNOWN
    for added in tokenizer.added_tokens:
        types[added.id] = _CONTROL if added.special else _USER_DEFINED
    for token_id in np.flatnonzero(types == _UNUSED).tolist():
        tokens[token_id] = f"[PAD{token_id}]"
    return tokens, types


def _strings(values: list[str], path: Path, field: str) -> StringArray:
    raw = [value.encode("utf-8", "surrogatepass") for value in values]
    ends = np.cumsum(np.fromiter(map(len, raw), np.int64, len(raw)))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if raw else ends
    return StringArray(b"".join(raw), starts, ends, path, field)


def _holds(part: Any, kind: str) -> bool:
    return any(item.get("type") == kind for item in _each(part))


def _each(part: Any) -> Iterable[dict[str, Any]]:
    """A component and those within it."""
    if isinstance(part, dict):
        yield part
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            for item in part.get(name) or ():
                yield from _each(item)


def _without_prefix(part: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
    """A component without what it puts before a text, and whether it did."""
    if part is None:
        return None, False
    if part.get("type") == "Prepend" and part.get("prepend") == _SPACE:
        return None, True
    if part.get("type") == "Metaspace":
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        kept = {name: value for name, value in part.items() if name != "add_prefix_space"}
        return kept | {"prepend_scheme": "never"}, scheme != "never"
    for name in ("normalizers", "pretokenizers"):
        if isinstance(part.get(name), list):
            found = [_without_prefix(item) for item in part[name] if isinstance(item, dict)]
            kept_parts = [item for item, _ in found if item is not None]
            return (part | {name: kept_parts} if kept_parts else None), any(prefix for _, prefix in found)
    return part, False


def _content(token: Any) -> str | None:
    """A special token is a string, or an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _frame(post: dict[str, Any] | None, config: dict[str, Any], found: dict[str, Any]) -> dict[str, bool]:
    """Whether BOS and EOS are put around a text: as tokenizer_config.json says, else as the post-processor does."""
    single = next((item.get("single") for item in _each(post) if item.get("type") == "TemplateProcessing"), None)
    names = [item.get("SpecialToken", {}).get("id") if isinstance(item, dict) else None for item in single or []]
    out: dict[str, bool] = {}
    for role, place in (("bos", 0), ("eos", -1)):
        known = f"{role}_token_id" in found
        given = config.get(f"add_{role}_token")
        token = _content(config.get(f"{role}_token"))
        framed = bool(names) and names[place] is not None and (token is None or names[place] == token)
        out[f"add_{role}_token"] = known and (given if isinstance(given, bool) else framed)
    return out


# ---------------------------------------------------------------- chat templates


def template_keys(folder: Path) -> dict[str, str]:
    """`tokenizer.chat_template`, and those for a purpose with its name behind."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return {"tokenizer.chat_template": _text(own)} | {
            f"tokenizer.chat_template.{path.stem}": _text(path)
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        given = read_object(path, MAX_CONFIG).get("chat_template")
        if isinstance(given, str):
            return {"tokenizer.chat_template": given}
        if isinstance(given, list):
            named = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
            return {
                "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): template
                for name, template in named.items()
                if isinstance(template, str)
            }
    return {}


def _text(path: Path) -> str:
    try:
        return read_whole(path, MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise FormatError(path, "", f"is not UTF-8 (byte {error.start:,})") from None
