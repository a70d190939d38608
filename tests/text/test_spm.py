"""SentencePiece vocabularies: ids that SentencePiece itself gave, and its rule written out for random scores."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awkward import PLAIN, SPECIAL
from hypothesis import given
from hypothesis import strategies as st
from tiny import BYTE, CONTROL, NORMAL, UNKNOWN, USER, P, spm_metadata

from apu_engine.text import spm
from apu_engine.text.tokenizer import Tokenizer

MODELS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "spm.json").read_text())
ALL = PLAIN + SPECIAL


def from_model(model: dict[str, Any]) -> Tokenizer:
    """As converters write it: user-defined pieces with real spaces."""
    tokens = [
        piece.replace("▁", " ") if kind == USER else piece
        for piece, kind in zip(model["pieces"], model["types"], strict=True)
    ]
    meta = {
        P + "model": "llama",
        P + "tokens": tokens,
        P + "scores": np.array(model["scores"], np.float32),
        P + "token_type": np.array(model["types"], np.int32),
        P + "add_space_prefix": model["dummy_prefix"],
        P + "bos_token_id": 1,
        P + "eos_token_id": 2,
        P + "unknown_token_id": 0,
    }
    return Tokenizer.from_metadata(meta, "spm.gguf")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_ids_equal_sentencepieces(name: str) -> None:
    model = MODELS[name]
    tokenizer = from_model(model)
    assert len(model["ids"]) == len(ALL)
    different = [
        text for text, ids in zip(ALL, model["ids"], strict=True) if tokenizer.encode(text, add_special=False) != ids
    ]
    # A run of spaces longer than the longest piece for one: SentencePiece takes the longest piece again and again, the
    # published tokenizers of such vocabularies (Gemma's) merge spaces in pairs. We do as those do.
    assert different == ([" " * 33] if name == "gemma" else [])


def test_the_dummy_prefix_goes_before_each_sentence() -> None:
    tokenizer = from_model(MODELS["llama"])
    word = tokenizer.encode("word", add_special=False)
    assert tokenizer.token(word[0]).startswith("▁")
    assert tokenizer.encode("word") == [1, *word]
    # A BOS that a template wrote starts a sentence; any other control token does not.
    assert tokenizer.encode("<s>word", parse_special=True) == [1, *word]
    ends = tokenizer.encode("word</s>word", parse_special=True)
    after = ends[ends.index(2) + 1 :]
    assert tokenizer.decode(after, continuation=True) == "word"
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(word) == "word"
    assert tokenizer.decode(word, continuation=True) == " word"
    assert tokenizer.decode(tokenizer.encode("  word", add_special=False)) == "  word"


def test_unknown_characters_without_byte_pieces() -> None:
    tokenizer = from_model(MODELS["no bytes"])
    ids = tokenizer.encode("a你好b", add_special=False)
    assert ids.count(0) == 1  # adjacent unknown characters are one unknown token


def test_byte_pieces_spell_what_no_piece_does() -> None:
    tokenizer = from_model(MODELS["llama"])
    ids = tokenizer.encode("你", add_special=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids[-3:]] == [b"\xe4", b"\xbd", b"\xa0"]
    assert tokenizer.decode(ids) == "你"


def sentencepiece_rule(text: str, scores: dict[str, float]) -> list[str]:
    """Join the adjacent pair whose concatenation scores best, the leftmost of equals, until none is a piece."""
    symbols = list(text)
    while True:
        found = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not found:
            return symbols
        _, at = min(found)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(st.data())
def test_any_scores_give_what_sentencepieces_rule_gives(data: st.DataObject) -> None:
    """Also scores that no training gives, where a long piece beats the parts it is made of."""
    pieces = data.draw(st.lists(st.text("ab▁", min_size=2, max_size=6), unique=True, max_size=25))
    order = data.draw(st.permutations(range(len(pieces))))
    rows = [("a", -100.0, NORMAL), ("b", -101.0, NORMAL), ("▁", -102.0, NORMAL)]
    rows += [(piece, -float(rank), NORMAL) for piece, rank in zip(pieces, order, strict=True)]
    tokenizer = Tokenizer.from_metadata(spm_metadata(rows, add_space_prefix=False), "tiny.gguf")
    scores = {piece: score for piece, score, _ in rows if len(piece) > 1}
    for text in data.draw(st.lists(st.text("ab ", max_size=30), min_size=1, max_size=5)):
        expected = sentencepiece_rule(text.replace(" ", "▁"), scores)
        assert [tokenizer.token(token_id) for token_id in tokenizer.encode(text, add_special=False)] == expected


@given(st.lists(st.text("ab▁ü😀", max_size=7), unique=True, max_size=40), st.randoms(use_true_random=False))
def test_derived_merges_are_exactly_all_splits(pieces: list[str], random: Any) -> None:
    pieces = [*pieces, "x"]
    products = np.array(random.sample(range(len(pieces)), random.randint(0, len(pieces))), dtype=np.int64)
    assert spm.derive_merges(pieces, products) == spm.derive_merges(pieces, products, exact=True)


def test_colliding_slots_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few slots nearly every piece shares its slot with others."""
    pieces = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop"] + list("abcdefghijklmnop")
    products = np.arange(64)
    expected = spm.derive_merges(pieces, products, exact=True)
    monkeypatch.setattr(spm, "_TABLE_BITS", 2)
    assert spm.derive_merges(pieces, products) == expected
    assert len(expected) == 64


def test_user_defined_text_is_matched_first_and_markup_is_not_text() -> None:
    rows = [(char, -100.0 - at, NORMAL) for at, char in enumerate("<b>x▁hi/")]
    rows += [("<b>", 0.0, USER), ("<image>", 0.0, USER), ("  ", 0.0, USER), ("▁x", -1.0, NORMAL)]
    tokenizer = Tokenizer.from_metadata(spm_metadata(rows, add_space_prefix=False), "tiny.gguf")

    def tokens(text: str, parse_special: bool = False) -> list[str]:
        return [tokenizer.token(token_id) for token_id in tokenizer.encode(text, False, parse_special)]

    assert tokens("x<b>x") == ["x", "<b>", "x"]
    assert tokens("x  x x") == ["x", "  ", "x", "▁x"]
    assert "<image>" not in tokens("<image>")
    assert tokens("x<image>x", parse_special=True) == ["x", "<image>", "x"]


def test_types_that_no_text_becomes() -> None:
    rows = [(char, -100.0 - at, NORMAL) for at, char in enumerate("<s>/0x41unk")]
    rows += [("<s", -1.0, NORMAL), ("<u", -2.0, NORMAL), ("unk", -3.0, NORMAL), ("<un", -4.0, NORMAL)]
    tokenizer = Tokenizer.from_metadata(spm_metadata(rows, add_space_prefix=False), "tiny.gguf")
    kinds = tokenizer._vocabulary.types
    for text in ("<s>", "</s>", "<unk>", "<0x41>", "<s></s><unk><0x00>"):
        ids = tokenizer.encode(text, add_special=False)
        assert not {int(kinds[token_id]) for token_id in ids} & {CONTROL, UNKNOWN}
        assert tokenizer.decode(ids) == text
    assert BYTE not in {int(kinds[token_id]) for token_id in tokenizer.encode("<0x41>", add_special=False)}
