"""Metadata that lies, tensors that are missing or mis-shaped, and what is not supported: each refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from apu_engine import arch
from apu_engine._native import lib
from apu_engine.arch.blocks import MATRIX_TYPES
from apu_engine.errors import ApuError, ConfigError, FormatError, ModelError
from apu_engine.weights.opening import open_model
from models import TinyModel, tiny_gemma3_gguf, tiny_llama_gguf, write

LIES = [
    ("block_count", 0, "between 1"),
    ("block_count", 1_000_000_000, "between 1"),
    ("block_count", None, "required"),
    ("block_count", 3, "blk.2"),
    ("block_count", "two", "integer"),
    ("embedding_length", 0, "between 1"),
    ("embedding_length", 2**31, "between 1"),
    ("embedding_length", 128, "token_embd.weight"),
    ("feed_forward_length", 0, "between 1"),
    ("feed_forward_length", 95, "ffn_gate"),
    ("feed_forward_length", [96, 64], "differs between layers"),
    ("attention.head_count", 0, "between 1"),
    ("attention.head_count", -4, "between 1"),
    ("attention.head_count", 2**31, "between 1"),
    ("attention.head_count", None, "required"),
    ("attention.head_count", 3, "head_count_kv"),
    ("attention.head_count_kv", 0, "between 1"),
    ("attention.head_count_kv", 8, "between 1"),
    ("attention.head_count_kv", 3, "does not divide"),
    ("attention.head_count_kv", 4, "attn_k"),
    ("attention.key_length", 0, "between 1"),
    ("attention.key_length", 10**6, "between 1"),
    ("attention.value_length", 8, "key length"),
    ("attention.layer_norm_rms_epsilon", math.nan, "finite"),
    ("attention.layer_norm_rms_epsilon", 0.0, "between"),
    ("attention.layer_norm_rms_epsilon", math.inf, "finite"),
    ("attention.layer_norm_rms_epsilon", -1e-5, "between"),
    ("attention.layer_norm_rms_epsilon", None, "required"),
    ("attention.scale", math.nan, "finite"),
    ("attention.causal", False, "encoders"),
    ("context_length", 0, "between 1"),
    ("context_length", 2**31, "between 1"),
    ("rope.dimension_count", 0, "between 2"),
    ("rope.dimension_count", 15, "even"),
    ("rope.dimension_count", 18, "between 2"),
    ("rope.freq_base", 0.0, "between"),
    ("rope.freq_base", math.nan, "finite"),
    ("rope.scaling.type", "longrope", "not supported"),
    ("rope.scaling.type", 3, "string"),
    ("rope.scaling.factor", math.nan, "finite"),
    ("rope.scaling.factor", -2.0, "between"),
    ("rope.scaling.factor", 0.5, "at least 1"),
    ("vocab_size", 0, "between 1"),
    ("vocab_size", 321, "token_embd.weight"),
    ("expert_count", 8, "mixtures of experts"),
]


@pytest.mark.parametrize(("key", "value", "says"), LIES, ids=[f"{key}={value}" for key, value, _ in LIES])
def test_llama_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    tiny = tiny_llama_gguf(tmp_path / "lie.gguf", tokenizer=False, metadata={f"llama.{key}": value})
    with pytest.raises(FormatError) as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)
    assert "lie.gguf" in str(error.value)
    assert (
        f"llama.{key}" in str(error.value)
        or "blk." in str(error.value)
        or "token_embd" in str(error.value)
        or ("head_count" in str(error.value))
    )


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.sliding_window", -1, "between 0"),
        ("attention.sliding_window_pattern", 0, "between 1"),
        ("attention.sliding_window_pattern", [True, False], "expected 6 entries"),
        ("rope.freq_base_swa", math.nan, "finite"),
        ("final_logit_softcapping", math.nan, "finite"),
        ("attn_logit_softcapping", -1.0, "between 0"),
        ("attention.key_length", 48, "value_length"),
        ("rope.scaling.type", "su", "not supported"),
    ],
)
def test_gemma3_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    metadata = {f"gemma3.{key}": value}
    tiny = tiny_gemma3_gguf(tmp_path / "lie.gguf", tokenizer=False, metadata=metadata)
    with pytest.raises(FormatError, match=r"lie\.gguf") as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)


def test_yarn_needs_its_original_context(tmp_path: Path) -> None:
    metadata = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    tiny = tiny_llama_gguf(tmp_path / "lie.gguf", metadata=metadata)
    with pytest.raises(FormatError, match="original_context_length"):
        arch.describe(open_model(tiny.path))


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(321)]}
    tiny = tiny_llama_gguf(tmp_path / "lie.gguf", metadata=metadata)
    with pytest.raises(FormatError, match=r"tokenizer\.ggml\.tokens.*321"):
        arch.describe(open_model(tiny.path))


def _changed(tmp_path: Path, change: Callable[[TinyModel], None], **options: Any) -> Path:
    tiny = tiny_llama_gguf(tmp_path / "changed.gguf", **options)
    change(tiny)
    write(tiny)
    return tiny.path


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_q.weight",
        "blk.1.ffn_down.weight",
    ],
)
def test_missing_and_misshaped_tensors_are_named(tmp_path: Path, name: str) -> None:
    path = _changed(tmp_path, lambda tiny: tiny.tensors.pop(name))
    with pytest.raises(FormatError, match="missing") as error:
        arch.describe(open_model(path))
    assert name in str(error.value)

    def widen(tiny: TinyModel) -> None:
        tiny.tensors[name] = np.pad(tiny.tensors[name], [(0, 32)] * tiny.tensors[name].ndim)

    path = _changed(tmp_path, widen)
    with pytest.raises(FormatError) as error:
        arch.describe(open_model(path))
    assert name in str(error.value) and "expected" in str(error.value)


def test_rope_factors_of_another_size(tmp_path: Path) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", rope_factors=np.ones(5, np.float32))
    with pytest.raises(FormatError, match=r"rope_freqs\.weight.*\(8,\).*\(5,\)"):
        arch.describe(open_model(tiny.path))


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    def add(tiny: TinyModel) -> None:
        tiny.tensors["blk.0.attn_rot_embd.weight"] = np.zeros((3, 5), np.float32)
        tiny.tensors["blk.9.attn_q.weight"] = np.zeros(7, np.float32)

    info = arch.describe(open_model(_changed(tmp_path, add)))
    assert info.layers == 2


def test_types_without_a_kernel_are_named(tmp_path: Path) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", D=256, F=256)
    writer = gguf.GGUFWriter(str(tiny.path), "llama")
    for key, value in tiny.metadata.items():
        if key.startswith("llama."):
            writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)
    for name, values in tiny.tensors.items():
        writer.add_tensor(name, values.astype(np.float64) if name == "blk.1.ffn_up.weight" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight.*F64") as error:
        arch.describe(open_model(tiny.path))
    assert error.value.names == ("blk.1.ffn_up.weight",)


def test_norms_must_not_be_blocks(tmp_path: Path) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf")
    writer = gguf.GGUFWriter(str(tiny.path), "llama")
    for key, value in tiny.metadata.items():
        if key.startswith("llama."):
            writer.add_uint32(key, value) if isinstance(value, int) else writer.add_float32(key, value)
    for name, values in tiny.tensors.items():
        if name == "blk.0.ffn_norm.weight":
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_norm\.weight.*Q8_0"):
        arch.describe(open_model(tiny.path))


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mamba'.*llama, gemma3") as error:
        arch.describe(open_model(tmp_path / "model.gguf"))
    assert error.value.names == ("mamba",)


@pytest.mark.parametrize(
    "options",
    [{"ctx": 0}, {"ctx": 8, "kv_type": "q3"}, {"ctx": 8, "precision": "low"}, {"ctx": 8, "max_rows": 0}],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        arch.PlanOptions(**options)


def test_describe(tmp_path: Path) -> None:
    info = arch.describe(open_model(tiny_llama_gguf(tmp_path / "a.gguf", quant="Q8_0").path))
    assert (info.architecture, info.layers, info.vocabulary, info.hidden_size) == ("llama", 2, 320, 64)
    assert info.context_trained == 512
    assert info.kv_bytes_per_token == (2 * 2 * 2 * 16 * 2,)  # layers, K and V, heads, head size, f16
    info = arch.describe(open_model(tiny_gemma3_gguf(tmp_path / "b.gguf").path))
    assert info.windows == (0, 24)
    assert info.kv_bytes_per_token == (2 * 32 * 4, 5 * 2 * 32 * 4)  # one full layer, five windowed, f32


def test_kv_type_and_page_counts(tmp_path: Path) -> None:
    model = open_model(tiny_gemma3_gguf(tmp_path / "model.gguf", window=24).path)
    spec = arch.plan(model, arch.PlanOptions(ctx=4000, parallel=2, max_rows=64, kv_type="f16"))
    full, windowed = arch.groups(spec)
    assert full.page_count == 2 * 32
    assert windowed.page_count == 2 * 2  # 24 + 63 tokens lie on at most two pages
    assert full.page_bytes_total == 2 * 128 * 32 * 2
    assert {state.dtype for state in spec.states} == {lib.APU_F16}
    spec = arch.plan(model, arch.PlanOptions(ctx=4000, kv_type="q8_0"))
    assert arch.groups(spec)[0].page_bytes_total == 2 * 128 * 34  # of 32 elements


def test_heads_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    model = open_model(tiny_llama_gguf(tmp_path / "model.gguf").path)  # heads of 16
    with pytest.raises(
        ConfigError, match=r"q8_0 stores blocks of 32 elements, but the heads of .*gguf have 16; use f16"
    ):
        arch.plan(model, arch.PlanOptions(ctx=8, kv_type="q8_0"))


def test_every_kernel_type_is_accepted(device: Any) -> None:
    """MATRIX_TYPES says what the library can multiply: it accepts these types, and no others."""
    from apu_engine._native import UnsupportedError, check, ffi

    x, y, w = ffi.new("float[256]"), ffi.new("float[1]"), ffi.new("char[4096]")
    for dtype in (*range(42),):
        call = (device.handle, dtype, 1, w, 1024, x, y, 1, 1, 256)
        if dtype in MATRIX_TYPES:
            check(lib.apu_kernel_matmul(*call))
        else:
            with pytest.raises((UnsupportedError, ApuError)):
                check(lib.apu_kernel_matmul(*call))
