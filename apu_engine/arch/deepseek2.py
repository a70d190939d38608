"""DeepSeek V2, V2-Lite, V3, R1, and Kimi K2, which is built alike: latent attention, a mixture with shared experts.

The cache holds one row per token and layer, the normed latent and a rotated key that all heads share. With
`yarn_log_multiplier`, a tenth of the published mscale_all_dim, YaRN leaves the rotation's magnitude alone: a correction
goes to the scale of the scores, squared. V2's router takes softmax and the best expert of a group, V3's sigmoid, a bias
for the choice and the best two of a group. Layers of next-token prediction at the end are left out. Sources: arXiv
2405.04434, arXiv 2412.19437.
"""

from __future__ import annotations

import math
from dataclasses import replace

from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import Config, predicting_layers, read_common
from apu_engine.plan.operands import ROPE_PAIRS
from apu_engine.weights.model_file import ModelFile


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(model, activation="silu", rope_style=ROPE_PAIRS, mixture=True, latent=True)
    layers, rope, latent = fields["layers"], fields["ropes"][0], fields["latent"]
    scale = (latent.nope + latent.rope) ** -0.5
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, 10.0, default=0.0)
    if rope.original_context and multiplier:
        stretch = -math.log(rope.frequency_scale)
        rope = replace(rope, magnitude=rope.magnitude / (1.0 + 0.1 * stretch))
        scale *= (1.0 + multiplier * stretch) ** 2
    layers -= predicting_layers(keys, layers)
    dense = keys.integer("leading_dense_block_count", 0, layers, default=0)
    fields |= {"layers": layers, "windows": (0,) * layers, "ropes": (rope,) * layers}
    return Config(**fields | {"attention_scale": scale, "dense_layers": dense})


def build(b: Blocks) -> None:
    x = b.embed()  # (T, D)
    for layer in b.layers():
        x = b.attention_output(b.latent_attention(x, layer), residual=x, letters="D H*dv")
        x = b.feed_forward(x, residual=x) if layer < b.config.dense_layers else b.experts(x, residual=x)
    b.head(x)
