"""Llama and its relatives (Mistral, SmolLM2, ...): GQA with rotary embedding, SwiGLU, one residual stream.

GGUF stores their q and k rows permuted so that rotation pairs are neighbours, hence ROPE_PAIRS; folders of safetensors
have them as trained and say `rope.halves`. Llama 3's frequency factors come as `rope_freqs.weight`. Sources: arXiv
2302.13971, 2407.21783.
"""

from __future__ import annotations

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import MAX_CONTEXT, Config, read_common
from apu_engine.plan.operands import ROPE_PAIRS
from apu_engine.weights.model_file import ModelFile


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(model, activation="silu", rope_style=ROPE_PAIRS)
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, default=0)  # Mistral's first
    return Config(**fields | {"windows": (window,) * fields["layers"]})


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer)
        x = b.attention_output(attended, residual=x)
        x = b.feed_forward(x, residual=x)
    b.head(x)
