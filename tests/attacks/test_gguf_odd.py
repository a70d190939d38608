"""Odd but valid files: each loads, and means what it says."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import (
    ARCH,
    ARRAY,
    BOOL,
    F32,
    F64,
    I64,
    STRING,
    U8,
    U32,
    Tensor,
    array,
    gguf,
    inner,
    scalar,
    string,
    text,
)

from apu_engine.errors import FormatError
from apu_engine.weights.model_file import ModelFile
from apu_engine.weights.opening import open_model


def load(tmp_path: Path, content: bytes) -> ModelFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return open_model(path)


def test_version_2(tmp_path: Path) -> None:
    assert load(tmp_path, gguf(version=2, tensors=[Tensor()])).version == 2


@pytest.mark.parametrize("alignment", [1, 8, 64, 128, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    keys = [ARCH, ("general.alignment", scalar(U32, alignment))]
    content = gguf(
        keys,
        [Tensor(), Tensor("y", offset=max(16, alignment))],
        data=16 + max(16, alignment),
        alignment=alignment,
    )
    model = load(tmp_path, content)
    assert model.alignment == alignment
    start = model.tensors["x"].offset
    assert start % alignment == 0 and content[start : start + 4] == bytes([0, 1, 2, 3])
    assert model.tensors["y"].offset == start + max(16, alignment)


def test_reversed_order_and_gaps(tmp_path: Path) -> None:
    model = load(tmp_path, gguf(tensors=[Tensor("b", offset=960), Tensor("a", offset=320)], data=976))
    assert list(model.tensors) == ["b", "a"]
    assert model.tensors["b"].offset - model.tensors["a"].offset == 640


def test_two_names_for_the_same_bytes(tmp_path: Path) -> None:
    model = load(tmp_path, gguf(tensors=[Tensor("a"), Tensor("b")]))
    assert model.tensors["a"].offset == model.tensors["b"].offset


def test_unknown_keys_of_every_type(tmp_path: Path) -> None:
    values = {kind: scalar(kind, 1) for kind in range(13) if kind not in (STRING, ARRAY)}
    model = load(tmp_path, gguf([ARCH, *((f"zzz.{kind}", value) for kind, value in values.items())]))
    assert all(model.metadata[f"zzz.{kind}"] == 1 for kind in values)
    assert model.metadata[f"zzz.{BOOL}"] is True


def test_arrays(tmp_path: Path) -> None:
    rows = [
        inner(array(U8, [1, 2])),
        inner(array(STRING, [string("x")])),
        inner(array(ARRAY, [inner(array(U8, []))])),
    ]
    model = load(
        tmp_path,
        gguf(
            [
                ARCH,
                ("nested", array(ARRAY, rows)),
                ("none", array(F32, [])),
                ("no words", array(STRING, [])),
                ("no arrays", array(ARRAY, [])),
                ("flags", array(BOOL, [1, 0])),
                ("wide", array(I64, [-(1 << 62)])),
            ]
        ),
    )
    numbers, words, deeper = model.metadata["nested"]
    assert numbers.tolist() == [1, 2] and words == ["x"] and len(deeper[0]) == 0
    assert len(model.metadata["none"]) == len(model.metadata["no words"]) == len(model.metadata["no arrays"]) == 0
    assert model.metadata["no words"].tolist() == []
    assert model.metadata["flags"].tolist() == [True, False] and model.metadata["flags"].dtype == np.bool_
    assert model.metadata["wide"].tolist() == [-(1 << 62)]
    assert not model.metadata["wide"].flags.writeable


def test_names_are_compared_by_length(tmp_path: Path) -> None:
    keys = [ARCH, ("a", scalar(U32, 1)), ("a\0b", scalar(U32, 2)), ("a\0", scalar(U32, 3))]
    model = load(tmp_path, gguf(keys, [Tensor("x"), Tensor("x\0", offset=32)]))
    assert [model.metadata[key] for key in ("a", "a\0b", "a\0")] == [1, 2, 3]
    assert set(model.tensors) == {"x", "x\0"}
    with pytest.raises(FormatError):
        model.get_str("general.architecture\0")


def test_no_tensors_and_nothing_after_the_header(tmp_path: Path) -> None:
    model = load(tmp_path, gguf(data=0, alignment=1))
    assert model.tensors == {} and model.weight_bytes == 0


def test_duplicate_vocabulary_entries(tmp_path: Path) -> None:
    words = [string("a"), string("a"), string("b")]
    assert load(tmp_path, gguf([ARCH, ("tokens", array(STRING, words))])).metadata["tokens"] == [
        "a",
        "a",
        "b",
    ]


def test_scalar_tensor_and_trailing_bytes(tmp_path: Path) -> None:
    model = load(tmp_path, gguf(tensors=[Tensor(dims=())], data=5000))
    assert model.tensors["x"].shape == () and model.tensors["x"].nbytes == 4


def test_long_strings_cross_every_read(tmp_path: Path) -> None:
    """Strings far larger than one read, and lengths cut in the middle by it."""
    words = ["w" * size for size in (3, 5 << 20, 0, 255, 256, 65536, 9 << 20)] + ["tail"] * 5
    model = load(
        tmp_path,
        gguf([ARCH, ("words", array(STRING, [string(word) for word in words])), ("f", scalar(F64, 0.5))]),
    )
    assert model.metadata["words"].tolist() == words
    assert model.metadata["words"][1:3] == words[1:3] and model.metadata["words"][-1] == "tail"
    assert model.metadata["f"] == 0.5


def test_bad_utf8_in_a_vocabulary_is_named_when_it_is_used(tmp_path: Path) -> None:
    model = load(tmp_path, gguf([ARCH, ("tokens", array(STRING, [string("a"), string(b"\xe2\x82"), string("c")]))]))
    assert model.metadata["tokens"][2] == "c"
    with pytest.raises(FormatError, match=r"tokens\[1\]: is not UTF-8"):
        model.metadata["tokens"].tolist()


LIES = {
    "llama.attention.head_count": scalar(U32, 0),
    "llama.block_count": scalar(U32, 10**9),
    "llama.attention.layer_norm_rms_epsilon": scalar(F32, float("nan")),
    "llama.rope.freq_base": scalar(F32, float("inf")),
    "llama.expert_used_count": text("eight"),
    "llama.context_length": struct.pack("<If", F32, 8192.0),
    "llama.scale": scalar(BOOL, 1),
    "llama.use_parallel_residual": scalar(U32, 1),
    "tokenizer.ggml.bos_token_id": scalar(U32, 200_000),
    "tokenizer.ggml.scores": array(F32, [0.0, float("nan")]),
    "tokenizer.ggml.token_type": array(U8, [1, 77]),
    "tokenizer.ggml.tokens": array(U8, [1]),
    "llama.attention.head_count_kv": array(U32, [1, 0, 2]),
}


def test_lying_metadata_is_refused_by_key(tmp_path: Path) -> None:
    model = load(tmp_path, gguf([ARCH, *LIES.items()]))
    attempts = {
        "llama.attention.head_count": lambda key: model.get_int(key, lo=1, hi=1024),
        "llama.block_count": lambda key: model.get_int(key, lo=1, hi=4096),
        "llama.attention.layer_norm_rms_epsilon": lambda key: model.get_float(key, lo=0.0, hi=1.0),
        "llama.rope.freq_base": lambda key: model.get_float(key),
        "llama.expert_used_count": lambda key: model.get_int(key),
        "llama.context_length": lambda key: model.get_int(key),
        "llama.scale": lambda key: model.get_float(key),
        "llama.use_parallel_residual": lambda key: model.get_bool(key),
        "tokenizer.ggml.bos_token_id": lambda key: model.get_int(key, lo=0, hi=128_255),
        "tokenizer.ggml.scores": lambda key: model.get_array(key, "float"),
        "tokenizer.ggml.token_type": lambda key: model.get_array(key, "int", lo=0, hi=6),
        "tokenizer.ggml.tokens": lambda key: model.get_array(key, "str"),
        "llama.attention.head_count_kv": lambda key: model.get_per_layer(key, 3, lo=1, hi=64),
    }
    assert attempts.keys() == LIES.keys()
    for key, attempt in attempts.items():
        with pytest.raises(FormatError) as caught:
            attempt(key)
        assert caught.value.field.startswith(key)
        assert "expected" in str(caught.value) and "found" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
