"""Llama and Mistral. Their q and k rows are as they were trained, first halves of rotated pairs before second ones:
GGUF's are permuted, so the rotation is told to take halves.
"""

from __future__ import annotations

from typing import Any

from apu_engine.weights.families.family import ATTENTION, FEED_FORWARD, KEYS, Family, rope
from apu_engine.weights.families.hyper import Hyper


def _more(hyper: Hyper) -> dict[str, Any]:
    hyper.expect("hidden_act", "silu")
    out = rope(hyper) | {"rope.halves": True}
    if hyper.get("model_type") == "mistral" and hyper.has("sliding_window"):
        out["attention.sliding_window"] = hyper.integer("sliding_window")
    return out


_NAMES = ATTENTION | FEED_FORWARD | {"post_attention_layernorm": "ffn_norm"}
FAMILIES = {
    "llama": Family("llama", KEYS, _NAMES, more=_more, defaults={"rope_theta": 10000.0}),
    "mistral": Family("llama", KEYS, _NAMES, more=_more, defaults={"rope_theta": 10000.0, "num_key_value_heads": 8}),
}
