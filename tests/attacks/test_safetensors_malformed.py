"""Malformed safetensors files, indexes and folders: each is refused with an error that names the file and the field."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from safetensors_builder import entry, safetensors

from apu_engine.errors import ApuError, FormatError, ModelError
from apu_engine.weights.opening import open_model
from apu_engine.weights.safetensors import read_header

GOOD = {"a": entry(), "b": entry("BF16", (2, 2), 16, 24)}


def a(**change: Any) -> bytes:
    return safetensors({"a": entry() | change})


# name -> (bytes of the file, field that the error must name, words that it must say)
FILES: dict[str, tuple[bytes, str, str]] = {
    # not a safetensors file at all
    "empty": (b"", "", "empty"),
    "three bytes": (b"abc", "header length", "only 3 bytes"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "header length", "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html>login</html>", "header length", "HTML"),
    "json error": (b'{"error": "Repository not found"}', "header length", "JSON"),
    "zip": (b"PK\x03\x04" + bytes(60), "header length", "zip"),
    "pickle": (b"\x80\x02}q\x00" + bytes(60), "header length", "PyTorch"),
    "gguf": (b"GGUF" + bytes(60), "header length", "GGUF"),
    "zeros": (bytes(4096), "header", "expected a JSON object"),
    # length of the header
    "length beyond the file": (safetensors(GOOD, 24, length=4000), "header length", "truncated"),
    "length 2^63": (safetensors(GOOD, 24, length=1 << 63), "header length", "at most 100,000,000"),
    "length 2^64-1": (safetensors(GOOD, 24, length=(1 << 64) - 1), "header length", "at most"),
    "length too short": (safetensors(GOOD, 24, length=20), "header", "not JSON"),
    "length 0": (safetensors(b"", 0), "header", "expected a JSON object"),
    "big-endian length": ((200).to_bytes(8, "big") + bytes(200), "header length", "at most"),
    # JSON
    "array": (safetensors(b"[]", 0), "header", "expected a JSON object"),
    "blank first": (safetensors(b' {"a": 1}', 0), "header", "expected a JSON object"),
    "not UTF-8": (safetensors(b'{"\xff": 1}', 0), "header", "UTF-8"),
    "cut": (safetensors(b'{"a": {"dtype": "F32"', 0), "header", "not JSON"),
    "two documents": (safetensors(b'{"a": 1}{"b": 2}', 0), "header", "not JSON"),
    "NaN": (safetensors(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', 4), "header", "NaN"),
    "name twice": (
        safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)),
        "header",
        "name 'a' occurs twice",
    ),
    "key twice": (
        safetensors(b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [4], "data_offsets": [0, 16]}}'),
        "header",
        "name 'dtype' occurs twice",
    ),
    "depth": (safetensors(b'{"a":' * 100_000, 0), "header", "nested too deeply"),
    "depth of arrays": (safetensors(b'{"a":' + b"[" * 100_000, 0), "header", "nested too deeply"),
    "a number of 5,000 digits": (safetensors(b'{"a": %s}' % (b"9" * 5000), 0), "header", "cannot|can be read"),
    # metadata
    "metadata is a list": (safetensors({"__metadata__": []}, 0), "__metadata__", "object of strings"),
    "metadata holds a number": (safetensors({"__metadata__": {"a": 1}}, 0), "__metadata__", "object of strings"),
    # entries
    "entry is a number": (safetensors({"a": 1}, 0), 'tensor "a"', "found int"),
    "entry lacks its dtype": (safetensors({"a": {"shape": [], "data_offsets": [0, 4]}}), 'tensor "a"', "dtype"),
    "entry has more": (a(strides=[1]), 'tensor "a"', "strides"),
    "name is empty": (safetensors({"": entry()}), 'tensor ""', "its name"),
    "name has a NUL": (safetensors({"a\0b": entry()}), 'tensor "a\0b"', "NUL"),
    "name of 5,000 characters": (safetensors({"a" * 5000: entry()}), f'tensor "{"a" * 200}"', "5000 characters"),
    "dtype unknown": (a(dtype="F128"), 'tensor "a" dtype', "'F128' is unknown"),
    "dtype in lower case": (a(dtype="f32"), 'tensor "a" dtype', "unknown"),
    "dtype is a number": (a(dtype=0), 'tensor "a" dtype', "unknown"),
    "dtype is a list": (a(dtype=["F32"]), 'tensor "a" dtype', "unknown"),
    "shape is a number": (a(shape=4), 'tensor "a" shape', "found 4"),
    "shape is negative": (a(shape=[-4]), 'tensor "a" shape', "found"),
    "shape of a fraction": (a(shape=[4.0]), 'tensor "a" shape', "found"),
    "shape of true": (a(shape=[True, 4]), 'tensor "a" shape', "found"),
    "shape of 2^63": (a(shape=[1 << 63]), 'tensor "a" shape', "sizes"),
    "shape of nine sizes": (a(shape=[1] * 8 + [4]), 'tensor "a" shape', "at most 8"),
    "shape that wraps": (a(shape=[1 << 62, 4]), 'tensor "a" data_offsets', "hold 16 bytes"),
    "offsets missing": (a(data_offsets=None), 'tensor "a" data_offsets', "two offsets"),
    "offsets are three": (a(data_offsets=[0, 8, 16]), 'tensor "a" data_offsets', "two offsets"),
    "offset is negative": (a(data_offsets=[-16, 0]), 'tensor "a" data_offsets', "two offsets"),
    "offset is a fraction": (a(data_offsets=[0.0, 16.0]), 'tensor "a" data_offsets', "two offsets"),
    "end before begin": (a(data_offsets=[16, 0]), 'tensor "a" data_offsets', "before"),
    "end behind the file": (a(data_offsets=[16, 32]), 'tensor "a" data_offsets', "truncated"),
    "end at 2^63-1": (a(data_offsets=[0, (1 << 63) - 1]), 'tensor "a" data_offsets', "truncated"),
    "too few bytes": (a(data_offsets=[0, 15]), 'tensor "a" data_offsets', "hold 15 bytes"),
    "too many bytes": (safetensors({"a": entry(end=17)}, 17), 'tensor "a" data_offsets', "hold 17 bytes"),
    "half a byte": (safetensors({"a": entry("F4", (3,), 0, 2)}, 2), 'tensor "a" data_offsets', "takes 2"),
    # data
    "overlap": (safetensors({"a": entry(), "b": entry(begin=8, end=24)}, 24), 'tensor "b"', 'overlaps tensor "a"'),
    "twice the same bytes": (safetensors({"a": entry(), "b": entry()}), 'tensor "b"', 'overlaps tensor "a"'),
    "hole at the beginning": (safetensors({"a": entry(begin=4, end=20)}, 20), 'tensor "a"', "4 bytes before it"),
    "hole": (safetensors({"a": entry(), "b": entry(begin=20, end=36)}, 36), 'tensor "b"', "4 bytes before it"),
    "bytes behind": (safetensors(GOOD, 25), "", "1 bytes behind the last tensor"),
    "data without tensors": (safetensors({}, 8), "", "8 bytes behind"),
    "truncated": (safetensors(GOOD, 23), 'tensor "b" data_offsets', "truncated"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    raw, field, words = FILES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(FormatError, match=words) as caught:
        read_header(path)
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.file, caught.value.field) == (str(path), field)
    assert seconds < 1 and peak < 64 << 20


GOOD_FILES: dict[str, bytes] = {
    "plain": safetensors(GOOD, 24),
    "any order": safetensors({"b": entry("BF16", (2, 2), 16, 24), "a": entry()}, 24),
    "no tensor": safetensors({}, 0),
    "blanks behind": safetensors(json.dumps(GOOD).encode() + b"    ", 24),
    "an odd length": safetensors(json.dumps(GOOD).encode() + b" " * (1 + len(json.dumps(GOOD)) % 2), 24),
    "odd offsets": safetensors({"a": entry("U8", (3,), 0, 3), "b": entry(begin=3, end=19)}, 19),
    "metadata": safetensors(GOOD | {"__metadata__": {"format": "pt", "": ""}}, 24),
    "a scalar": safetensors({"a": entry(shape=(), end=4)}, 4),
    "empty tensors": safetensors(
        {"a": entry(shape=(0, 5), end=0), "b": entry(), "c": entry(shape=(0,), begin=16, end=16)}, 16
    ),
    "a length that is a pickle's magic": safetensors(json.dumps(GOOD).encode().ljust(0x0280), 24),
    "4 bits": safetensors({"a": entry("F4", (2, 4), 0, 4)}, 4),
    "names beyond ASCII": safetensors({"ä|\u2581": entry()}, 16),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_odd_but_valid_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD_FILES[name])
    header = read_header(path)
    assert header.size == len(GOOD_FILES[name])
    assert all(item.offset + item.nbytes <= header.size for item in header.tensors.values())


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a directory"):
        read_header(tmp_path)
    with pytest.raises(FormatError, match="does not exist"):
        read_header(tmp_path / "none.safetensors")


# ---------------------------------------------------------------- folders

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def folder(path: Path, config: Any = CONFIG, index: Any = None, **files: bytes) -> Path:
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if index is not None:
        (path / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    for name, raw in (files or {"model": safetensors({"model.embed_tokens.weight": entry(shape=(1, 4))})}).items():
        (path / f"{name}.safetensors").write_bytes(raw)
    return path


def mapped(file: Any) -> dict[str, Any]:
    return {"weight_map": {"a": file}}


INDEXES: dict[str, tuple[Any, str, str]] = {
    "no JSON": ("{", "", "not JSON"),
    "a list": ([], "", "expected a JSON object"),
    "no map": ({}, "weight_map", "expected an object"),
    "map is a list": ({"weight_map": []}, "weight_map", "expected an object"),
    "map is empty": ({"weight_map": {}}, "weight_map", "expected an object"),
    "map has a tensor twice": ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "", "occurs twice"),
    "file is a number": (mapped(1), 'weight_map "a"', "found 1"),
    "file of another kind": (mapped("/etc/passwd"), 'weight_map "a"', "expected a .safetensors file"),
    "absolute path": (mapped("/tmp/x.safetensors"), 'weight_map "a"', "outside the folder"),
    "path upwards": (mapped("../x.safetensors"), 'weight_map "a"', "outside the folder"),
    "path upwards, hidden": (mapped("x/../../y.safetensors"), 'weight_map "a"', "outside the folder"),
    "path with a dot": (mapped("./x.safetensors"), 'weight_map "a"', "outside the folder"),
    "path with a NUL": (mapped("x\0.safetensors"), 'weight_map "a"', "expected a .safetensors file"),
    "path of Windows": (mapped("..\\x.safetensors"), 'weight_map "a"', "expected a .safetensors file"),
    "shard is missing": (mapped("x.safetensors"), "weight_map", "names x.safetensors, which is not there"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes(tmp_path: Path, name: str) -> None:
    index, field, words = INDEXES[name]
    with pytest.raises(FormatError, match=words) as caught:
        open_model(folder(tmp_path, index=index))
    assert caught.value.file == str(tmp_path / "model.safetensors.index.json")
    assert caught.value.field == field


def test_the_index_decides_which_shard_counts(tmp_path: Path) -> None:
    """A stale copy in another shard is ignored, and shards may be links, as in the hub's cache."""
    name, stale = "model.embed_tokens.weight", "lm_head.weight"
    outside = tmp_path / "blobs"
    outside.mkdir()
    (outside / "0123").write_bytes(safetensors({name: entry(shape=(1, 4))}))
    inside = tmp_path / "folder"
    (inside / "sub").mkdir(parents=True)
    (inside / "b.safetensors").symlink_to(outside / "0123")
    index = {"weight_map": {name: "b.safetensors", stale: "sub/a.safetensors"}}
    old = safetensors({name: entry(shape=(1, 4)), stale: entry(shape=(1, 4), begin=16, end=32)}, 32)
    (inside / "sub" / "a.safetensors").write_bytes(old)
    folder(inside, CONFIG | {"tie_word_embeddings": False}, index, unused=b"noise")
    model = open_model(inside)
    assert [path.name for path in model.files] == ["b.safetensors", "a.safetensors"]
    assert model.tensors["token_embd.weight"].shard == 0 and model.tensors["output.weight"].shard == 1
    (inside / "sub" / "a.safetensors").write_bytes(safetensors({name: entry(shape=(1, 4))}))
    with pytest.raises(FormatError, match=r'a\.safetensors: tensor "lm_head\.weight": is missing'):
        open_model(inside)


CONFIGS: dict[str, tuple[Any, str, str]] = {
    "no JSON": ("{", "", "not JSON"),
    "a list": ("[]", "", "expected a JSON object"),
    "key twice": ('{"model_type": "llama", "model_type": "qwen3"}', "", "occurs twice"),
    "no model_type": ({}, "model_type", "expected a string, found None"),
    "model_type is a list": ({"model_type": ["llama"]}, "model_type", "expected a string"),
    "layers missing": (CONFIG | {"num_hidden_layers": None}, "num_hidden_layers", "found nothing"),
    "layers are text": (CONFIG | {"num_hidden_layers": "1"}, "num_hidden_layers", "expected an integer"),
    "layers 10^9": (CONFIG | {"num_hidden_layers": 10**9}, "num_hidden_layers (llama.block_count)", "between 1"),
    "width 0": (CONFIG | {"hidden_size": 0}, "hidden_size (llama.embedding_length)", "between 1"),
    "width missing": (CONFIG | {"hidden_size": None}, "hidden_size (llama.embedding_length)", "required"),
    "heads are a fraction": (
        CONFIG | {"num_attention_heads": 1.5},
        "num_attention_heads (llama.attention.head_count)",
        "expected an",
    ),
    "epsilon 0": (
        CONFIG | {"rms_norm_eps": 0},
        "rms_norm_eps (llama.attention.layer_norm_rms_epsilon)",
        "between 1e-12",
    ),
    "rope is a list": (CONFIG | {"rope_scaling": []}, "rope_scaling", "expected an object"),
    "rope's factor is text": (
        CONFIG | {"rope_scaling": {"type": "linear", "factor": "2"}},
        "factor",
        "expected a number",
    ),
    "rope's factor below 1": (
        CONFIG | {"rope_scaling": {"type": "yarn", "factor": 0.5}},
        "rope_scaling.factor",
        "at least 1",
    ),
    "llama3 without frequencies": (
        CONFIG | {"head_dim": 4, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor",
        "found nothing",
    ),
    "vocabulary of another size": (CONFIG | {"vocab_size": 7}, "vocab_size (llama.vocab_size)", "expected 1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path: Path, name: str) -> None:
    from apu_engine import arch

    config, field, words = CONFIGS[name]
    with pytest.raises(FormatError, match=words) as caught:
        arch.describe(open_model(folder(tmp_path, config)))
    assert (caught.value.file, caught.value.field) == (str(tmp_path / "config.json"), field)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; supported are llama"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised as AWQ"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised as GPTQ"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantised as compressed-tensors"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised as bitsandbytes"),
        ({"quantization_config": {}}, "quantised as None"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: expected default, linear, yarn or llama3"),
        ({"hidden_act": "relu"}, "hidden_act: expected 'silu', found 'relu'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_said_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        open_model(folder(tmp_path, CONFIG | change))


def test_tensors_of_a_folder(tmp_path: Path) -> None:
    from apu_engine import arch

    def refused(words: str, config: dict[str, Any] = CONFIG, **tensors: Any) -> None:
        named = {name.replace("__", "."): value for name, value in tensors.items()}
        size = max((value["data_offsets"][1] for value in named.values()), default=0)
        with pytest.raises(ApuError, match=words):
            arch.describe(open_model(folder(tmp_path, config, model=safetensors(named, size))))

    table = {"model__embed_tokens__weight": entry(shape=(1, 4))}
    refused(r'tensor "model\.norm\.weight" \(output_norm\.weight\): is missing|is missing', **table)
    refused(r'tensor "lm_head\.weight": is missing', CONFIG | {"tie_word_embeddings": False}, **table)
    later = {"model__layers__1__input_layernorm__weight": entry(begin=16, end=32)}
    refused(r"lies behind the 1 layers and 0 of next-token prediction that config\.json counts", **table, **later)
    refused(r"lm_head", CONFIG | {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}, **table, **later)
    refused("has type F8_E4M3", model__embed_tokens__weight=entry("F8_E4M3", (4, 4)))
    refused("is empty", model__embed_tokens__weight=entry(shape=(0, 4), end=0))
    both = {"language_model.model.embed_tokens.weight": entry(shape=(1, 4), begin=16, end=32)}
    refused("is a second token_embd.weight", **table, **both)


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    moe = CONFIG | {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 2}
    name = "model.layers.0.mlp.experts.{}.gate_proj.weight"

    def refused(words: str, *experts: tuple[int, str, tuple[int, ...]]) -> None:
        header, at = {}, 0
        for number, dtype, shape in experts:
            end = at + shape[0] * shape[-1] * (4 if dtype == "F32" else 2)
            header[name.format(number)] = entry(dtype, shape, at, end)
            at = end
        with pytest.raises(FormatError, match=words):
            open_model(folder(tmp_path, moe, model=safetensors(header, at)))

    refused("expert 0 of blk.0.ffn_gate_exps.weight is missing", (1, "F32", (2, 4)))
    refused("expert 1 of", (0, "F32", (2, 4)), (2, "F32", (2, 4)))
    refused(r"is F32 \[4, 2\], expected F32 \[2, 4\]", (0, "F32", (2, 4)), (1, "F32", (4, 2)))
    refused(r"is F16 \[2, 4\], expected F32", (0, "F32", (2, 4)), (1, "F16", (2, 4)))


def test_folders_that_lack_files(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(safetensors({}, 0))
    with pytest.raises(FormatError, match=r"only safetensors, without config\.json"):
        open_model(tmp_path)
    with pytest.raises(FormatError, match=r"its folder has no config\.json"):
        open_model(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors is not there"):
        open_model(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(safetensors({}, 0))
    with pytest.raises(FormatError, match=r"holds 2 \.safetensors files and no model\.safetensors\.index\.json"):
        open_model(tmp_path)
