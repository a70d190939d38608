"""The oracle: the same weights in transformers' own models, float32, eager attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models import TinyModel

torch.set_num_threads(1)

TOLERANCE = 1e-4  # of a logit, in F32 throughout

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_LLAMA = _NAMES | {"ffn_norm": "post_attention_layernorm"}
_DEEPSEEK = _LLAMA | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_DEEPSEEK4 = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{n}_shexp.weight": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"hc_{half}_{n}.weight": f"{half}_hc.{n}" for half in ("attn", "ffn") for n in ("fn", "base", "scale")},
    **{
        f"{ours}_{part}.weight": f"self_attn.{theirs}.{name}"
        for ours, theirs in (("attn_compressor", "compressor"), ("indexer_compressor", "compressor.indexer"))
        for part, name in (
            ("kv", "kv_proj.weight"),
            ("gate", "gate_proj.weight"),
            ("ape", "position_bias"),
            ("norm", "kv_norm.weight"),
        )
    },
}
_GEMMA3 = _NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GPT_OSS = _NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_GLM4 = _GPT_OSS | {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def llama(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """LlamaForCausalLM with the tiny model's weights, or `tensors` in their place; `extra` goes to LlamaConfig."""
    s = tiny.shape
    rope = {"rope_type": "default", "rope_theta": s["rope_base"]} | extra.pop("rope", {})
    config = LlamaConfig(
        vocab_size=s["V"],
        hidden_size=s["D"],
        intermediate_size=s["F"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["H"],
        num_key_value_heads=s["K"],
        head_dim=s["d"],
        max_position_embeddings=s["context"],
        rms_norm_eps=s["eps"],
        rope_parameters=rope,
        tie_word_embeddings=s["tied"],
        attention_bias=s["bias"],
        mlp_bias=s["bias"],
        attn_implementation="eager",
        **extra,
    )
    state = {}
    for name, values in (tensors or tiny.tensors).items():
        if name == "rope_freqs.weight":
            continue
        heads = {"attn_q": s["H"], "attn_k": s["K"]}.get(name.split(".")[-2], 0)
        state[_hf_name(name, _LLAMA)] = _unpermute(values, heads) if heads else values
    return _filled(LlamaForCausalLM(config), state)


def gemma3(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """Gemma3ForCausalLM with the tiny model's weights; transformers keeps norm weights without the +1."""
    s = tiny.shape
    full = {"rope_type": "default", "rope_theta": s["rope_base"]} | extra.pop("rope", {})
    config = Gemma3TextConfig(
        vocab_size=s["V"],
        hidden_size=s["D"],
        intermediate_size=s["F"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["H"],
        num_key_value_heads=s["K"],
        head_dim=s["d"],
        query_pre_attn_scalar=extra.pop("query_pre_attn_scalar", s["d"]),
        max_position_embeddings=s["context"],
        rms_norm_eps=s["eps"],
        sliding_window=s["window"],
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=s["tied"],
        attn_implementation="eager",
        **extra,
    )
    state = {}
    for name, values in (tensors or tiny.tensors).items():
        state[_hf_name(name, _GEMMA3)] = values - 1.0 if "norm" in name else values
    return _filled(Gemma3ForCausalLM(config), state)


def qwen2(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """Qwen2ForCausalLM with the tiny model's weights; `extra` goes to its config."""
    state = {_hf_name(name, _LLAMA): values for name, values in (tensors or tiny.tensors).items()}
    return _filled(Qwen2ForCausalLM(Qwen2Config(**_dense(tiny.shape) | extra)), state)


def qwen3(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """Qwen3ForCausalLM, or Qwen3MoeForCausalLM where the tiny model has experts; `extra` goes to its config."""
    s = tiny.shape
    fields = _dense(s)
    given = dict(tensors or tiny.tensors)
    state = {}
    if s["experts"]:
        for layer in range(s["layers"]):
            gate, up, down = (given.pop(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
            state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
            state[f"model.layers.{layer}.mlp.experts.down_proj"] = down
        fields |= {"num_experts": s["experts"], "num_experts_per_tok": s["used"], "moe_intermediate_size": s["F"]}
        fields["norm_topk_prob"] = True
    state |= {_hf_name(name, _LLAMA): values for name, values in given.items()}
    if s["experts"]:
        return _filled(Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields | extra)), state)
    return _filled(Qwen3ForCausalLM(Qwen3Config(**fields | extra)), state)


def gpt_oss(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """GptOssForCausalLM, which has the rows of gate and up in turn, and experts' matrices transposed."""
    s = tiny.shape
    fields = _dense(s | {"rope_base": 150000.0, "tied": False}) | {
        "num_local_experts": s["experts"],
        "num_experts_per_tok": s["used"],
        "sliding_window": s["window"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    given = dict(tensors or tiny.tensors)
    state = {}
    for layer in range(s["layers"]):
        own, hf = f"blk.{layer}", f"model.layers.{layer}"
        state[f"{hf}.self_attn.sinks"] = given.pop(f"{own}.attn_sinks.weight")
        for kind, name in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (given.pop(f"{own}.ffn_{n}_exps.{kind}") for n in ("gate", "up", "down"))
            both = np.stack([gate, up], 2).reshape(gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
            state[f"{hf}.mlp.experts.gate_up_proj{name}"] = both.swapaxes(1, -1) if kind == "weight" else both
            state[f"{hf}.mlp.experts.down_proj{name}"] = down.swapaxes(1, -1) if kind == "weight" else down
    state |= {_hf_name(name, _GPT_OSS): values for name, values in given.items()}
    return _filled(GptOssForCausalLM(GptOssConfig(**fields | extra)), state)


def glm4moe(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """Glm4MoeForCausalLM with the tiny model's weights, but of the layers that predict further tokens."""
    s = tiny.shape
    fields = _dense(s | {"rope_base": 1_000_000.0, "tied": False}) | {
        "moe_intermediate_size": s["Fe"],
        "n_routed_experts": s["experts"],
        "num_experts_per_tok": s["used"],
        "n_shared_experts": 1,
        "first_k_dense_replace": s["dense"],
        "routed_scaling_factor": 2.5,
        "n_group": s["groups"],
        "topk_group": s["groups_used"],
        "attention_bias": s["bias"],
        "use_qk_norm": s["head_norms"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    }
    kept = {f"blk.{layer}" for layer in range(s["layers"])}
    given = {
        name: values
        for name, values in (tensors or tiny.tensors).items()
        if not name.startswith("blk.") or name.rsplit(".", 2)[0] in kept
    }
    state = {}
    for layer in range(s["dense"], s["layers"]):
        gate, up, down = (given.pop(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        mlp = f"model.layers.{layer}.mlp"
        state |= {f"{mlp}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{mlp}.experts.down_proj": down}
        state[f"{mlp}.gate.e_score_correction_bias"] = given.pop(f"blk.{layer}.exp_probs_b.bias")
    state |= {_hf_name(name, _GLM4): values for name, values in given.items()}
    return _filled(Glm4MoeForCausalLM(Glm4MoeConfig(**fields | extra)), state)


def deepseek(
    tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any
) -> torch.nn.Module:
    """DeepseekV2ForCausalLM, or V3 where the tiny model's router is sigmoid; `extra` goes to its config."""
    s = tiny.shape
    fields: dict[str, Any] = {
        "vocab_size": s["V"],
        "hidden_size": s["D"],
        "intermediate_size": s["F"],
        "moe_intermediate_size": s["Fe"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["H"],
        "num_key_value_heads": s["H"],
        "n_routed_experts": s["experts"],
        "num_experts_per_tok": s["used"],
        "n_shared_experts": s["shared"],
        "first_k_dense_replace": s["dense"],
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": s["rank"],
        "q_lora_rank": s["q_rank"] or None,
        "qk_nope_head_dim": s["nope"],
        "qk_rope_head_dim": s["rope"],
        "v_head_dim": s["value"],
        "max_position_embeddings": s["context"],
        "rms_norm_eps": s["eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | extra.pop("rope", {}),
        "n_group": s["groups"] or 1,
        "topk_group": s["groups_used"] or 1,
        "attn_implementation": "eager",
    }
    if not s["sigmoid"]:
        fields |= {"topk_method": "group_limited_greedy" if s["groups"] else "greedy", "norm_topk_prob": False}
    given = dict(tensors or tiny.tensors)
    state = {}
    for layer in range(s["layers"]):
        if (key := f"blk.{layer}.attn_k_b.weight") in given:
            pair = [given.pop(key).transpose(0, 2, 1), given.pop(f"blk.{layer}.attn_v_b.weight")]
            given[f"blk.{layer}.attn_kv_b.weight"] = np.concatenate(pair, 1).reshape(-1, s["rank"])
        if layer < s["dense"]:
            continue
        gate, up, down = (given.pop(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        mlp = f"model.layers.{layer}.mlp"
        state[f"{mlp}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        state[f"{mlp}.experts.down_proj"] = down
        if s["sigmoid"]:
            state[f"{mlp}.gate.e_score_correction_bias"] = given.pop(f"blk.{layer}.exp_probs_b.bias")
    state |= {_hf_name(name, _DEEPSEEK): values for name, values in given.items()}
    if s["sigmoid"]:
        return _filled(DeepseekV3ForCausalLM(DeepseekV3Config(**fields | extra)), state)
    return _filled(DeepseekV2ForCausalLM(DeepseekV2Config(**fields | extra)), state)


def deepseek4(
    tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any
) -> torch.nn.Module:
    """DeepseekV4ForCausalLM with the tiny model's weights; it has no rounding of cached rows."""
    s = tiny.shape
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    part = {"partial_rotary_factor": s["rope"] / s["d"]}
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "attention_factor": 1.0}
    yarn |= {"rope_theta": 160000.0, "beta_fast": 32.0, "beta_slow": 1.0}
    layers = len(s["ratios"])
    fields: dict[str, Any] = {
        "vocab_size": s["V"],
        "hidden_size": s["D"],
        "moe_intermediate_size": s["Fe"],
        "num_hidden_layers": layers,
        "num_attention_heads": s["H"],
        "head_dim": s["d"],
        "q_lora_rank": s["q_rank"],
        "num_experts_per_tok": s["used"],
        "n_routed_experts": s["experts"],
        "layer_types": [kinds[ratio] for ratio in s["ratios"]],
        "mlp_layer_types": ["hash_moe" if layer < s["hashed"] else "moe" for layer in range(layers)],
        "hc_mult": s["streams"],
        "swiglu_limit": s["limit"],
        "o_groups": s["groups"],
        "o_lora_rank": s["out_rank"],
        "index_n_heads": s["index_heads"],
        "index_head_dim": s["index_size"],
        "index_topk": s["top_k"],
        "max_position_embeddings": s["context"],
        "rms_norm_eps": s["eps"],
        "rope_parameters": {"main": part | {"rope_type": "default", "rope_theta": 10000.0}, "compress": part | yarn},
        "attn_implementation": "eager",
        **part,
    }
    given: dict[str, Any] = dict(tensors or tiny.tensors)
    state = {f"model.hc_head.hc_{n}": given.pop(f"output_hc_{n}.weight") for n in ("fn", "base", "scale")}
    for layer in range(layers):
        gate, up, down = (given.pop(f"blk.{layer}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        experts = f"model.layers.{layer}.mlp.experts"
        state |= {f"{experts}.gate_up_proj": np.concatenate([gate, up], 1), f"{experts}.down_proj": down}
    for name, values in given.items():
        if name in _OUTER:
            state[_OUTER[name]] = values
        else:
            _, number, own = name.split(".", 2)
            state[f"model.layers.{number}.{_DEEPSEEK4[own]}"] = values
    return _filled(DeepseekV4ForCausalLM(DeepseekV4Config(**fields | extra)), state)


def rounded_rows(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with rows rounded as it was trained: E4M3 of what is not rotated, FP4 of the indexer's."""
    rope = model.config.qk_rope_head_dim

    def e4m3(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        parts = list(out[..., :-rope].split(64, -1))
        for i, part in enumerate(parts):
            scale = 2.0 ** (part.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil()
            parts[i] = (part / scale).to(torch.float8_e4m3fn).float() * scale
        return torch.cat([*parts, out[..., -rope:]], -1)

    def fp4(x: torch.Tensor) -> torch.Tensor:
        size, levels = x.shape[-1], torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        hadamard = torch.ones(1, 1)
        while len(hadamard) < size:
            hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard)
        groups = (x.float() @ hadamard * size**-0.5).unflatten(-1, (-1, 32))
        scale = 2.0 ** (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        nearest = ((groups / scale).abs().unsqueeze(-1) - levels).abs().argmin(-1)
        return (groups.sign() * levels[nearest] * scale).flatten(-2)

    def narrow(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return fp4(inputs[0]), fp4(inputs[1]), *inputs[2:]

    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_norm.register_forward_hook(e4m3)
        if attention.compressor is not None:
            attention.compressor.kv_norm.register_forward_hook(e4m3)
        if hasattr(attention.compressor, "indexer"):
            attention.compressor.indexer.scorer.register_forward_pre_hook(narrow)
    return model


def logits(model: torch.nn.Module, tokens: Sequence[int]) -> NDArray[np.float32]:
    """(T, V). Gemma3's score softcap is handed to its attention here: the model class itself forgets to."""
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    extra = {"softcap": softcap} if softcap else {}
    with torch.no_grad():
        out: NDArray[np.float32] = model(torch.tensor([list(tokens)]), **extra).logits[0].float().numpy()
    return out


def agree(found: NDArray[np.float32], model: torch.nn.Module, tokens: Sequence[int]) -> None:
    """Asserts that `found` (T, V) are the oracle's logits."""
    expected = logits(model, tokens)
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= TOLERANCE


def _dense(s: Mapping[str, Any]) -> dict[str, Any]:
    """What the configurations of Qwen's models share."""
    return {
        "vocab_size": s["V"],
        "hidden_size": s["D"],
        "intermediate_size": s["F"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["H"],
        "num_key_value_heads": s["K"],
        "head_dim": s["d"],
        "max_position_embeddings": s["context"],
        "rms_norm_eps": s["eps"],
        "rope_parameters": {"rope_type": "default", "rope_theta": s["rope_base"]},
        "tie_word_embeddings": s["tied"],
        "attn_implementation": "eager",
    }


def _hf_name(name: str, names: Mapping[str, str]) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{names[part]}.{kind}"


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF's row order (pairs are neighbours) back to transformers' (first half, second half)."""
    rows = values.reshape(heads, -1, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def _filled(model: torch.nn.Module, state: Mapping[str, NDArray[np.float32]]) -> torch.nn.Module:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    return model.float().eval()
