"""tokenizer.model: ids that SentencePiece itself gave, what the files beside it change, and files that are broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from awkward import PLAIN, SPECIAL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apu_engine.errors import ApuError, FormatError
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.families import Hyper
from apu_engine.weights.tokenizer_json import PROBLEM, tokenizer_keys

MODELS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "spm.json").read_text())
ALL = PLAIN + SPECIAL


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value)


def message(key: int, raw: bytes) -> bytes:
    return varint(key << 3 | 2) + varint(len(raw)) + raw


def piece(text: str, score: float, kind: int) -> bytes:
    return message(1, message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))


def model_file(model: dict[str, Any], model_type: int = 2) -> bytes:
    rows = zip(model["pieces"], model["scores"], model["types"], strict=True)
    trainer = number(3, model_type) + message(1, b"corpus.txt") + number(43, -1)
    normalizer = message(1, b"identity") + number(3, int(model["dummy_prefix"]))
    return b"".join(piece(*row) for row in rows) + message(2, trainer) + message(3, normalizer)


def read(folder: Path, rows: int = 0) -> dict[str, Any]:
    return tokenizer_keys(folder, Hyper(folder / "config.json", {}), {}, rows)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_ids_equal_sentencepieces(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    (tmp_path / "tokenizer.model").write_bytes(model_file(model))
    tokenizer = Tokenizer.from_metadata(read(tmp_path), "folder")
    different = [
        text
        for text, ids in zip(ALL, model["ids"], strict=True)
        if tokenizer.encode(text, add_special=False, parse_special=False) != ids
    ]
    assert different == ([" " * 33] if name == "gemma" else [])  # see test_spm.py
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.encode("a")[0] == 1


def test_the_files_beside_it(tmp_path: Path) -> None:
    """Tokens that are added behind the pieces, names of special tokens, and rows of the table without a token."""
    model = MODELS["llama"]
    count = len(model["pieces"])
    (tmp_path / "tokenizer.model").write_bytes(model_file(model))
    added = {str(count): {"content": "<|end|>", "special": True}, str(count + 1): {"content": "<|tool|>"}}
    config = {"added_tokens_decoder": added, "eos_token": "<|end|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_metadata(read(tmp_path, count + 10), "folder")
    assert tokenizer.vocab_size == count + 10 and tokenizer.eos_id == count and not tokenizer.add_bos
    assert tokenizer.encode("<|end|><|tool|>", parse_special=True) == [count, count + 1]
    assert not {count, count + 1} & set(tokenizer.encode("<|end|><|tool|>"))
    assert tokenizer.token(count + 9) == f"[PAD{count + 9}]"


def test_unigram_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(MODELS["llama"], model_type=1))
    assert "not trained as BPE" in read(tmp_path)[PROBLEM]


VALID = model_file({"pieces": ["<unk>", "a"], "scores": [0.0, -1.0], "types": [2, 1], "dummy_prefix": True})
BROKEN = {
    "empty": (b"", "holds 0 pieces"),
    "text": (b"hello", "SentencePiece model|truncated|pieces"),
    "cut": (VALID[:9], "truncated"),
    "a number without end": (b"\x80" * 12, "does not end"),
    "a field of 2^40 bytes": (varint(1 << 3 | 2) + varint(1 << 40), "truncated"),
    "wire type 3": (b"\x0b", "wire type 3"),
    "a piece of type 9": (piece("a", 0.0, 9), "expected text, score and type"),
    "a piece that is not UTF-8": (message(1, message(1, b"\xff")), "is not UTF-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed(tmp_path: Path, name: str) -> None:
    raw, words = BROKEN[name]
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(FormatError, match=words) as caught:
        read(tmp_path)
    assert caught.value.file == str(tmp_path / "tokenizer.model")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(VALID) - 1), raw=st.binary(max_size=6), cut=st.integers(0, 6))
def test_whatever_happens_to_its_bytes(tmp_path: Path, at: int, raw: bytes, cut: int) -> None:
    (tmp_path / "tokenizer.model").write_bytes(VALID[:at] + raw + VALID[at + cut :])
    try:
        keys = read(tmp_path)
        if PROBLEM not in keys:
            Tokenizer.from_metadata(keys, "folder")
    except ApuError:
        pass
