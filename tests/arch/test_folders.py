"""Folders that transformers wrote, against transformers: every family, in one file and in shards, 32 and 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from folders import KINDS, load, save, tiny
from harness import running
from safetensors.torch import load_file, save_file

from apu_engine._native import Device
from apu_engine.weights.opening import open_model

TOLERANCE = 1e-4
IDS = np.random.default_rng(7).integers(0, 320, 150).tolist()
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_transformers(tmp_path: Path, device: Device, kind: str) -> None:
    model = tiny(kind)
    expected = reference.logits(model, IDS)
    assert np.abs(expected).max() > 1
    save(model, tmp_path / "whole")
    save(model, tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    with running(tmp_path / "whole", device) as found:
        whole = found.prefill(IDS)
        assert np.abs(whole - expected).max() <= TOLERANCE
        assert np.array_equal(found.prefill(IDS, chunk=1), whole)
    with running(tmp_path / "shards", device) as found:
        assert np.array_equal(found.prefill(IDS), whole)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": _LLAMA3}),
        ("llama", {"rope_parameters": _YARN}),
        ("llama", {"rope_parameters": _YARN | {"attention_factor": 0.8}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
        ("mistral", {"sliding_window": 24}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("gemma3", {"rope_parameters": _GEMMA_ROPE, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 64}),
        ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"]}),
        ("gpt_oss", {"rope_parameters": _YARN, "layer_types": ["full_attention", "sliding_attention"]}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("deepseek_v3", {"rope_parameters": _YARN, "norm_topk_prob": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_variants(tmp_path: Path, device: Device, kind: str, options: dict[str, Any]) -> None:
    model = tiny(kind, **options)
    expected = reference.logits(model, IDS)
    with running(save(model, tmp_path / "folder"), device) as found:
        assert np.abs(found.prefill(IDS) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3", "deepseek_v3", "gpt_oss"])
def test_sixteen_bits(tmp_path: Path, device: Device, kind: str, dtype: torch.dtype) -> None:
    """The weights are those of the file; activations stay float."""
    folder = save(tiny(kind), tmp_path / "folder", dtype)
    expected = reference.logits(load(folder), IDS)
    with running(folder, device, precision="exact", kv_type="f32") as found:
        exact = found.prefill(IDS)
        assert np.array_equal(found.prefill(IDS, chunk=1), exact)
    assert np.abs(exact - expected).max() <= TOLERANCE


def test_odd_addresses(tmp_path: Path, device: Device) -> None:
    """A header of odd length is valid: every tensor is then at an odd byte."""
    model = tiny("qwen3_moe")
    plain, odd = save(model, tmp_path / "plain"), save(model, tmp_path / "odd")
    file = odd / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    assert all(ref.offset % 2 for ref in open_model(odd).tensors.values())
    with running(plain, device) as found:
        expected = found.prefill(IDS[:40])
    with running(odd, device) as found:
        assert np.array_equal(found.prefill(IDS[:40]), expected)


def test_experts_in_one_tensor(tmp_path: Path, device: Device) -> None:
    """As transformers holds them in memory, gate and up rows of each expert one after another."""
    folder = save(tiny("qwen3_moe"), tmp_path / "folder")
    with running(folder, device) as found:
        expected = found.prefill(IDS[:40])
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{mlp}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{mlp}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{mlp}.down_proj"] = parts["down"].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with running(folder, device) as found:
        assert np.array_equal(found.prefill(IDS[:40]), expected)
