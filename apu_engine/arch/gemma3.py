"""Gemma 3 (text): norms around each half-layer, q and k norms, five windowed layers to one global one.

Windowed layers rotate with their own base and without scaling. GGUF's norm weights have the architecture's +1
folded in. Source: arXiv 2503.19786.
"""

from __future__ import annotations

from dataclasses import replace

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, read_common, windowed_layers
from apu_engine.plan.operands import ROPE_HALVES, Rope
from apu_engine.weights.model_file import ModelFile

PATTERN = 6  # every sixth layer is global
LOCAL_BASE = 10000.0
LAYERS_27B = 62  # its scores are scaled by D / H, not by the head size; no key says so


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(
        model, head_size=256, activation="gelu_tanh", rope_style=ROPE_HALVES, rope_base=1_000_000.0
    )
    window = keys.integer("attention.sliding_window", 0, 1 << 27, default=0)
    windowed = windowed_layers(keys, fields["layers"], PATTERN) if window else (False,) * fields["layers"]
    rope: Rope = fields["ropes"][0]
    local = Rope(rope.dims, ROPE_HALVES, keys.number("rope.freq_base_swa", 1.0, 1e12, default=LOCAL_BASE))
    fields["windows"] = tuple(window if w else 0 for w in windowed)
    fields["ropes"] = tuple(local if w else rope for w in windowed)
    config = Config(
        **fields,
        embedding_scale=fields["D"] ** 0.5,
        attention_softcap=keys.number("attn_logit_softcapping", 0.0, 1e6, default=0.0),
        final_softcap=keys.number("final_logit_softcapping", 0.0, 1e6, default=0.0),
    )
    if config.layers == LAYERS_27B and not keys.has("attention.scale"):
        return replace(config, attention_scale=(config.D // config.H) ** -0.5)
    return config


def build(b: Blocks) -> None:
    eps = b.config.eps
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer, head_norms=True)
        y = b.attention_output(attended, residual=None)
        x = b.builder.rms_norm("x", y, b.vector("post_attention_norm"), eps, residual=x, out=x)
        y = b.feed_forward(x, residual=None)
        x = b.builder.rms_norm("x", y, b.vector("post_ffw_norm"), eps, residual=x, out=x)
    b.head(x)
