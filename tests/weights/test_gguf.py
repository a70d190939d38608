"""The header reader against the gguf package: its writer, its reader, its tables, and real published files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from apu_engine.errors import FormatError
from apu_engine.weights.ggml_types import GGML_TYPES, type_name
from apu_engine.weights.model_file import REQUIRED, ModelFile, StringArray, TensorRef
from apu_engine.weights.opening import open_model


def write(path: Path, **tensors: Any) -> gguf.GGUFWriter:
    """A GGUFWriter for `path`; `finish` writes it out."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_type_table_is_that_of_the_gguf_package() -> None:
    for dtype, (elements, nbytes) in GGML_QUANT_SIZES.items():
        assert GGML_TYPES[int(dtype)] == (dtype.name, elements, nbytes)
    assert set(GGML_TYPES) == {int(dtype) for dtype in GGMLQuantizationType}


def test_type_names() -> None:
    assert [type_name(number) for number in (12, 31, 99)] == ["Q4_K", "Q4_0_4_4", "type 99"]


def test_the_engine_does_not_import_the_gguf_package() -> None:
    code = "import sys, apu_engine.weights.gguf; sys.exit('gguf' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", sorted(GGML_TYPES))
def test_every_type(tmp_path: Path, dtype: int) -> None:
    """Shape, extent and bytes as gguf's reader sees them."""
    block = GGML_TYPES[dtype]
    path = tmp_path / "model.gguf"
    writer = write(path, before=[1.0, 2.0, 3.0])
    raw = np.arange(6 * block.nbytes, dtype=np.uint8).reshape(3, 2 * block.nbytes)
    writer.add_tensor("w", raw, raw_shape=raw.shape, raw_dtype=GGMLQuantizationType(dtype))
    finish(writer)
    tensor = open_model(path).tensors["w"]
    assert tensor.dtype == dtype and tensor.type_name == block.name
    assert tensor.shape == (3, 2 * block.elements)
    assert tensor.elements == 6 * block.elements
    assert tensor.nbytes == raw.nbytes == 3 * tensor.row_bytes
    assert path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == raw.tobytes()


def assert_same(path: Path) -> ModelFile:
    """Every key and tensor equals what the gguf package reads."""
    model, other = open_model(path), gguf.GGUFReader(path)
    expected = {
        t.name: (int(t.tensor_type), tuple(int(n) for n in t.shape[::-1]), int(t.data_offset), int(t.n_bytes))
        for t in other.tensors
    }
    assert {t.name: (t.dtype, t.shape, t.offset, t.nbytes) for t in model.tensors.values()} == expected
    fields = {name: field.contents() for name, field in other.fields.items() if not name.startswith("GGUF.")}
    assert fields.keys() == model.metadata.keys()
    for key, value in fields.items():
        found = model.metadata[key]
        assert (list(found) if isinstance(value, list) else found) == value
    return model


def test_smollm2(smollm2_path: Path) -> None:
    model = assert_same(smollm2_path)
    assert model.architecture == "llama" and model.version == 3 and model.alignment == 32
    assert model.files == (smollm2_path,) and model.file_sizes == (98_362_432,)
    assert model.tensors["token_embd.weight"].shape == (49152, 576)
    assert model.weight_bytes < 98_362_432


def test_everything_a_writer_can_say(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = write(path, a=np.zeros((2, 3, 4)), b=np.ones(7))
    for add, value in (
        ("uint8", 255), ("int8", -128), ("uint16", 65535), ("int16", -3), ("uint32", 2**32 - 1),
        ("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63)), ("float32", 0.5), ("float64", 0.1),
        ("bool", True), ("string", "grüße, 世界"),
    ):  # fmt: skip
        getattr(writer, f"add_{add}")(f"x.{add}", value)
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.words", ["a", "", "ß"])
    finish(writer)
    model = assert_same(path)
    assert model.tensors["a"].shape == (2, 3, 4)


def test_path_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(write(tmp_path / "model.gguf", a=[1.0]))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in (
        tmp_path / "model.gguf",
        str(tmp_path / "model.gguf"),
        "~/model.gguf",
        "model.gguf",
        tmp_path,
        "~",
        ".",
    ):
        assert list(open_model(path).tensors) == ["a"]
    (tmp_path / "link.bin").symlink_to("model.gguf")
    assert open_model("link.bin").files == (Path("link.bin"),)


# ---------------------------------------------------------------- cost


def big_vocabulary(path: Path, tokens: int, merges: int) -> None:
    writer = write(path, a=[1.0])
    writer.add_token_list([f"token{i * 7919 % tokens}" for i in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges([f"Ġt{i} ok{i}" for i in range(merges)])
    finish(writer)


def test_a_large_vocabulary_is_found_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 129,280-token header: a handful of reads, no byte read twice, no string made before it is asked for."""
    path = tmp_path / "model.gguf"
    big_vocabulary(path, 129_280, 127_741)
    reads: list[tuple[int, int]] = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        reads.append((offset, count))
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    start = time.process_time()
    model = open_model(path)
    milliseconds = (time.process_time() - start) * 1000
    with capsys.disabled():
        print(f"\nheader of 129,280 tokens and 127,741 merges: {milliseconds:.0f} ms")
    assert len(reads) <= 3
    assert all(before[0] + before[1] == after[0] for before, after in pairwise(reads))
    tokens, merges = (model.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    assert isinstance(tokens, StringArray) and isinstance(merges, StringArray)
    assert len(tokens) == 129_280 and tokens[1] == "token7919" and merges[127_740] == "Ġt127740 ok127740"
    assert tokens.tolist()[-1] == tokens[-1]


def test_only_the_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of true size (sparse) costs one read."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    nbytes = 80 << 30
    writer.add_tensor_info("w", (nbytes // 4 // 1024, 1024), np.dtype(np.float32), nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = -(-path.stat().st_size // 32) * 32
    os.truncate(path, size + nbytes)
    model = open_model(path)
    assert model.weight_bytes == nbytes and model.file_sizes == (size + nbytes,)
    os.truncate(path, size + nbytes - 1)
    with pytest.raises(FormatError, match=r'tensor "w": .*truncated'):
        open_model(path)


# ---------------------------------------------------------------- getters


@pytest.fixture
def model() -> ModelFile:
    metadata = {
        "i": 3, "f": 0.5, "nan": float("nan"), "s": "text", "b": True, "e": np.empty(0, np.int32),
        "ai": np.array([4, 5, 6], np.uint32), "af": np.array([0.5, 2.0], np.float32), "ab": np.array([True]),
        "nested": [[1]], "inf": np.array([1.0, np.inf], np.float32),
    }  # fmt: skip
    return ModelFile(Path("m.gguf"), (Path("m.gguf"),), (1,), 3, 32, metadata, {})


def test_getters(model: ModelFile) -> None:
    assert model.get_int("i", lo=3, hi=3) == 3 and model.get_int("none", 7) == 7 and model.get_int("none", None) is None
    assert model.get_float("f") == 0.5 and model.get_float("i") == 3.0 and model.get_float("none", 1.0, lo=2.0) == 1.0
    assert np.isnan(model.get_float("nan", finite=False))
    assert model.get_str("s") == "text" and model.get_str("none", "") == ""
    assert model.get_bool("b") is True and model.get_bool("none", False) is False
    assert model.get_array("ai", "int", length=3, lo=4, hi=6).tolist() == [4, 5, 6]
    assert model.get_array("af", "float").tolist() == [0.5, 2.0]
    assert model.get_array("ab", "bool").tolist() == [True]
    assert model.get_array("none", "str", []) == []
    for kind in ("int", "float", "bool", "str"):
        assert len(model.get_array("e", kind)) == 0
    assert model.get_per_layer("ai", 3) == (4, 5, 6) and model.get_per_layer("i", 2) == (3, 3)
    assert model.get_per_layer("none", 2, 9) == (9, 9) and model.get_per_layer("none", 2, None) is None
    assert repr(REQUIRED) == "REQUIRED"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.get_int("none"), "none: is required but missing"),
        (lambda m: m.get_int("i", lo=4), "i: expected at least 4, found 3"),
        (lambda m: m.get_int("i", hi=2), "i: expected at most 2, found 3"),
        (lambda m: m.get_int("i", lo=4, hi=9), "i: expected between 4 and 9, found 3"),
        (lambda m: m.get_int("f"), "f: expected an integer, found 0.5 (float)"),
        (lambda m: m.get_int("b"), "b: expected an integer, found True (bool)"),
        (lambda m: m.get_int("ai"), "ai: expected an integer, found an array (int, 3 entries)"),
        (lambda m: m.get_float("s"), "s: expected a number, found the string 'text'"),
        (lambda m: m.get_float("nan"), "nan: expected a finite number, found nan"),
        (lambda m: m.get_str("i"), "i: expected a string, found 3 (int)"),
        (lambda m: m.get_bool("i"), "i: expected true or false, found 3 (int)"),
        (lambda m: m.get_array("i", "int"), "i: expected an array of int, found 3 (int)"),
        (lambda m: m.get_array("ai", "str"), "ai: expected an array of str, found an array (int, 3 entries)"),
        (lambda m: m.get_array("nested", "int"), "nested: expected an array of int, found an array (nested"),
        (lambda m: m.get_array("ai", "int", length=4), "ai: expected 4 entries, found 3"),
        (lambda m: m.get_array("ai", "int", hi=5), "ai[2]: expected at most 5, found 6"),
        (lambda m: m.get_array("af", "float", lo=1), "af[0]: expected at least 1, found 0.5"),
        (lambda m: m.get_array("inf", "float"), "inf[1]: expected a finite number, found inf"),
        (lambda m: m.get_per_layer("ai", 4), "ai: expected 4 entries, found 3"),
        (lambda m: m.get_per_layer("s", 4), "s: expected an array of int, found the string 'text'"),
    ],
)  # fmt: skip
def test_getters_refuse(model: ModelFile, call: Any, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        call(model)
    assert str(caught.value).startswith(f"m.gguf: {words}")


def test_row_bytes_of_a_scalar() -> None:
    assert TensorRef("x", 0, (), 0, 0, 4).row_bytes == 4
