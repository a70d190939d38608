"""Llama and its relatives (Mistral, SmolLM2, ...): GQA with rotary embedding, SwiGLU, one residual stream.

GGUF stores their q and k rows permuted so that rotation pairs are neighbours, hence ROPE_PAIRS. Llama 3's
frequency factors come as `rope_freqs.weight`. Sources: arXiv 2302.13971, 2407.21783.
"""

from __future__ import annotations

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, read_common
from apu_engine.plan.operands import ROPE_PAIRS
from apu_engine.weights.model_file import ModelFile


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    _, fields = read_common(model, activation="silu", rope_style=ROPE_PAIRS)
    return Config(**fields)


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer)
        x = b.attention_output(attended, residual=x)
        x = b.feed_forward(x, residual=x)
    b.head(x)
