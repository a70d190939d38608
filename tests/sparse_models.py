"""Model files of true size that take no disk space: a header over a hole."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

GIB = 1 << 30
FLASH_BYTES = round(80.76 * GIB)  # DeepSeek V4 Flash, Q2


def sparse_moe(path: Path, weight_bytes: int = FLASH_BYTES, *, K: int = 4, context: int = 131072) -> Path:
    """A qwen3moe of 40 layers with IQ2_XXS experts, as many as fit, and `weight_bytes` in all: the rest is an output
    head of its own width. KV cache: 40 layers x 2 x K heads x 128 values per token.
    """
    D, H, d, V, layers, used = 4096, 32, 128, 4096, 40, 6
    table: list[tuple[str, tuple[int, ...], Type]] = [
        ("token_embd.weight", (V, D), Type.Q8_0),
        ("output_norm.weight", (D,), Type.F32),
        ("output.weight", (V, D), Type.Q8_0),
    ]
    for layer in range(layers):
        table += [
            (f"blk.{layer}.{name}.weight", shape, dtype)
            for name, shape, dtype in (
                ("attn_norm", (D,), Type.F32),
                ("attn_q", (H * d, D), Type.Q8_0),
                ("attn_k", (K * d, D), Type.Q8_0),
                ("attn_v", (K * d, D), Type.Q8_0),
                ("attn_output", (D, H * d), Type.Q8_0),
                ("attn_q_norm", (d,), Type.F32),
                ("attn_k_norm", (d,), Type.F32),
                ("ffn_norm", (D,), Type.F32),
            )
        ]
    rest = weight_bytes - sum(_nbytes(shape, dtype) for _, shape, dtype in table)
    experts = 256
    router = layers * _nbytes((experts, D), Type.F32)
    F = (rest - router) // (layers * 3 * _nbytes((experts, 1, D), Type.IQ2_XXS)) // 256 * 256
    for layer in range(layers):
        table += [
            (f"blk.{layer}.ffn_gate_inp.weight", (experts, D), Type.F32),
            (f"blk.{layer}.ffn_gate_exps.weight", (experts, F, D), Type.IQ2_XXS),
            (f"blk.{layer}.ffn_up_exps.weight", (experts, F, D), Type.IQ2_XXS),
            (f"blk.{layer}.ffn_down_exps.weight", (experts, D, F), Type.IQ2_XXS),
        ]
    left = weight_bytes - sum(_nbytes(shape, dtype) for _, shape, dtype in table)
    table.append(("unused.weight", (left // 4,), Type.F32))
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in {
        "block_count": layers,
        "context_length": context,
        "embedding_length": D,
        "feed_forward_length": F * used,
        "attention.head_count": H,
        "attention.head_count_kv": K,
        "attention.key_length": d,
        "attention.value_length": d,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_feed_forward_length": F,
        "vocab_size": V,
    }.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    total = 0
    for name, shape, dtype in table:
        nbytes = _nbytes(shape, dtype)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=dtype)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return path


def _nbytes(shape: tuple[int, ...], dtype: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    return int(np.prod(shape, dtype=np.int64)) // block * size
