"""GLM 4.5, 4.5-Air, 4.6, 4.7: attention that rotates half of each head, and DeepSeek V3's kind of mixture.

q, k and v have biases; the larger models also norm each head of q and k. The router takes sigmoid and a bias for the
choice; one shared expert, and dense layers first. Layers of next-token prediction at the end are left out. Source:
arXiv 2508.06471.
"""

from __future__ import annotations

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, predicting_layers, read_common, read_experts
from apu_engine.plan.operands import ROPE_HALVES
from apu_engine.weights.model_file import ModelFile

SIGMOID = 2  # where a file does not say how the router scores


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(
        model,
        activation="silu",
        rope_style=ROPE_HALVES,
        experts=lambda keys: read_experts(keys, grouped=True, score=SIGMOID),
    )
    layers = fields["layers"] - predicting_layers(keys, fields["layers"])
    dense = keys.integer("leading_dense_block_count", 0, layers, default=0)
    fields |= {"layers": layers, "windows": fields["windows"][:layers], "ropes": fields["ropes"][:layers]}
    return Config(**fields | {"dense_layers": dense})


def build(b: Blocks) -> None:
    norm = "post_attention_norm"
    x = b.embed()  # (T, D)
    for layer in b.layers():
        attended = b.attention(x, layer, head_norms=b.has("attn_q_norm.weight"))
        x = b.attention_output(attended, residual=x)
        if layer < b.config.dense_layers:
            x = b.feed_forward(x, residual=x, norm=norm)
        else:
            x = b.experts(x, residual=x, norm=norm)
    b.head(x)
