"""Tensors, metadata and sizes of the architectures that can be synthesised, and which type each tensor gets.

A new architecture is one entry of ARCHITECTURES: tensors by GGUF name with shapes in letters (outermost dimension
first, L layers, D model, H heads, K kv heads, d head size, F feed-forward of one expert, E experts, k used of them,
V vocabulary), a function for its metadata, a vocabulary and presets. Vectors become norms near 1; matrices get random
weights of deviation 1 / sqrt(their last dimension).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from synthesis import vocabularies
from synthesis.blocks import NUMBERS, block_bytes, block_elements


@dataclass(frozen=True)
class Preset:
    """`letters`: the sizes. `keys`: metadata, below the architecture's prefix, that replaces what it would state.

    `size`: layers are as many as bring the file nearest to so many bytes. `tied`: the embedding is the output matrix.
    """

    letters: Mapping[str, int]
    about: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    size: float = 0.0
    tied: bool = False
    types: Mapping[str, str] = field(default_factory=dict)  # of matrices by name, in place of what --type gives


@dataclass(frozen=True)
class Architecture:
    """`layer(i, letters)`: tensors of layer i without their prefix. `other`: those outside, output excepted.

    `types`: of matrices that have the same type in every file, by name without the layer.
    """

    keys: Callable[[Mapping[str, int]], dict[str, Any]]
    layer: Callable[[int, Mapping[str, int]], Mapping[str, str]]
    vocabulary: Callable[[int], dict[str, Any]]
    presets: Mapping[str, Preset]
    other: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `shape` is outermost dimension first. Entries of an I32 table lie below `bound`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bound: int = 0

    @property
    def blocks(self) -> int:
        return math.prod(self.shape) // block_elements(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.blocks * block_bytes(self.dtype)


# ---------------------------------------------------------------- architectures


def _common(s: Mapping[str, int], context: int, eps: float, rope_base: float) -> dict[str, Any]:
    return {
        "context_length": context,
        "embedding_length": s["D"],
        "block_count": s["L"],
        "feed_forward_length": s["F"],
        "attention.head_count": s["H"],
        "attention.head_count_kv": s["K"],
        "attention.key_length": s["d"],
        "attention.value_length": s["d"],
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": rope_base,
    }


_ATTENTION = {
    "attn_norm": "D",
    "attn_q": "H*d D",
    "attn_k": "K*d D",
    "attn_v": "K*d D",
    "attn_output": "D H*d",
}
_HEAD_NORMS = {"attn_q_norm": "d", "attn_k_norm": "d"}
_GATED = {"ffn_norm": "D", "ffn_gate": "F D", "ffn_up": "F D", "ffn_down": "D F"}
_EXPERTS = {
    "ffn_norm": "D",
    "ffn_gate_inp": "E D",
    "ffn_gate_exps": "E F D",
    "ffn_up_exps": "E F D",
    "ffn_down_exps": "E D F",
}
_LLAMA = _ATTENTION | _GATED
_GEMMA3 = _ATTENTION | _HEAD_NORMS | {"post_attention_norm": "D"} | _GATED | {"post_ffw_norm": "D"}
_QWEN2 = _ATTENTION | {"attn_q.bias": "H*d", "attn_k.bias": "K*d", "attn_v.bias": "K*d"} | _GATED
_GPT_OSS = _ATTENTION | {
    **{f"attn_{n}.bias": letters for n, letters in (("q", "H*d"), ("k", "K*d"), ("v", "K*d"), ("output", "D"))},
    "attn_sinks": "H",
    "post_attention_norm": "D",
    "ffn_gate_inp": "E D",
    "ffn_gate_inp.bias": "E",
    **{f"ffn_{n}_exps": "E F D" for n in ("gate", "up")},
    **{f"ffn_{n}_exps.bias": "E F" for n in ("gate", "up")},
    "ffn_down_exps": "E D F",
    "ffn_down_exps.bias": "E D",
}
_QWEN3 = _ATTENTION | _HEAD_NORMS | _GATED
_QWEN3MOE = _ATTENTION | _HEAD_NORMS | _EXPERTS


def _llama_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _common(s, 131_072, 1e-5, 500_000.0) | {"vocab_size": s["V"], "rope.dimension_count": s["d"]}


def _gemma3_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _common(s, 32_768, 1e-6, 1_000_000.0) | {"attention.sliding_window": s["window"]}


def _qwen2_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _common(s, 32_768, 1e-6, 1_000_000.0)


def _qwen3_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _common(s, 40_960, 1e-6, 1_000_000.0)


def _mixture_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return {
        "expert_count": s["E"],
        "expert_used_count": s["k"],
        "expert_feed_forward_length": s["F"],
    }


def _qwen3moe_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _qwen3_keys(s) | _mixture_keys(s)


def _gpt_oss_keys(s: Mapping[str, int]) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 4096}
    keys = _common(s, 131_072, 1e-5, 150_000.0) | _mixture_keys(s) | {"attention.sliding_window": 128}
    return keys | {f"rope.scaling.{name}": value for name, value in scaling.items()}


def _glm4moe_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return _common(s, 131_072, 1e-5, 1_000_000.0) | {
        "rope.dimension_count": s["d"] // 2,
        "leading_dense_block_count": min(s["dense"], s["L"]),
        "expert_count": s["E"],
        "expert_used_count": s["k"],
        "expert_shared_count": 1,
        "expert_feed_forward_length": s["Fe"],
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "vocab_size": s["V"],
    }


def _glm4moe_layer(layer: int, s: Mapping[str, int]) -> dict[str, str]:
    out = _ATTENTION | {"attn_q.bias": "H*d", "attn_k.bias": "K*d", "attn_v.bias": "K*d"}
    out |= (_HEAD_NORMS if s["norms"] else {}) | {"post_attention_norm": "D"}
    if layer < s["dense"]:
        return out | {"ffn_gate": "F D", "ffn_up": "F D", "ffn_down": "D F"}
    out |= {"ffn_gate_inp": "E D", "exp_probs_b.bias": "E"}
    out |= {"ffn_gate_exps": "E Fe D", "ffn_up_exps": "E Fe D", "ffn_down_exps": "E D Fe"}
    return out | {"ffn_gate_shexp": "Fe D", "ffn_up_shexp": "Fe D", "ffn_down_shexp": "D Fe"}


def _deepseek2_keys(s: Mapping[str, int]) -> dict[str, Any]:
    grouped = s["groups"] > 1
    return {
        "context_length": 163_840,
        "embedding_length": s["D"],
        "block_count": s["L"],
        "feed_forward_length": s["F"],
        "leading_dense_block_count": min(s["dense"], s["L"]),
        "attention.head_count": s["H"],
        "attention.head_count_kv": 1,
        "attention.key_length": s["d"],
        "attention.value_length": s["Rk"],
        "attention.key_length_mla": s["dq"],
        "attention.value_length_mla": s["dv"],
        "attention.kv_lora_rank": s["Rk"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": s["dr"],
        "rope.freq_base": 10_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": s["E"],
        "expert_used_count": s["k"],
        "expert_shared_count": s["shared"],
        "expert_feed_forward_length": s["Fe"],
        "vocab_size": s["V"],
    } | (
        ({"attention.q_lora_rank": s["Rq"]} if s["Rq"] else {})
        | ({"expert_group_count": s["groups"], "expert_group_used_count": s["used"]} if grouped else {})
    )


def _deepseek2_layer(layer: int, s: Mapping[str, int]) -> dict[str, str]:
    query = {"attn_q": "H*dq D"}
    if s["Rq"]:
        query = {"attn_q_a": "Rq D", "attn_q_a_norm": "Rq", "attn_q_b": "H*dq Rq"}
    out = {"attn_norm": "D"} | query | {"attn_kv_a_mqa": "d D", "attn_kv_a_norm": "Rk"}
    out |= {"attn_k_b": "H Rk dn", "attn_v_b": "H dv Rk", "attn_output": "D H*dv"}
    if layer < s["dense"]:
        return out | _GATED
    out |= {"ffn_norm": "D", "ffn_gate_inp": "E D"} | ({"exp_probs_b.bias": "E"} if s["sigmoid"] else {})
    out |= {"ffn_gate_exps": "E Fe D", "ffn_up_exps": "E Fe D", "ffn_down_exps": "E D Fe"}
    return out | {"ffn_gate_shexp": "shared*Fe D", "ffn_up_shexp": "shared*Fe D", "ffn_down_shexp": "D shared*Fe"}


def _latent(
    H: int, Rq: int, Rk: int = 512, dn: int = 128, dr: int = 64, dv: int = 128, groups: int = 0, used: int = 0
) -> dict[str, int]:
    sizes = {"H": H, "Rq": Rq, "Rk": Rk, "dn": dn, "dr": dr, "dv": dv, "d": Rk + dr, "dq": dn + dr}
    return sizes | {"groups": groups, "used": used, "sigmoid": 0}


def _deepseek4_ratios(s: Mapping[str, int]) -> list[int]:
    """Tokens of a compressed row by layer: none in Flash's first two, 128 in Pro's, then 4 and 128 in turn."""
    return [s.get("first", 0) if layer < 2 else 128 if layer % 2 else 4 for layer in range(s["L"])]


def _deepseek4_keys(s: Mapping[str, int]) -> dict[str, Any]:
    return {
        "context_length": 1_048_576,
        "embedding_length": s["D"],
        "block_count": s["L"],
        "vocab_size": s["V"],
        "attention.head_count": s["H"],
        "attention.head_count_kv": 1,
        "attention.key_length": s["d"],
        "attention.value_length": s["d"],
        "attention.q_lora_rank": s["Rq"],
        "attention.output_lora_rank": s["Ro"],
        "attention.output_group_count": s["G"],
        "attention.sliding_window": 128,
        "attention.compress_ratios": np.array([*_deepseek4_ratios(s), 0], np.int32),  # and of the layer that predicts
        "attention.compress_rope_freq_base": 160_000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.indexer.head_count": s["Hi"],
        "attention.indexer.key_length": s["di"],
        "attention.indexer.top_k": s["ki"],
        "rope.dimension_count": s["dr"],
        "rope.freq_base": 10_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65_536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "hyper_connection.count": s["S"],
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": min(s["hashed"], s["L"]),
        "swiglu_clamp_exp": np.full(s["L"], 10.0, np.float32),
        "expert_count": s["E"],
        "expert_used_count": s["k"],
        "expert_shared_count": 1,
        "expert_feed_forward_length": s["F"],
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "nextn_predict_layers": 1,  # in a file of their own
    }


def _deepseek4_layer(layer: int, s: Mapping[str, int]) -> dict[str, str]:
    ratio, mixed = _deepseek4_ratios(s)[layer], s["S"] * (s["S"] + 2)

    def streams(half: str) -> dict[str, str]:
        return {f"hc_{half}_fn": f"{mixed} S*D", f"hc_{half}_scale": "3", f"hc_{half}_base": f"{mixed}"}

    def compressor(name: str, size: str, norm: str) -> dict[str, str]:
        parts = {f"{name}_ape": f"{ratio} {size}", f"{name}_kv": f"{size} D", f"{name}_gate": f"{size} D"}
        return parts | {f"{name}_norm": norm}

    out = streams("attn") | {"attn_norm": "D", "attn_q_a": "Rq D", "attn_q_a_norm": "Rq", "attn_q_b": "H*d Rq"}
    out |= {"attn_kv": "d D", "attn_kv_a_norm": "d", "attn_sinks": "H"}
    out |= {"attn_output_a": "G*Ro dg", "attn_output_b": "D G*Ro"}
    if ratio:
        out |= compressor("attn_compressor", "2*d" if ratio == 4 else "d", "d")
    if ratio == 4:
        out |= {"indexer.attn_q_b": "Hi*di Rq", "indexer.proj": "Hi D"} | compressor("indexer_compressor", "2*di", "di")
    out |= streams("ffn") | {"ffn_norm": "D", "ffn_gate_inp": "E D"}
    out |= {"ffn_gate_tid2eid": "V k"} if layer < s["hashed"] else {"exp_probs_b.bias": "E"}
    out |= {"ffn_gate_exps": "E F D", "ffn_up_exps": "E F D", "ffn_down_exps": "E D F"}
    return out | {"ffn_gate_shexp": "F D", "ffn_up_shexp": "F D", "ffn_down_shexp": "D F"}


_COMPRESSOR = ("ape", "kv", "gate")
_DEEPSEEK4_TYPES = {
    "ffn_gate_tid2eid": "I32",
    **dict.fromkeys(("hc_attn_fn", "hc_ffn_fn", "output_hc_fn", "indexer.attn_q_b", "indexer.proj"), "F16"),
    **{f"{name}_compressor_{part}": "F16" for name in ("attn", "indexer") for part in _COMPRESSOR},
}
_V4_FLASH = {"L": 43, "D": 4096, "H": 64, "d": 512, "dr": 64, "Rq": 1024, "Ro": 1024, "G": 8, "dg": 4096, "F": 2048}
_V4_FLASH |= {"Hi": 64, "di": 128, "ki": 512, "S": 4, "E": 256, "k": 6, "hashed": 3, "V": 129_280}
_V4_PRO = _V4_FLASH | {"L": 61, "D": 7168, "H": 128, "Rq": 1536, "G": 16, "F": 3072, "ki": 1024, "E": 384, "first": 128}
_V4_TINY = {"L": 6, "D": 256, "H": 8, "d": 64, "dr": 32, "Rq": 256, "Ro": 128, "G": 2, "dg": 256, "F": 256}
_V4_TINY |= {"Hi": 4, "di": 64, "ki": 16, "S": 4, "E": 8, "k": 2, "hashed": 2, "V": 1024}
_V4_Q2 = {
    **dict.fromkeys(("attn_q_a", "attn_q_b", "attn_kv", "attn_output_a", "attn_output_b", "output"), "Q8_0"),
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), "Q8_0"),
    **dict.fromkeys(("token_embd", "ffn_gate_inp"), "F16"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "IQ2_XXS"),
    "ffn_down_exps": "Q2_K",
}

_LLAMA_V, _QWEN_V = 128_256, 151_936


def _dense(L: int, D: int, H: int, F: int, V: int, K: int = 8, d: int = 128) -> dict[str, int]:
    return {"L": L, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V}


def _gemma(L: int, D: int, H: int, K: int, F: int, window: int, V: int = 262_144, d: int = 256) -> dict[str, int]:
    return {"L": L, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V, "window": window}


_QWEN3_30B = {"L": 48, "D": 2048, "H": 32, "K": 4, "d": 128, "F": 768, "E": 128, "k": 8, "V": _QWEN_V}
_QWEN3_TINY = {"L": 2, "D": 256, "H": 4, "K": 2, "d": 64, "F": 256, "E": 8, "k": 2, "V": 1024}

_GPT_OSS_20B = {"L": 24, "D": 2880, "H": 64, "K": 8, "d": 64, "F": 2880, "E": 32, "k": 4, "V": 201_088}
_GPT_OSS_TYPES = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), "Q8_0")
_GLM_AIR = {"L": 46, "D": 4096, "H": 96, "K": 8, "d": 128, "F": 10_944, "Fe": 1408, "E": 128, "k": 8, "V": 151_552}
_GLM_AIR |= {"dense": 1, "norms": 0}
_GLM = _GLM_AIR | {"L": 92, "D": 5120, "F": 12_288, "Fe": 1536, "E": 160, "dense": 3, "norms": 1}

_V2_ROUTER: dict[str, Any] = {
    "expert_gating_func": 1,
    "expert_weights_norm": False,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
_V3_ROUTER: dict[str, Any] = {
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "rope.scaling.yarn_log_multiplier": 0.1,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        keys=_llama_keys,
        layer=lambda i, s: _LLAMA,
        vocabulary=vocabularies.llama3,
        other={"rope_freqs": "d/2"},
        presets={
            "tiny": Preset(_dense(2, 256, 4, 512, V=1024, K=2, d=64), "for tests"),
            "1b": Preset(_dense(16, 2048, 32, 8192, d=64, V=_LLAMA_V), "Llama 3.2 1B", tied=True),
            "3b": Preset(_dense(28, 3072, 24, 8192, V=_LLAMA_V), "Llama 3.2 3B", tied=True),
            "8b": Preset(_dense(32, 4096, 32, 14_336, V=_LLAMA_V), "Llama 3.1 8B"),
            "70b": Preset(_dense(80, 8192, 64, 28_672, V=_LLAMA_V), "Llama 3.1 70B"),
        },
    ),
    "gemma3": Architecture(
        keys=_gemma3_keys,
        layer=lambda i, s: _GEMMA3,
        vocabulary=vocabularies.gemma3,
        presets={
            "tiny": Preset(_gemma(6, 256, 4, 1, 512, 64, V=1024, d=64), "for tests", tied=True),
            "270m": Preset(_gemma(18, 640, 4, 1, 2048, 512), "Gemma 3 270M", tied=True),
            "1b": Preset(_gemma(26, 1152, 4, 1, 6912, 512), "Gemma 3 1B", tied=True),
            "4b": Preset(
                _gemma(34, 2560, 8, 4, 10_240, 1024),
                "Gemma 3 4B, text",
                {"context_length": 131_072, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
                tied=True,
            ),
        },
    ),
    "qwen2": Architecture(
        keys=_qwen2_keys,
        layer=lambda i, s: _QWEN2,
        vocabulary=vocabularies.qwen2,
        presets={
            "tiny": Preset(_dense(2, 256, 4, 512, V=1024, K=2, d=64), "for tests"),
            "0.5b": Preset(_dense(24, 896, 14, 4864, V=_QWEN_V, K=2, d=64), "Qwen2.5 0.5B", tied=True),
            "7b": Preset(_dense(28, 3584, 28, 18_944, V=152_064, K=4), "Qwen2.5 7B"),
        },
    ),
    "qwen3": Architecture(
        keys=_qwen3_keys,
        layer=lambda i, s: _QWEN3,
        vocabulary=vocabularies.qwen3,
        presets={
            "tiny": Preset(_dense(2, 256, 4, 512, V=1024, K=2, d=64), "for tests"),
            "0.6b": Preset(_dense(28, 1024, 16, 3072, V=_QWEN_V), "Qwen3 0.6B", tied=True),
            "4b": Preset(_dense(36, 2560, 32, 9728, V=_QWEN_V), "Qwen3 4B", tied=True),
            "8b": Preset(_dense(36, 4096, 32, 12_288, V=_QWEN_V), "Qwen3 8B"),
        },
    ),
    "qwen3moe": Architecture(
        keys=_qwen3moe_keys,
        layer=lambda i, s: _QWEN3MOE,
        vocabulary=vocabularies.qwen3,
        presets={
            "tiny": Preset(_QWEN3_TINY, "for tests"),
            "2.9gb": Preset(
                # V is reduced as the layers are, so that the output matrix keeps its share of a step.
                _QWEN3_30B | {"V": 32_768},
                "Qwen3 30B-A3B, V 32768, layers up to 2.9 GB",
                {"feed_forward_length": 6144},
                size=2.9e9,
            ),
            "30b": Preset(_QWEN3_30B, "Qwen3 30B-A3B", {"feed_forward_length": 6144}),
        },
    ),
    "gpt-oss": Architecture(
        keys=_gpt_oss_keys,
        layer=lambda i, s: _GPT_OSS,
        vocabulary=vocabularies.gpt_oss,
        presets={
            "tiny": Preset(_QWEN3_TINY, "for tests"),
            "20b": Preset(_GPT_OSS_20B, "gpt-oss-20b; --type MXFP4 as published", types=_GPT_OSS_TYPES),
            "120b": Preset(
                _GPT_OSS_20B | {"L": 36, "E": 128}, "gpt-oss-120b; --type MXFP4 as published", types=_GPT_OSS_TYPES
            ),
        },
    ),
    "glm4moe": Architecture(
        keys=_glm4moe_keys,
        layer=_glm4moe_layer,
        vocabulary=vocabularies.glm4,
        presets={
            "tiny": Preset(_QWEN3_TINY | {"F": 512, "Fe": 256, "dense": 1, "norms": 1}, "for tests"),
            "4.5-air": Preset(_GLM_AIR, "GLM 4.5-Air, without next-token prediction", {"expert_weights_scale": 1.0}),
            "4.5": Preset(_GLM, "GLM 4.5 and 4.6, without next-token prediction", {"expert_weights_scale": 2.5}),
        },
    ),
    "deepseek2": Architecture(
        keys=_deepseek2_keys,
        layer=_deepseek2_layer,
        vocabulary=vocabularies.deepseek,
        presets={
            "tiny": Preset(
                _latent(4, 256, 256, 256, 64, 64, 4, 2)
                | {"L": 3, "D": 256, "F": 512, "Fe": 256, "E": 8, "k": 2, "shared": 1, "dense": 1, "V": 1024}
                | {"sigmoid": 1},
                "for tests",
                _V3_ROUTER,
            ),
            "v2-lite": Preset(
                _latent(16, 0)
                | {"L": 27, "D": 2048, "F": 10_944, "Fe": 1408, "E": 64, "k": 6, "shared": 2, "dense": 1, "V": 102_400},
                "DeepSeek V2-Lite",
                _V2_ROUTER | {"expert_weights_scale": 1.0},
            ),
            "v2": Preset(
                _latent(128, 1536, groups=8, used=3)
                | {
                    "L": 60,
                    "D": 5120,
                    "F": 12_288,
                    "Fe": 1536,
                    "E": 160,
                    "k": 6,
                    "shared": 2,
                    "dense": 1,
                    "V": 102_400,
                },
                "DeepSeek V2",
                _V2_ROUTER | {"expert_weights_scale": 16.0},
            ),
            "v3": Preset(
                _latent(128, 1536, groups=8, used=4)
                | {"L": 61, "D": 7168, "F": 18_432, "Fe": 2048, "E": 256, "k": 8, "shared": 1, "dense": 3, "V": 129_280}
                | {"sigmoid": 1},
                "DeepSeek V3, R1; --layers for a part",
                _V3_ROUTER,
            ),
        },
    ),
    "deepseek4": Architecture(
        keys=_deepseek4_keys,
        layer=_deepseek4_layer,
        vocabulary=vocabularies.deepseek4,
        other={"output_hc_fn": "S S*D", "output_hc_scale": "1", "output_hc_base": "S"},
        types=_DEEPSEEK4_TYPES,
        presets={
            "tiny": Preset(_V4_TINY, "for tests"),
            "v4-flash-q2": Preset(_V4_FLASH, "DeepSeek V4 Flash in the types of its 2-bit file", types=_V4_Q2),
            "v4-pro-q2": Preset(
                _V4_PRO, "DeepSeek V4 Pro in the same types", {"expert_weights_scale": 2.5}, types=_V4_Q2
            ),
        },
    ),
}


# ---------------------------------------------------------------- types


@dataclass(frozen=True)
class Mix:
    """Types of the matrices in layers, of the embedding and of the output; `more`: of every other attn_v, ffn_down."""

    layers: str
    embedding: str
    output: str
    file_type: int  # general.file_type
    more: str = ""


# As llama.cpp's quantiser chooses them for embedding and output, layers kept pure except in the _M mixtures.
MIXES: dict[str, Mix] = {
    "F32": Mix("F32", "F32", "F32", 0),
    "F16": Mix("F16", "F16", "F16", 1),
    "BF16": Mix("BF16", "BF16", "BF16", 32),
    "Q8_0": Mix("Q8_0", "Q8_0", "Q8_0", 7),
    "Q4_0": Mix("Q4_0", "Q4_0", "Q6_K", 2),
    "Q4_1": Mix("Q4_1", "Q4_1", "Q6_K", 3),
    "Q5_0": Mix("Q5_0", "Q5_0", "Q6_K", 8),
    "Q5_1": Mix("Q5_1", "Q5_1", "Q6_K", 9),
    "Q2_K": Mix("Q2_K", "Q2_K", "Q6_K", 10),
    "Q3_K": Mix("Q3_K", "Q3_K", "Q6_K", 11),
    "Q4_K": Mix("Q4_K", "Q4_K", "Q6_K", 14),
    "Q4_K_M": Mix("Q4_K", "Q4_K", "Q6_K", 15, more="Q6_K"),
    "Q5_K": Mix("Q5_K", "Q5_K", "Q6_K", 16),
    "Q5_K_M": Mix("Q5_K", "Q5_K", "Q6_K", 17, more="Q6_K"),
    "Q6_K": Mix("Q6_K", "Q6_K", "Q6_K", 18),
    "IQ1_S": Mix("IQ1_S", "Q2_K", "Q5_K", 24),
    "IQ1_M": Mix("IQ1_M", "Q2_K", "Q5_K", 31),
    "IQ2_XXS": Mix("IQ2_XXS", "Q2_K", "Q5_K", 19),
    "IQ2_XS": Mix("IQ2_XS", "Q2_K", "Q5_K", 20),
    "IQ2_S": Mix("IQ2_S", "IQ3_S", "Q5_K", 28),
    "IQ3_XXS": Mix("IQ3_XXS", "IQ3_S", "Q5_K", 23),
    "IQ3_S": Mix("IQ3_S", "IQ3_S", "Q6_K", 26),
    "IQ4_NL": Mix("IQ4_NL", "IQ4_NL", "Q6_K", 25),
    "IQ4_XS": Mix("IQ4_XS", "IQ4_XS", "Q6_K", 30),
    "TQ1_0": Mix("TQ1_0", "Q4_K", "Q6_K", 36),
    "TQ2_0": Mix("TQ2_0", "Q4_K", "Q6_K", 37),
    "MXFP4": Mix("MXFP4", "Q8_0", "Q8_0", 38),
    "NVFP4": Mix("NVFP4", "BF16", "BF16", 39),
}
# For rows that a type's blocks do not divide.
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0"}
_FALLBACKS |= {"TQ2_0": "Q4_0"} | {name: "IQ4_NL" for name in NUMBERS if name.startswith("IQ") and name != "IQ4_NL"}
_ROUTERS = ("ffn_gate_inp",)  # small and delicate: F32 in every published file


def _more_bits(layer: int, layers: int) -> bool:
    """The layers whose attn_v and ffn_down an _M mixture gives more bits: both ends, every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting(dtype: str, row: int) -> str:
    """`dtype`, or what replaces it where it cannot hold rows of `row` values."""
    if row % block_elements(dtype):
        dtype = _FALLBACKS.get(dtype, "F16")
    return dtype if row % block_elements(dtype) == 0 else "F16"


# ---------------------------------------------------------------- tensors of a file


def _shape(letters: str, s: Mapping[str, int]) -> tuple[int, ...]:
    """ "H*d D" as numbers; a dimension is a product of letters and numbers, or a letter divided by 2."""

    def dimension(text: str) -> int:
        if text.endswith("/2"):
            return s[text[:-2]] // 2
        return math.prod(int(letter) if letter.isdigit() else s[letter] for letter in text.split("*"))

    return tuple(dimension(text) for text in letters.split())


def tensors(arch: Architecture, preset: Preset, mix: Mix, layers: int) -> list[Tensor]:
    """All tensors of a model with so many layers, in the file's order."""
    s = dict(preset.letters) | {"L": layers}
    out: list[Tensor] = []

    def add(name: str, letters: str, dtype: str) -> None:
        shape = _shape(letters, s)
        own = name.split(".", 2)[2] if name.startswith("blk.") else name
        full = name if name.endswith(".bias") else f"{name}.weight"
        fixed = preset.types.get(own) or arch.types.get(own)
        if len(shape) == 1 or name.endswith(".bias"):
            out.append(Tensor(full, shape, "F32"))
        elif fixed:
            out.append(Tensor(full, shape, fixed, s["E"] if fixed == "I32" else 0))
        else:
            out.append(Tensor(full, shape, "F32" if name.endswith(_ROUTERS) else _fitting(dtype, shape[-1])))

    add("token_embd", "V D", mix.output if preset.tied else mix.embedding)
    for name, letters in arch.other.items():
        add(name, letters, mix.layers)
    for layer in range(layers):
        for name, letters in arch.layer(layer, s).items():
            more = mix.more and name.startswith(("attn_v", "ffn_down")) and _more_bits(layer, layers)
            add(f"blk.{layer}.{name}", letters, mix.more if more else mix.layers)
    add("output_norm", "D", "F32")
    if not preset.tied:
        add("output", "V D", mix.output)
    return out


def layer_count(arch: Architecture, preset: Preset, mix: Mix) -> int:
    """The preset's layers: its own, or as many as come nearest to its size."""
    if not preset.size:
        return preset.letters["L"]

    def distance(layers: int) -> float:
        return abs(sum(tensor.nbytes for tensor in tensors(arch, preset, mix, layers)) - preset.size)

    return min(range(1, preset.letters["L"] + 1), key=distance)


def metadata(name: str, title: str, preset: Preset, mix: Mix, layers: int) -> Iterator[tuple[str, Any]]:
    """Keys and values in the file's order: str, bool, int (u32), float (f32), list of str, numpy array."""
    arch = ARCHITECTURES[name]
    s = dict(preset.letters) | {"L": layers}
    yield "general.architecture", name
    yield "general.type", "model"
    yield "general.name", title
    yield "general.file_type", mix.file_type
    yield "general.quantization_version", 2
    for key, value in (arch.keys(s) | dict(preset.keys)).items():
        yield f"{name}.{key}", value
    yield from arch.vocabulary(s["V"]).items()
