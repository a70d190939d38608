"""gpt-oss in 16 or 32 bits: experts' matrices lie transposed, gate and up in turn, so they are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from apu_engine.weights.families.family import ATTENTION, KEYS, Family, Rewritten, rope
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_act", "silu")
    hyper.expect("swiglu_alpha", 1.702)
    hyper.expect("swiglu_limit", 7.0)
    kinds = hyper.strings("layer_types", hyper.integer("num_hidden_layers"))
    pattern = np.array([kind == "sliding_attention" for kind in kinds])
    return rope(hyper) | {"attention.sliding_window_pattern": pattern}


_KEYS = KEYS | {
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
}
_NAMES = ATTENTION | {
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": Rewritten(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"), lambda values, part: values[..., part::2].swapaxes(-1, -2)
    ),
    "mlp.experts.gate_up_proj_bias": Rewritten(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), lambda values, part: values[..., part::2]
    ),
    "mlp.experts.down_proj": Rewritten(("ffn_down_exps.weight",), lambda values, part: values.swapaxes(-1, -2)),
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
_DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128}
FAMILIES = {"gpt_oss": Family("gpt-oss", _KEYS, _NAMES, more=_more, tensors=lambda hyper: [], defaults=_DEFAULTS)}
