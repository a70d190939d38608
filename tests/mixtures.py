"""Tiny mixtures of experts whose layers have more than Qwen's: gpt-oss and GLM 4.5, written as those of models.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models import TinyModel, attention_keys, bpe_tokenizer, normal, trunk, written


def tiny_gpt_oss_gguf(
    path: Path,
    *,
    layers: int = 4,
    D: int = 64,
    H: int = 4,
    K: int = 2,
    d: int = 32,
    F: int = 64,
    experts: int = 8,
    used: int = 3,
    window: int = 24,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-5,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A gpt-oss whose even layers have a sliding window; gates and ups are large enough to meet their limits."""
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, False)
    for layer in range(layers):
        matrices = {"attn_q": (H * d, D), "attn_k": (K * d, D), "attn_v": (K * d, D), "attn_output": (D, H * d)}
        matrices |= {"ffn_gate_inp": (experts, D), "ffn_down_exps": (experts, D, F)}
        block = {f"{name}.weight": normal(rng, shape, shape[-1] ** -0.5) for name, shape in matrices.items()}
        block |= {f"ffn_{n}_exps.weight": normal(rng, (experts, F, D), 4 * D**-0.5) for n in ("gate", "up")}
        biases = {name: shape[:-1] for name, shape in matrices.items()}
        biases |= {f"ffn_{n}_exps": (experts, F) for n in ("gate", "up")}
        block |= {f"{name}.bias": normal(rng, shape, 0.5) for name, shape in biases.items()}
        block |= {f"{name}.weight": 1.0 + normal(rng, (D,), 0.1) for name in ("attn_norm", "post_attention_norm")}
        block["attn_sinks.weight"] = normal(rng, (H,), 1.0)
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    keys = attention_keys(K, d) | {
        "attention.sliding_window": window,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 64,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_feed_forward_length": F,
    }
    shape = {"layers": layers, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V, "context": context, "eps": eps}
    shape |= {"experts": experts, "used": used, "window": window}
    words = bpe_tokenizer(V) | {"tokenizer.ggml.pre": "gpt-4o"} if tokenizer else {}
    return written(path, "gpt-oss", shape, keys, tensors, words, metadata, quant)


def tiny_glm4moe_gguf(
    path: Path,
    *,
    head_norms: bool = True,
    bias: bool = True,
    groups: int = 0,
    groups_used: int = 0,
    predicting: int = 0,
    dense: int = 1,
    layers: int = 3,
    D: int = 64,
    H: int = 4,
    K: int = 2,
    d: int = 32,
    F: int = 96,
    Fe: int = 32,
    experts: int = 8,
    used: int = 3,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-5,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A GLM 4.5 that rotates half of each head; `predicting` layers follow its own, as converters keep them."""
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, False)
    for layer in range(layers + predicting):
        matrices: dict[str, tuple[int, ...]] = {"attn_q": (H * d, D), "attn_k": (K * d, D), "attn_v": (K * d, D)}
        matrices["attn_output"] = (D, H * d)
        if layer < dense:
            matrices |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
        else:
            matrices |= {"ffn_gate_exps": (experts, Fe, D), "ffn_up_exps": (experts, Fe, D)}
            matrices |= {"ffn_down_exps": (experts, D, Fe)}
            matrices |= {"ffn_gate_shexp": (Fe, D), "ffn_up_shexp": (Fe, D), "ffn_down_shexp": (D, Fe)}
        block = {f"{name}.weight": normal(rng, shape, shape[-1] ** -0.5) for name, shape in matrices.items()}
        norms = {"attn_norm": D, "post_attention_norm": D} | (
            {"attn_q_norm": d, "attn_k_norm": d} if head_norms else {}
        )
        block |= {f"{name}.weight": 1.0 + normal(rng, (size,), 0.1) for name, size in norms.items()}
        if bias:
            block |= {f"attn_{n}.bias": normal(rng, (heads * d,), 0.3) for n, heads in (("q", H), ("k", K), ("v", K))}
        if layer >= dense:
            block["ffn_gate_inp.weight"] = normal(rng, (experts, D), 2 * D**-0.5)
            block["exp_probs_b.bias"] = normal(rng, (experts,), 0.2)
        if layer >= layers:
            block["nextn.eh_proj.weight"] = normal(rng, (D, 2 * D), D**-0.5)
            block |= {f"nextn.{name}.weight": 1.0 + normal(rng, (D,), 0.1) for name in ("enorm", "hnorm")}
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    keys = attention_keys(K, d) | {
        "rope.freq_base": 1_000_000.0,
        "rope.dimension_count": d // 2,
        "leading_dense_block_count": dense,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": Fe,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "nextn_predict_layers": predicting,
    }
    if groups:
        keys |= {"expert_group_count": groups, "expert_group_used_count": groups_used}
    shape: dict[str, Any] = {"layers": layers + predicting, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V}
    shape |= {"context": context, "eps": eps}
    words = bpe_tokenizer(V) | {"tokenizer.ggml.pre": "glm4"} if tokenizer else {}
    tiny = written(path, "glm4moe", shape, keys, tensors, words, metadata, quant)
    tiny.shape |= {"layers": layers, "Fe": Fe, "experts": experts, "used": used, "dense": dense, "bias": bias}
    tiny.shape |= {"head_norms": head_norms, "groups": groups or 1, "groups_used": groups_used or 1}
    return tiny
