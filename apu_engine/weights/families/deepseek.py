"""DeepSeek V2 and V3 (R1, Kimi K2). Each head's keys and values stay in one matrix, kv_b_proj, as they are published;
layers of next-token prediction behind the last one are left out.
"""

from __future__ import annotations

import math
from typing import Any

from apu_engine.weights.families.family import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    KEYS,
    SHARED_EXPERTS,
    Family,
    rope,
    rope_kind,
    rope_values,
)
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_act", "silu")
    hyper.expect("moe_layer_freq", 1)
    turned = hyper.integer("qk_rope_head_dim")
    out = rope(hyper, dims=turned)
    values = rope_values(hyper)
    if rope_kind(values) == "yarn" and values.get("mscale_all_dim"):
        # Of the magnitude the architecture takes off what the factor alone gives, see arch/deepseek2.py.
        out["rope.scaling.yarn_log_multiplier"] = 0.1 * values.number("mscale_all_dim")
        out["rope.scaling.yarn_attn_factor"] *= 1.0 + 0.1 * math.log(values.number("factor"))
    heads = hyper.integer("num_attention_heads")
    out |= {
        "attention.head_count_kv": heads,
        "attention.key_length": hyper.integer("qk_nope_head_dim") + turned,
        "attention.value_length": hyper.integer("v_head_dim"),
    }
    return out


def _v2(hyper: Hyper) -> dict[str, Any]:
    out = _more(hyper) | {"expert_gating_func": 1, "expert_weights_norm": hyper.get("norm_topk_prob", False)}
    hyper.expect("topk_method", "greedy", "group_limited_greedy")
    hyper.expect("scoring_func", "softmax")
    if hyper.get("topk_method") == "group_limited_greedy":
        out |= {"expert_group_count": hyper.get("n_group"), "expert_group_used_count": hyper.get("topk_group")}
    return out


def _v3(hyper: Hyper) -> dict[str, Any]:
    out = _more(hyper) | {"expert_gating_func": 2, "expert_weights_norm": hyper.get("norm_topk_prob", True)}
    hyper.expect("scoring_func", "sigmoid")
    hyper.expect("topk_method", "noaux_tc")
    out |= {"expert_group_count": hyper.get("n_group"), "expert_group_used_count": hyper.get("topk_group")}
    return out | {"rope.halves": not hyper.get("rope_interleave", True)}


_KEYS = {key: name for key, name in KEYS.items() if name not in ("head_dim", "num_key_value_heads")} | {
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
}
_NAMES = (
    ATTENTION
    | FEED_FORWARD
    | EXPERTS
    | SHARED_EXPERTS
    | {
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
    }
)
FAMILIES = {
    "deepseek_v2": Family("deepseek2", _KEYS, _NAMES, more=_v2, tensors=lambda hyper: []),
    "deepseek_v3": Family("deepseek2", _KEYS, _NAMES, more=_v3, tensors=lambda hyper: []),
}
