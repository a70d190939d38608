"""Tokenizer metadata that lies is refused by the key's name; odd but valid metadata is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONTROL, NORMAL, USER, P, bpe_metadata, spm_metadata

from apu_engine.errors import ApuError, FormatError, ModelError
from apu_engine.text.tokenizer import Tokenizer

PIECES = [("a", -1.0, NORMAL), ("b", -2.0, NORMAL), ("▁", -3.0, NORMAL), ("ab", -0.5, NORMAL)]


def bpe(**changes: Any) -> dict[str, Any]:
    meta = bpe_metadata("gpt-2", [("a", "b")], [("<|end|>", CONTROL), ("<|begin|>", CONTROL)])
    return changed(meta, changes)


def llama(**changes: Any) -> dict[str, Any]:
    return changed(spm_metadata(PIECES), changes)


def changed(meta: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if value is None:
            meta.pop(P + key, None)
        else:
            meta[P + key] = value
    return meta


def refuse(meta: dict[str, Any], kind: type[ApuError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        Tokenizer.from_metadata(meta, "lying.gguf")
    message = str(caught.value)
    assert "lying.gguf" in message
    for word in words:
        assert word in message, message


def test_no_tokenizer_names_the_missing_key() -> None:
    refuse({}, ModelError, "tokenizer.ggml.model", "missing")
    refuse({"general.architecture": "llama"}, ModelError, "tokenizer.ggml.model")
    refuse(bpe(tokens=None), ModelError, "tokenizer.ggml.tokens", "missing")
    refuse(bpe(model="none"), ModelError, "has no tokenizer")


@pytest.mark.parametrize("kind", ["gemma4", "bert", "t5", "rwkv", "plamo2", "", "GPT2"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    refuse(bpe(model=kind), ModelError, f"tokenizer.ggml.model = {kind!r}", "'gpt2'", "'llama'")


@pytest.mark.parametrize("role", ["bos", "eos", "eot", "eom", "unknown", "padding", "mask"])
@pytest.mark.parametrize("bad", [259, 2**32 - 1, -1, np.uint32(4_000_000)])
def test_ids_outside_the_vocabulary(role: str, bad: int) -> None:
    refuse(bpe(**{f"{role}_token_id": bad}), FormatError, f"{role}_token_id", "outside the vocabulary of 259")


def test_lengths_that_disagree() -> None:
    for length in (0, 258, 260):
        refuse(bpe(token_type=np.ones(length, np.int32)), FormatError, "token_type", "for 259 tokens")
        refuse(llama(scores=np.zeros(length, np.float32)), FormatError, "scores", "for 263 tokens")


def test_values_that_cannot_be() -> None:
    types = bpe()[P + "token_type"].copy()
    types[7] = 9
    refuse(bpe(token_type=types), FormatError, "token_type", "entry 7 is 9")
    scores = llama()[P + "scores"].copy()
    scores[5] = np.nan
    refuse(llama(scores=scores), FormatError, "scores", "entry 5 is not a number")
    refuse(llama(scores=None), ModelError, "tokenizer.ggml.scores", "missing")
    refuse(bpe(merges=None), FormatError, "tokenizer.ggml.merges", "missing")
    refuse(bpe(tokens=[]), FormatError, "tokenizer.ggml.tokens", "empty")
    refuse(bpe(add_bos_token=True), FormatError, "add_bos_token", "bos_token_id is missing")
    refuse(bpe(add_eos_token=True), FormatError, "add_eos_token", "eos_token_id is missing")
    tokens = llama()[P + "tokens"].copy()
    tokens[20] = "<0xZZ>"
    refuse(llama(tokens=tokens), FormatError, "tokenizer.ggml.tokens[20]", "<0xZZ>")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 3),
        ("model", ["gpt2"]),
        ("pre", 1.5),
        ("tokens", "abc"),
        ("tokens", 7),
        ("tokens", np.arange(259)),
        ("tokens", [b"a"] * 259),
        ("merges", 1),
        ("merges", np.arange(3)),
        ("token_type", "x"),
        ("token_type", ["1"] * 259),
        ("token_type", np.ones((259, 1), np.int32)),
        ("scores", ["0"] * 259),
        ("bos_token_id", "1"),
        ("bos_token_id", 1.0),
        ("bos_token_id", True),
        ("add_bos_token", 1),
        ("add_bos_token", "true"),
        ("add_space_prefix", 0),
    ],
)
def test_values_of_the_wrong_type(key: str, value: Any) -> None:
    refuse(bpe(**{key: value}), FormatError, f"tokenizer.ggml.{key}", "expected")


def test_duplicates_are_valid() -> None:
    """The last of equal entries encodes, as in the published conversions; all of them decode."""
    meta = bpe()
    meta[P + "tokens"][200] = "ab"
    tokenizer = Tokenizer.from_metadata(meta, "odd.gguf")
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.decode([200, 256]) == "abab"
    spm = llama()
    spm[P + "tokens"][262] = "a"
    tokenizer = Tokenizer.from_metadata(spm, "odd.gguf")
    assert tokenizer.decode(tokenizer.encode("ab", add_special=False)) == "ab"


def test_a_control_token_does_not_hide_its_equal() -> None:
    meta = bpe()
    meta[P + "tokens"][257] = "ab"  # CONTROL, after the normal one
    tokenizer = Tokenizer.from_metadata(meta, "odd.gguf")
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.encode("ab", parse_special=True) == [257]


def test_empty_entries_are_valid() -> None:
    for kind in (NORMAL, CONTROL, USER):
        meta = bpe()
        meta[P + "tokens"][257] = ""
        meta[P + "token_type"][257] = kind
        tokenizer = Tokenizer.from_metadata(meta, "odd.gguf")
        assert tokenizer.encode("x ab", parse_special=True) == [ord("x"), ord(" "), 256]
        assert tokenizer.decode([257]) == ""


def test_without_types_the_named_tokens_are_control_tokens() -> None:
    meta = bpe(token_type=None, eos_token_id=257, bos_token_id=258)
    tokenizer = Tokenizer.from_metadata(meta, "old.gguf")
    assert tokenizer.encode("<|end|>", parse_special=True) == [257]
    assert 257 not in tokenizer.encode("<|end|>")
    assert tokenizer.eog_ids == {257}
    assert tokenizer.decode([257, 256], skip_special=True) == "ab"


def test_one_token_vocabularies() -> None:
    tokenizer = Tokenizer.from_metadata({P + "model": "gpt2", P + "tokens": ["a"], P + "merges": []}, "odd.gguf")
    assert tokenizer.encode("aab") == [0, 0]
    tokenizer = Tokenizer.from_metadata(
        {P + "model": "llama", P + "tokens": ["a"], P + "scores": np.zeros(1), P + "add_bos_token": False}, "odd.gguf"
    )
    assert set(tokenizer.encode("aa")) <= {0}


def test_old_sentencepiece_files_without_ids() -> None:
    tokenizer = Tokenizer.from_metadata(llama(bos_token_id=None, eos_token_id=None, unknown_token_id=None), "old.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("a", add_special=True)[0] == 1


def test_add_eos() -> None:
    tokenizer = Tokenizer.from_metadata(bpe(eos_token_id=257, bos_token_id=258, add_eos_token=True), "odd.gguf")
    assert tokenizer.encode("ab") == [256, 257]
    assert tokenizer.encode("ab<|end|>", parse_special=True) == [256, 257]
    assert tokenizer.encode("ab", add_special=False) == [256]


def test_families_of_ends() -> None:
    names = ["<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "<end_of_turn>"]
    meta = bpe_metadata("gpt-4o", [("a", "b")], [(name, CONTROL) for name in names])
    meta[P + "eos_token_id"] = 257
    tokenizer = Tokenizer.from_metadata(meta, "harmony.gguf")
    # In the harmony format <|end|> ends a message within a turn.
    assert {tokenizer.token(token_id) for token_id in tokenizer.eog_ids} == set(names) - {"<|end|>"}
    meta[P + "eos_token_id"] = 259
    assert 259 in Tokenizer.from_metadata(meta, "harmony.gguf").eog_ids


def test_deepseeks_added_tokens_are_not_text() -> None:
    """They are user-defined there, not control tokens, and still steer the model."""
    names = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<dsml:"]  # noqa: RUF001
    meta = bpe_metadata("joyai-llm", [("a", "b")], [(name, USER) for name in names])
    tokenizer = Tokenizer.from_metadata(meta, "deepseek.gguf")
    for at, name in enumerate(names):
        assert tokenizer.encode(name, parse_special=True) == [257 + at]
        assert max(tokenizer.encode(name)) < 257
        assert tokenizer.decode([257 + at], skip_special=True) == name  # visible: parsers look for them


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.floats(),
    st.text("ab <é", max_size=5),
    st.lists(st.text("ab <", max_size=3), max_size=5),
    st.lists(st.integers(-3, 9), max_size=5).map(lambda rows: np.array(rows, np.int64)),
)
KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "unknown_token_id",
    "add_bos_token", "add_eos_token", "add_space_prefix",
)  # fmt: skip


@given(st.sampled_from([bpe, llama]), st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_any_metadata_loads_or_is_refused_properly(base: Any, changes: dict[str, Any]) -> None:
    try:
        tokenizer = Tokenizer.from_metadata(base(**changes), "fuzz.gguf")
    except (FormatError, ModelError):
        return
    ids = tokenizer.encode("a b <|end|> \u00e9", parse_special=True)
    tokenizer.decode(ids)
