"""Qwen 2 and 2.5, dense: llama's layers with biases of q, k and v, and a rotation that takes halves.

Source: arXiv 2407.10671.
"""

from __future__ import annotations

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, read_common
from apu_engine.plan.operands import ROPE_HALVES
from apu_engine.weights.model_file import ModelFile


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    _, fields = read_common(model, activation="silu", rope_style=ROPE_HALVES)
    return Config(**fields)


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer)
        x = b.attention_output(attended, residual=x)
        x = b.feed_forward(x, residual=x)
    b.head(x)
