"""Streamed text equals decoded text, whatever the tokens; stop strings cut it at the same place, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONTROL, NORMAL, bpe_metadata, spelled, spm_metadata

from apu_engine.errors import ConfigError
from apu_engine.text.errors import TextError
from apu_engine.text.stream import MAX_STOP_LENGTH, TextStream
from apu_engine.text.tokenizer import Tokenizer

BPE = Tokenizer.from_metadata(
    bpe_metadata("gpt-2", [("a", "b"), (spelled("é")[0], spelled("é")[1])], [("<|end|>", CONTROL)]), "bpe.gguf"
)
PIECES = ("a", "▁", "▁b", "b", "é")
SPM = Tokenizer.from_metadata(
    spm_metadata([(piece, -float(at), NORMAL) for at, piece in enumerate(PIECES)]), "spm.gguf"
)
# Ids of bytes that make, break and nearly make characters.
TRICKY = (0x20, 0x41, 0x61, 0x62, 0x80, 0xA0, 0xBF, 0xC3, 0xA9, 0xE4, 0xBD, 0xED, 0xF0, 0x9F, 0x98, 0xF4, 0xFF)
tokenizers = st.sampled_from([BPE, SPM])


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    first_byte = 0 if tokenizer is BPE else 3
    tricky = st.sampled_from([first_byte + byte for byte in TRICKY])
    return draw(st.lists(st.one_of(tricky, st.integers(0, tokenizer.vocab_size - 1)), max_size=40))


@given(st.data(), tokenizers, st.booleans(), st.booleans())
def test_streamed_equals_decoded(data: st.DataObject, tokenizer: Tokenizer, skip: bool, continuation: bool) -> None:
    ids = data.draw(token_ids(tokenizer))
    stream = TextStream(tokenizer, skip_special=skip, continuation=continuation)
    pieces = [stream.push(token_id) for token_id in ids]
    expected = tokenizer.decode(ids, skip_special=skip, continuation=continuation)
    assert "".join(pieces) + stream.flush() == expected
    assert stream.flush() == ""
    assert stream.finished is None


@given(st.data(), tokenizers)
def test_nothing_is_taken_back_or_early(data: st.DataObject, tokenizer: Tokenizer) -> None:
    """What came out is a prefix of the final text, and of what any continuation gives."""
    ids = data.draw(token_ids(tokenizer))
    stream = TextStream(tokenizer)
    shown = "".join(stream.push(token_id) for token_id in ids)
    more = ids + data.draw(token_ids(tokenizer))
    assert tokenizer.decode(more, skip_special=True).startswith(shown)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, character by character: the stop string complete first ends the text, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.data(),
    tokenizers,
    st.lists(st.text("ab é\ufffd", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings(data: st.DataObject, tokenizer: Tokenizer, stops: list[str]) -> None:
    ids = data.draw(token_ids(tokenizer))
    text = tokenizer.decode(ids, skip_special=True)
    for start in data.draw(st.lists(st.integers(0, max(len(text) - 1, 0)), max_size=2)):
        if text[start : start + 3]:
            stops.append(text[start : start + 3])
    expected, matched = cut(text, stops)
    stream = TextStream(tokenizer, stops)
    shown = ""
    for token_id in ids:
        shown += stream.push(token_id)
        assert expected.startswith(shown)
    shown += stream.flush()
    assert shown == expected
    assert stream.matched == matched
    assert stream.finished == (None if matched is None else "stop")


def test_after_a_stop_string_nothing_comes() -> None:
    stream = TextStream(BPE, ["b"])
    assert stream.push(ord("a")) == "a"
    assert stream.push(256) == "a"  # "ab" as one token
    assert (stream.finished, stream.matched) == ("stop", "b")
    assert stream.push(ord("a")) == ""
    assert stream.flush() == ""


def test_a_prefix_of_a_stop_string_is_held_and_flushed() -> None:
    stream = TextStream(BPE, ["\n\nUser:"])
    assert "".join(stream.push(byte) for byte in b"Hi\n\nUse") == "Hi"
    assert stream.finished is None
    assert stream.flush() == "\n\nUse"


def test_half_a_character_is_held_and_flushed_as_replacement() -> None:
    stream = TextStream(BPE)
    smile = "😀".encode()
    assert [stream.push(byte) for byte in smile] == ["", "", "", "😀"]
    assert [stream.push(byte) for byte in smile[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    stream = TextStream(BPE)
    assert [stream.push(byte) for byte in (0xF0, 0x9F, 0x41)] == ["", "", "\ufffdA"]
    assert stream.push(0xFF) == "\ufffd"


def test_a_stop_string_may_complete_on_flush() -> None:
    stream = TextStream(BPE, ["\ufffd"])
    assert stream.push(0xF0) == ""
    assert stream.flush() == ""
    assert stream.finished == "stop"


def test_special_tokens_between_bytes() -> None:
    end = BPE.vocab_size - 1
    ids = [0xC3, end, 0xA9]
    for skip in (True, False):
        stream = TextStream(BPE, skip_special=skip)
        shown = "".join(stream.push(token_id) for token_id in ids) + stream.flush()
        assert shown == BPE.decode(ids, skip_special=skip) == ("é" if skip else "\ufffd<|end|>\ufffd")


def test_leading_space_of_sentencepiece() -> None:
    ids = SPM.encode("b b", add_special=False)
    assert [SPM.token(token_id) for token_id in ids] == ["▁b", "▁b"]
    stream = TextStream(SPM)
    assert [stream.push(token_id) for token_id in ids] == ["b", " b"]
    stream = TextStream(SPM, continuation=True)
    assert [stream.push(token_id) for token_id in ids] == [" b", " b"]


@pytest.mark.parametrize("bad", [[""], ["a", ""], ["x" * (MAX_STOP_LENGTH + 1)], ["a"] * 65, [1]])
def test_bad_stop_strings(bad: list[str]) -> None:
    with pytest.raises(ConfigError, match="stop"):
        TextStream(BPE, bad)


def test_one_stop_string_may_stand_alone() -> None:
    assert TextStream(BPE, "ab").push(256) == ""


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(TextError, match="outside the vocabulary"):
        TextStream(BPE).push(100_000)


@given(st.text())
def test_round_trip(text: str) -> None:
    """Both vocabularies can spell any byte."""
    assert BPE.decode(BPE.encode(text)) == text
    ids = SPM.encode(text, add_special=False)
    assert SPM.decode(ids) == text.replace("▁", " ")
    assert not {1, 2} & set(ids)


@given(st.binary(max_size=60))
def test_decoding_any_bytes(data: bytes) -> None:
    assert BPE.decode(list(data)) == data.decode("utf-8", "replace")
