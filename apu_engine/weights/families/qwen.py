"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from apu_engine.weights.families.family import ATTENTION, EXPERTS, FEED_FORWARD, HEAD_NORMS, KEYS, Family, rope
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_act", "silu")
    hyper.expect("use_sliding_window", False)
    return rope(hyper)


def _more_with_experts(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("decoder_sparse_step", 1)
    hyper.expect("mlp_only_layers", [])
    out = _more(hyper)
    out["expert_weights_norm"] = hyper.get("norm_topk_prob", False)
    if not hyper.has("num_experts"):
        out["expert_count"] = hyper.get("num_local_experts", 128)
    return out


_PLAIN = ATTENTION | {"post_attention_layernorm": "ffn_norm"}
_NAMES = _PLAIN | HEAD_NORMS
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FAMILIES = {
    "qwen2": Family("qwen2", KEYS, _PLAIN | FEED_FORWARD, more=_more, defaults={"num_key_value_heads": 32}),
    "qwen3": Family("qwen3", KEYS, _NAMES | FEED_FORWARD, more=_more, defaults={"head_dim": 128}),
    "qwen3_moe": Family(
        "qwen3moe", KEYS | _EXPERT_KEYS, _NAMES | EXPERTS, more=_more_with_experts, defaults={"head_dim": 128}
    ),
}
