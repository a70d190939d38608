"""tokenizer.model, SentencePiece's own file, as the metadata keys that a GGUF file has for it.

A protocol buffer: field 1 of the model is a piece (text, score, type), 2 what it was trained as, 3 how text is
normalised. Everything else is skipped. Source: sentencepiece_model.proto of https://github.com/google/sentencepiece
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from apu_engine.errors import FormatError
from apu_engine.weights.strict_json import read_whole

MAX_BYTES = 64 << 20
MAX_PIECES = 1 << 22
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_BPE = 2
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6  # piece types, GGUF's numbers too
_SPACE = "\u2581"


def sentencepiece_keys(path: Path) -> tuple[dict[str, Any], str]:
    """(keys below `tokenizer.ggml.`, why there are none). Raises FormatError for a file that is malformed."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trained = {3: 1, 40: 0, 41: 1, 42: 2, 43: -1}  # the format's defaults: unigram; unk, bos, eos and pad ids
    prefix, kinds = 1, set(range(_NORMAL, _BYTE + 1))
    data = read_whole(path, MAX_BYTES)
    for number, value in _fields(path, data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(path, value))
            text, score, kind = piece.get(1, b""), piece.get(2, 0.0), piece.get(3, _NORMAL)
            if not isinstance(text, bytes) or not isinstance(score, float) or kind not in kinds:
                raise FormatError(path, f"piece {len(tokens)}", f"expected text, score and type, found {piece!r:.80}")
            try:
                token = text.decode()
            except UnicodeDecodeError:
                raise FormatError(path, f"piece {len(tokens)}", f"is not UTF-8: {text[:32]!r}") from None
            if kind == _USER_DEFINED and not token.strip(_SPACE):
                token = " " * len(token)  # runs of spaces, as converters write them
            tokens.append(token)
            scores.append(score)
            types.append(int(kind))
        elif number == 2 and isinstance(value, bytes):
            trained |= {key: _signed(item) for key, item in _fields(path, value) if isinstance(item, int)}
        elif number == 3 and isinstance(value, bytes):
            prefix = next((item for key, item in _fields(path, value) if key == 3 and isinstance(item, int)), 1)
    if not tokens or len(tokens) > MAX_PIECES:
        raise FormatError(path, "", f"holds {len(tokens):,} pieces, expected 1 to {MAX_PIECES:,}")
    if trained[3] != _BPE:
        return {}, "tokenizer.model was not trained as BPE"
    out: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "add_space_prefix": bool(prefix),
        "add_bos_token": 0 <= trained[41] < len(tokens),
    }
    for role, key in (("unknown", 40), ("bos", 41), ("eos", 42), ("padding", 43)):
        if 0 <= trained[key] < len(tokens):
            out[f"{role}_token_id"] = trained[key]
    return out, ""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(path: Path, data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of a message's fields, in order."""
    at = 0
    while at < len(data):
        key, at = _varint(path, data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(path, data, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _BYTES:
            size, at = _varint(path, data, at)
        elif not size:
            raise FormatError(path, "", f"is no SentencePiece model: wire type {wire} of field {number}")
        if size > len(data) - at:
            raise FormatError(path, "", f"is truncated: field {number} has {size:,} bytes; download it again")
        raw = data[at : at + size]
        at += size
        yield number, raw if wire == _BYTES else float(struct.unpack("<f" if size == 4 else "<d", raw)[0])


def _varint(path: Path, data: bytes, at: int) -> tuple[int, int]:
    """(value, where the next one is)"""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise FormatError(path, "", "is no SentencePiece model: a number does not end")
