"""FP8 folders against transformers on the dequantised weights: blocks, cut blocks, a scale a row, one for all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from folders import load, save, tiny
from fp8_folders import fp8_folder
from harness import running
from safetensors.torch import load_file, save_file

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.errors import ApuError
from apu_engine.plan.cost import decode_bytes
from apu_engine.weights.opening import open_model

TOLERANCE = 1e-4
IDS = np.random.default_rng(7).integers(0, 320, 150).tolist()
_WIDE = {"hidden_size": 192, "intermediate_size": 320}
_DEEPSEEK = {"hidden_size": 160, "moe_intermediate_size": 40, "qk_nope_head_dim": 24, "v_head_dim": 24}


@pytest.mark.parametrize(
    ("kind", "options", "block", "scale_dtype"),
    [
        ("qwen3", _WIDE, (128, 128), torch.bfloat16),
        ("qwen3", {}, (16, 24), torch.float32),
        ("qwen3_moe", {}, (32, 32), torch.bfloat16),  # experts of 48 rows: their last blocks are cut
        ("deepseek_v3", _WIDE, (128, 128), torch.float32),
        ("deepseek_v3", _DEEPSEEK, (16, 32), torch.float32),  # heads begin within blocks
        ("qwen3", {}, None, torch.float32),
        ("deepseek_v3", {}, None, torch.bfloat16),
    ],
)
def test_agrees_with_transformers(
    tmp_path: Path,
    device: Device,
    kind: str,
    options: dict[str, Any],
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype,
) -> None:
    plain = save(tiny(kind, **options), tmp_path / "plain")
    folder, whole = fp8_folder(plain, tmp_path / "fp8", block, scale_dtype=scale_dtype)
    expected = reference.logits(load(whole), IDS)
    with running(folder, device, precision="exact", kv_type="f32") as found:
        exact = found.prefill(IDS)
        found.same_in_chunks(IDS, (1, 7))
    assert np.abs(expected).max() > 1
    assert np.abs(exact - expected).max() <= TOLERANCE
    with running(folder, device, kv_type="f32") as found:  # activations stay float
        assert np.array_equal(found.prefill(IDS), exact)


def test_one_scale_for_a_matrix(tmp_path: Path, device: Device) -> None:
    plain = save(tiny("qwen3"), tmp_path / "plain")
    folder, whole = fp8_folder(plain, tmp_path / "fp8", None, per_tensor=True)
    expected = reference.logits(load(whole), IDS[:40])
    with running(folder, device, kv_type="f32") as found:
        assert np.abs(found.prefill(IDS[:40]) - expected).max() <= TOLERANCE


def test_bytes_are_counted(tmp_path: Path) -> None:
    """Scales are tensors of the model, among those a device is given, and part of what a step reads."""
    plain = save(tiny("qwen3_moe"), tmp_path / "plain")
    model = open_model(fp8_folder(plain, tmp_path / "fp8", (32, 32))[0])
    size = (tmp_path / "fp8" / "model.safetensors").stat().st_size
    assert 0 < size - model.weight_bytes < 32768  # the header
    options = arch.PlanOptions(ctx=64)
    used = {ref.name for ref in arch.tensors_used(model, options)}
    assert {"blk.0.attn_q.weight_scale", "blk.1.ffn_down_exps.weight_scale"} <= used
    experts = model.tensors["blk.0.ffn_gate_exps.weight_scale"]
    assert (experts.shape, experts.nbytes) == ((8, 2, 2), 8 * 16)
    spec = arch.plan(model, options)
    scales = {tensor.name: tensor.scales for tensor in spec.tensors if tensor.scales}
    assert all(found is not None and found.nbytes for found in scales.values())
    total = sum(tensor.nbytes for tensor in spec.tensors if tensor.is_weight)
    assert total == sum(model.tensors[name].nbytes for name in used)
    assert decode_bytes(spec, 1)[0] < total


def _scale_of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(3, 2)


def _scale_in_integers(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale_inv"),
            'tensor "model.layers.1.mlp.up_proj.weight": is F8_E4M3, but there is no '
            "model.layers.1.mlp.up_proj.weight_scale_inv",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            'tensor "model.layers.1.mlp.up_proj.weight_scale_inv": has scales, but there is no '
            "model.layers.1.mlp.up_proj.weight",
        ),
        (_scale_of_another_shape, r"q_proj.weight_scale_inv\": has shape \[3, 2\], expected \[8, 2\] for a matrix"),
        (_scale_in_integers, "q_proj.weight_scale_inv\": has type I32, expected one of F32, F16, BF16"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(6, 2)}),
            "is a second scale of model.layers.0.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.input_layernorm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
            r"input_layernorm.weight\": is F8_E4M3 of shape \[64\]: only matrices",
        ),
    ],
    ids=["no-scale", "no-weight", "shape", "type", "two", "vector"],
)  # fmt: skip
def test_refused_tensors(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    folder, _ = fp8_folder(save(tiny("qwen3"), tmp_path / "plain"), tmp_path / "fp8", (16, 32))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ApuError, match=message):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size: expected two sizes of 1 to"),
        ({"weight_block_size": [0, 128]}, "weight_block_size: expected two sizes of 1 to"),
        ({"weight_block_size": [True, 128]}, "weight_block_size: expected two sizes of 1 to"),
        ({"weight_block_size": "128"}, "weight_block_size: expected two sizes of 1 to"),
        ({"fmt": "e5m2"}, "quantization_config.fmt: expected e4m3, found 'e5m2'"),
        ({"weight_block_size": [64, 64]}, r"weight_scale_inv\": has shape \[4, 3\], expected \[1, 2\] for a matrix"),
    ],
)
def test_refused_settings(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder, _ = fp8_folder(save(tiny("qwen3"), tmp_path / "plain"), tmp_path / "fp8", (16, 32))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ApuError, match=message):
        open_model(folder)
