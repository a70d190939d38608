"""Token ids of the two real vocabularies against transformers' conversion of the same files."""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from awkward import PLAIN, SPECIAL
from conftest import converted
from tokenizers import pre_tokenizers

from apu_engine.text.errors import TextError
from apu_engine.text.tokenizer import Tokenizer

ALL = PLAIN + SPECIAL


def test_there_are_enough_strings() -> None:
    assert len(set(PLAIN)) >= 60


def test_gemma3_equals_transformers(gemma3: Tokenizer, gemma3_path: Path) -> None:
    """No difference at all: merges from scores, user-defined text, control tokens, byte fallback."""
    reference = converted(gemma3_path)
    for text in ALL:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert gemma3.encode(text, add_special=False, parse_special=True) == expected, text


def test_smollm2_equals_transformers_with_the_published_pre_tokenizer(smollm2: Tokenizer, smollm2_path: Path) -> None:
    """`pre = smollm` means: each digit by itself, then GPT-2's pattern (the published tokenizer.json has Digits with
    individual_digits before ByteLevel). transformers' conversion does not know the name and leaves the digits out."""
    reference = converted(smollm2_path)
    without = [reference.encode(text, add_special_tokens=False).ids for text in ALL]
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    different = []
    for text, old in zip(ALL, without, strict=True):
        ours = smollm2.encode(text, add_special=False, parse_special=True)
        assert ours == reference.encode(text, add_special_tokens=False).ids, text
        if ours != old:
            different.append(text)
    # Every difference to the plain conversion has spaces before a digit or number: GPT-2's pattern keeps one of them
    # with the number, whereas Digits has cut the number off before.
    assert different == [" 1  22   333    4444", "١٢٣ ४५६ ㊿ ½ ² Ⅷ", "A\u030a Å Å ﬁ ﬂ ㎏ Ⅳ"]
    for text in different:
        assert any(a == " " and unicodedata.category(b)[0] == "N" for a, b in pairwise(text))


def test_smollm2s_vocabulary_was_trained_with_digits_apart(smollm2: Tokenizer) -> None:
    """The evidence in the file itself: no token joins a number with anything, not even the space before it, which is
    the most frequent pair of all in a vocabulary trained without the cut."""
    for token_id in range(smollm2.vocab_size):
        if token_id in smollm2.special_ids:
            continue
        text = smollm2.token_bytes(token_id).decode("utf-8", "ignore")
        numbers = [char for char in text if unicodedata.category(char)[0] == "N"]
        assert not numbers or len(text) == 1, text


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_untrusted_text_never_becomes_a_control_token(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    forbidden = set(tokenizer.control_tokens.values())
    assert forbidden >= tokenizer.eog_ids
    for text in [*ALL, *tokenizer.control_tokens, "".join(tokenizer.control_tokens)]:
        ids = tokenizer.encode(text, add_special=False)
        assert not forbidden.intersection(ids), text


def test_untrusted_special_tokens_equal_transformers_split_special_tokens(
    smollm2: Tokenizer, smollm2_path: Path
) -> None:
    reference = converted(smollm2_path)
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    reference.encode_special_tokens = True
    for text in SPECIAL:
        assert smollm2.encode(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_text_comes_back(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in ALL:
        # SmolLM2's vocabulary has no token for U+0004; SentencePiece writes a space as U+2581.
        expected = text.replace("\x04", "") if name == "smollm2" else text.replace("▁", " ")
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == expected


def test_gemma3_begins_with_one_bos(gemma3: Tokenizer) -> None:
    assert gemma3.bos_id == 2
    hi = gemma3.encode("hi", add_special=False)
    assert gemma3.encode("hi") == [2, *hi]
    assert gemma3.encode("<bos>hi", parse_special=True) == [2, *hi]
    assert gemma3.encode("<bos><bos>hi", parse_special=True) == [2, *hi]
    assert gemma3.encode("") == [2]
    assert gemma3.decode([2, *hi]) == "<bos>hi"
    assert gemma3.decode([2, *hi], skip_special=True) == "hi"


def test_smollm2_has_no_bos_in_front(smollm2: Tokenizer) -> None:
    assert smollm2.bos_id == 1
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special=False)


def test_ends_of_generation(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert smollm2.eos_id == 2
    assert smollm2.eog_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert gemma3.eos_id == 1
    assert {gemma3.token(token_id) for token_id in gemma3.eog_ids} == {"<eos>", "<end_of_turn>"}


def test_html_is_text_and_image_marks_are_not(gemma3: Tokenizer) -> None:
    assert gemma3.encode("<table>", add_special=False) == [168]
    assert gemma3.encode("\n\n", add_special=False) == [108]
    assert len(gemma3.encode("<start_of_image>", add_special=False)) > 1
    assert gemma3.encode("<start_of_image>", add_special=False, parse_special=True) == [255999]


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_lone_surrogate_is_an_error(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for text in ("\ud800", "ab\udfffc"):
        with pytest.raises(TextError, match=r"lone surrogate, U\+D"):
            tokenizer.encode(text)
        with pytest.raises(TextError, match="lone surrogate"):
            tokenizer.encode(text, parse_special=True)


def test_ids_outside_the_vocabulary_are_named(smollm2: Tokenizer) -> None:
    for token_id in (-1, 49152, 10**9):
        with pytest.raises(TextError, match=f"{token_id} is outside the vocabulary of 49152"):
            smollm2.decode([token_id])
        with pytest.raises(TextError, match="outside the vocabulary"):
            smollm2.token(token_id)


def test_very_long_text_takes_time_in_proportion(gemma3: Tokenizer, smollm2: Tokenizer) -> None:
    """A word of hundreds of thousands of characters must not take minutes."""
    for tokenizer in (gemma3, smollm2):
        for text in ("a" * 300_000, " " * 300_000, "\n" * 50_000, "ab" * 100_000):
            assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
