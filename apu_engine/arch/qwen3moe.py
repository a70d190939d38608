"""Qwen 3 mixtures (30B-A3B, 235B-A22B, ...): Qwen 3 with a softmax router over experts in place of every feed-forward.

The published models divide a row's weights by their sum over the used experts (norm_topk_prob); GGUF files do not say
so, hence that is the default. Source: arXiv 2505.09388.
"""

from __future__ import annotations

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, read_common
from apu_engine.plan.operands import ROPE_HALVES
from apu_engine.weights.model_file import ModelFile


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    _, fields = read_common(model, activation="silu", rope_style=ROPE_HALVES, mixture=True)
    return Config(**fields)


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer, head_norms=True)
        x = b.attention_output(attended, residual=x)
        x = b.experts(x, residual=x)
    b.head(x)
