"""GLM 4.5 and what is built like it. Layers of next-token prediction behind the last one are left out."""

from __future__ import annotations

from typing import Any

from apu_engine.weights.families.family import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    HEAD_NORMS,
    KEYS,
    SHARED_EXPERTS,
    Family,
    rope,
)
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_act", "silu")
    return rope(hyper) | {"expert_gating_func": 2, "expert_weights_norm": hyper.get("norm_topk_prob", True)}


_KEYS = KEYS | {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_NAMES = (
    ATTENTION
    | HEAD_NORMS
    | FEED_FORWARD
    | EXPERTS
    | SHARED_EXPERTS
    | {"post_attention_layernorm": "post_attention_norm"}
)
FAMILIES = {
    "glm4_moe": Family("glm4moe", _KEYS, _NAMES, more=_more, tensors=lambda hyper: [], defaults={"rms_norm_eps": 1e-5})
}
