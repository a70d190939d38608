"""Each pre-tokenizer kind against its published pattern run by another engine, and a BPE written out here.

The merges are learned from the strings uncut, so they would join across every boundary that a pattern puts: a boundary
in the wrong place changes the ids.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np
import pytest
import regex
from awkward import PLAIN, SPECIAL
from tiny import P, bpe, bpe_metadata, learn_merges, spelled

from apu_engine.errors import FormatError, ModelError
from apu_engine.text import pretokenizers
from apu_engine.text.tokenizer import Tokenizer

GPT2 = [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]
DIGITS = [r"\p{N}", *GPT2]
LLAMA3 = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
]
QWEN2 = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
QWEN35 = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
]
TEKKEN = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
O200K = [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
KIMI = [
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"]
BAILING = [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"]
SEED = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
]
# DeepSeek LLM's list of letters, approximated by the category it was made from; see test_deepseek_llm_letters.
DEEPSEEK_LLM = [
    "[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}",
]

PUBLISHED: dict[str, list[str]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "trillion"), GPT2),
    **dict.fromkeys(("granite-docling", "exaone4", "a.x-4.0"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2"), QWEN2),
    **dict.fromkeys(("megrez", "kormo"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), O200K),
    "kimi-k2": KIMI,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense"), DEEPSEEK_V3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    "seed-coder": SEED,
}
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
COMPOSED = ("qwen2", "qwen35")
ADD_BOS = WHOLE_WORDS


@cache
def merges() -> tuple[tuple[str, str], ...]:
    return tuple(learn_merges([text for text in PLAIN + SPECIAL if len(text) < 200], 250))


def words(text: str, stages: list[str]) -> list[str]:
    pieces = [text]
    for stage in stages:
        cut = []
        for piece in pieces:
            done = 0
            for match in regex.finditer(stage, piece, regex.V1):
                cut += [piece[done : match.start()], match.group()]
                done = match.end()
            cut.append(piece[done:])
        pieces = [piece for piece in cut if piece]
    return pieces


def reference(name: str, text: str, ids: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    if name in COMPOSED:
        text = unicodedata.normalize("NFC", text)
    out = []
    for word in words(text, PUBLISHED[name]):
        whole = spelled(word)
        symbols = [whole] if name in WHOLE_WORDS and whole in ids else bpe(whole, ranks)
        out += [ids[symbol] for symbol in symbols]
    return out


def test_every_kind_has_a_reference() -> None:
    assert set(PUBLISHED) == set(pretokenizers.KINDS)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_kind_equals_published_pattern(name: str) -> None:
    pairs = list(merges())
    # One word that no merge reaches, to tell apart those that take whole words.
    meta = bpe_metadata(name, pairs, [(spelled("Donaudampfschifffahrts"), 1), (spelled(" traditional"), 1)])
    tokenizer = Tokenizer.from_metadata(meta, "tiny.gguf")
    ids = {token: index for index, token in enumerate(meta[P + "tokens"])}
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    for text in [*PLAIN, *SPECIAL, "a traditional Donaudampfschifffahrts word"]:
        assert tokenizer.encode(text, add_special=False) == reference(name, text, ids, ranks), text


def test_the_kinds_differ() -> None:
    """So that the test above can tell one from another."""
    text = "I'LL 1234 Ça cafe\u0301 ZażółćGęślą 你好ひら, x2\n\n  y  12 ３4/\n'don't ß"
    cuts = {name: tuple(words(text, stages)) for name, stages in PUBLISHED.items()}
    assert len(set(cuts.values())) >= 11


def test_deepseek_llm_letters() -> None:
    """The list is of letters with case, as Unicode had them when it was made."""
    letters = pretokenizers._CASED_CLASS
    listed = regex.compile(f"[{letters}]")
    for code in (*range(0xD800), *range(0xE000, 0x20000)):
        char = chr(code)
        if listed.match(char):
            assert unicodedata.category(char) in ("Lu", "Ll", "Lt"), hex(code)
    assert all(listed.match(char) for char in "azAZéßΩжЖαωԱꞀ")


@pytest.mark.parametrize("name", ["llama-4000", "SMOLLM", "qwen2 ", "gemma4", "x" * 1000])
def test_unknown_kind_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_metadata(bpe_metadata(name, [("a", "b")]), "tiny.gguf")
    assert caught.value.names == (name,)
    assert f"tokenizer.ggml.pre = {name!r}" in str(caught.value)


def test_a_file_without_the_key_gets_gpt2s() -> None:
    with_key = Tokenizer.from_metadata(bpe_metadata("gpt-2", list(merges())), "tiny.gguf")
    without = Tokenizer.from_metadata(bpe_metadata(None, list(merges())), "tiny.gguf")
    for text in PLAIN:
        assert with_key.encode(text) == without.encode(text)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_bos_where_the_file_does_not_say(name: str) -> None:
    meta = bpe_metadata(name, [("a", "b")], [("<|begin|>", 3)])
    bos = len(meta[P + "tokens"]) - 1
    meta[P + "bos_token_id"] = np.uint32(bos)
    assert Tokenizer.from_metadata(meta, "tiny.gguf").encode("ab") == [bos] * (name in ADD_BOS) + [256]
    for flag in (True, False):
        meta[P + "add_bos_token"] = flag
        assert Tokenizer.from_metadata(meta, "tiny.gguf").encode("ab") == [bos] * flag + [256]


def test_merges_that_lead_to_a_control_token_are_left_out() -> None:
    """A file may list merges that spell a control token; text must not become it all the same."""
    meta = bpe_metadata("gpt-2", [("e", "n"), ("en", "d")])
    meta[P + "token_type"][257] = 3  # "end"
    tokenizer = Tokenizer.from_metadata(meta, "tiny.gguf")
    assert tokenizer.encode("end") == [256, ord("d")]
    assert tokenizer.encode("end", parse_special=True) == [257]


@pytest.mark.parametrize("bad", ["ab", "a b c", "", " ", "a ", " b", "a  b"])
def test_malformed_merges_are_named(bad: str) -> None:
    meta = bpe_metadata("gpt-2", [("a", "b")])
    meta[P + "merges"] = ["a b", bad]
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges\[1\].*expected two tokens"):
        Tokenizer.from_metadata(meta, "tiny.gguf")


@pytest.mark.parametrize("bad", ["a zz", "zz a", "a c"])
def test_merges_of_unknown_tokens_are_named(bad: str) -> None:
    meta = bpe_metadata("gpt-2", [("a", "b")])
    meta[P + "merges"] = ["a b", bad]
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.merges\[1\].*is not a token"):
        Tokenizer.from_metadata(meta, "tiny.gguf")
