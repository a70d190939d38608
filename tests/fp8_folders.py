"""Tiny FP8 folders as they are published, and the same weights dequantised for an oracle.

The largest magnitude of a block becomes 448; matrices within layers are quantised, but for routers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KEPT = ("mlp.gate.weight", "norm.weight")


def quantise(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes (N, K), scales (blocks, blocks) of `dtype`)"""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale = (weight[at].abs().max() / 448).to(dtype).float()
            scales[i, j] = scale
            codes[at] = (weight[at] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales.to(dtype)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def fp8_folder(
    plain: Path,
    folder: Path,
    block: tuple[int, int] | None,
    *,
    scale_dtype: torch.dtype = torch.float32,
    per_tensor: bool = False,
) -> tuple[Path, Path]:
    """(an FP8 folder, its weights as float32) of a plain one in a single file; without a `block` a scale a row, or one
    for all of a matrix.
    """
    whole = folder.with_name(f"{folder.name}-dequantised")
    for to in (folder, whole):
        shutil.copytree(plain, to)
    stored: dict[str, torch.Tensor] = {}
    floats: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if ".layers." not in name or weight.dim() != 2 or name.endswith(KEPT):
            stored[name] = floats[name] = weight
            continue
        size = block or ((weight.shape[0] if per_tensor else 1), weight.shape[1])
        codes, scales = quantise(weight.float(), size, scale_dtype)
        stored[name] = codes
        stored[f"{name}_scale_inv" if block else f"{name}_scale"] = scales.reshape(()) if per_tensor else scales
        floats[name] = dequantise(codes, scales, size)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(floats, whole / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    quantised: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block:
        quantised["weight_block_size"] = list(block)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantised}))
    return folder, whole
