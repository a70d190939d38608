"""What a family of Hugging Face models is: names of tensors and hyperparameters, in this engine's and in theirs.

Ours are GGUF's, since architectures are written in them (arch/). A family says what stands under which name, and how a
tensor that GGUF would have rewritten is found in the file as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apu_engine.errors import ModelError
from apu_engine.weights.families.hyper import Hyper
from apu_engine.weights.made import F32, made
from apu_engine.weights.model_file import TensorRef


@dataclass(frozen=True, slots=True)
class Parts:
    """A matrix that holds the rows of several: of one after another, or one of each in turn where `interleaved`.

    `rows` are theirs, from hyperparameters; equal shares without.
    """

    names: tuple[str, ...]
    rows: Callable[[Hyper], tuple[int, ...]] | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A tensor that no kernel reads as it lies: tensors made of it in memory. `take(values, i)` is the i-th of `names`;
    matrices keep their type, others become float32.
    """

    names: tuple[str, ...]
    take: Callable[[NDArray[Any], int], NDArray[Any]]


Rule = str | Parts | Rewritten


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the folders of one `model_type`.

    `keys`: metadata below the architecture's prefix, by the name that config.json has for it. `names`: of modules (or
    whole tensors) within a layer; `*` stands for an expert's number. `outer`: the same outside the layers. `more` gives
    metadata that takes more than a name, `tensors` those that follow from hyperparameters alone. `norm_offset` is added
    to the weights of every norm. `defaults` are config.json's, as the model's own code has them.
    """

    architecture: str
    keys: Mapping[str, str]
    names: Mapping[str, Rule]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    more: Callable[[Hyper], dict[str, Any]] = lambda hyper: rope(hyper)
    tensors: Callable[[Hyper], list[TensorRef]] = lambda hyper: llama3_factors(hyper)
    norm_offset: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)


OUTER: dict[str, str] = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
ATTENTION: dict[str, Rule] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
HEAD_NORMS: dict[str, Rule] = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
FEED_FORWARD: dict[str, Rule] = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS: dict[str, Rule] = {  # one tensor per expert, or all in one as transformers holds them
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "mlp.experts.gate_up_proj": Parts(("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
SHARED_EXPERTS: dict[str, Rule] = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
KEYS: dict[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}


# ---------------------------------------------------------------- rotary embedding


def rope_values(hyper: Hyper, part: str = "") -> Hyper:
    """Values of the rotary embedding: `rope_parameters`, or `rope_scaling` and `rope_theta` beside it; of layers of one
    `part` where they differ.
    """
    given = hyper.object("rope_parameters")
    if given is not None and part and part in given.values:
        given = given.object(part)
    values = dict((given or hyper.object("rope_scaling") or Hyper(hyper.path, {})).values)
    for name in ("rope_theta", "partial_rotary_factor"):
        if hyper.has(name):
            values.setdefault(name, hyper.get(name))
    return Hyper(hyper.path, values)


def rope(hyper: Hyper, part: str = "", dims: int | None = None) -> dict[str, Any]:
    """Metadata of the rotary embedding. `dims` of a head are rotated, else its partial factor says how many.

    Raises ModelError for a kind of scaling without support.
    """
    values = rope_values(hyper, part)
    out: dict[str, Any] = {}
    if values.has("rope_theta"):
        out["rope.freq_base"] = values.number("rope_theta")
    if dims is not None:
        out["rope.dimension_count"] = dims
    elif values.has("partial_rotary_factor"):
        out["rope.dimension_count"] = int(hyper.head_size * values.number("partial_rotary_factor"))
    kind = rope_kind(values)
    if kind == "linear":
        out |= {"rope.scaling.type": "linear", "rope.scaling.factor": values.number("factor")}
    if kind == "yarn":
        out |= _yarn(hyper, values)
    return out


def rope_kind(values: Hyper) -> str:
    """ "default", "linear", "yarn" or "llama3"."""
    kind = values.get("rope_type", values.get("type", "default"))
    if kind in ("mrope", None):  # whose three positions are one for text
        kind = "default"
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise ModelError(
            f"{values.path}: rope_type: expected default, linear, yarn or llama3, found {kind!r:.80}: not supported",
            ("rope_type",),
        )
    return str(kind)


def _yarn(hyper: Hyper, values: Hyper) -> dict[str, Any]:
    factor = values.number("factor")
    if factor < 1.0:
        raise values.fail("rope_scaling.factor", f"expected at least 1, found {factor}")
    stretch = 1.0 + 0.1 * math.log(factor)  # metadata's factor multiplies this
    original = values.get("original_max_position_embeddings") or hyper.get("max_position_embeddings")
    out = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": values.number("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": values.number("beta_slow", 1.0),
        "rope.scaling.yarn_truncate": values.get("truncate", True),
    }
    magnitude = stretch
    if values.has("attention_factor"):
        magnitude = values.number("attention_factor")
    elif values.get("mscale") and values.get("mscale_all_dim"):
        up, down = (1.0 + 0.1 * values.number(name) * math.log(factor) for name in ("mscale", "mscale_all_dim"))
        magnitude = up / down
    out["rope.scaling.yarn_attn_factor"] = magnitude / stretch
    return out


def llama3_factors(hyper: Hyper) -> list[TensorRef]:
    """Llama 3's divisor of each frequency as a tensor; none for other kinds of scaling.

    Source: transformers' modeling_rope_utils; the same numbers as a converter to GGUF writes.
    """
    values = rope_values(hyper)
    if rope_kind(values) != "llama3":
        return []
    dims = int(hyper.head_size * values.number("partial_rotary_factor", 1.0))
    base, factor = values.number("rope_theta", 10000.0), values.number("factor")
    low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
    original = values.number("original_max_position_embeddings")
    if not (factor > 0 and 0 < low < high and original > 0 and base > 0 and 2 <= dims <= 1 << 16):
        raise values.fail("rope_scaling", "expected 0 < low_freq_factor < high_freq_factor and a positive factor")

    def make() -> NDArray[np.float32]:
        wavelength = 2 * math.pi * base ** (np.arange(0, dims, 2) / dims)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    return [made("rope_freqs.weight", F32, (dims // 2,), "rotary factors", make)]
