"""gpt-oss (20b, 120b): attention with sinks and biases, windowed in every other layer, and experts with biases.

Each head has a score without a value, its sink. The router has a bias, weights are the softmax of the chosen experts'
products. Gate and up of an expert are bounded by 7; gate * sigmoid(1.702 gate) meets up + 1. YaRN mixes between
dimensions that are not rounded, which GGUF files do not say. Source: arXiv 2508.10925 and openai/gpt-oss.
"""

from __future__ import annotations

from dataclasses import replace

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import MAX_CONTEXT, Config, read_common, windowed_layers
from apu_engine.plan.operands import ROPE_HALVES
from apu_engine.weights.model_file import ModelFile

PATTERN = 2  # every second layer sees all tokens
LIMIT = 7.0


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(model, activation="swiglu_oai", rope_style=ROPE_HALVES, mixture=True)
    window = keys.integer("attention.sliding_window", 1, MAX_CONTEXT)
    windowed = windowed_layers(keys, fields["layers"], PATTERN)
    rope = fields["ropes"][0]
    if not keys.has("rope.scaling.yarn_truncate"):
        rope = replace(rope, whole=False)
    fields |= {"windows": tuple(window if w else 0 for w in windowed), "ropes": (rope,) * fields["layers"]}
    return Config(**fields)


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer, sinks=True)
        x = b.attention_output(attended, residual=x)
        x = b.experts(x, residual=x, norm="post_attention_norm", limits=(LIMIT, 0.0))
    b.head(x)
