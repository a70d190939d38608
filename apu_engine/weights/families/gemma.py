"""Gemma 3, text. Its norms are stored without the 1 that the architecture adds; published files leave most
hyperparameters to the model's own code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from apu_engine.weights.families.family import ATTENTION, FEED_FORWARD, HEAD_NORMS, KEYS, Family, rope, rope_values
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_activation", "gelu_pytorch_tanh")
    hyper.expect("use_bidirectional_attention", False)
    layers = hyper.integer("num_hidden_layers")
    out = rope(hyper, "full_attention")
    local = rope_values(hyper, "sliding_attention")
    if hyper.has("rope_parameters"):
        out["rope.freq_base_swa"] = local.number("rope_theta", 10000.0)
    if hyper.has("layer_types"):
        kinds = hyper.strings("layer_types", layers)
        out["attention.sliding_window_pattern"] = np.array([kind == "sliding_attention" for kind in kinds])
    scalar = hyper.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise hyper.fail("query_pre_attn_scalar", f"expected a positive number, found {scalar}")
    return out | {"attention.scale": scalar**-0.5}


_GEMMA3_KEYS = KEYS | {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = Family(
    "gemma3",
    _GEMMA3_KEYS,
    ATTENTION
    | HEAD_NORMS
    | FEED_FORWARD
    | {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    more=_more,
    tensors=lambda hyper: [],
    norm_offset=1.0,
    defaults=_DEFAULTS,
)
FAMILIES = {"gemma3_text": _GEMMA3, "gemma3": _GEMMA3}
