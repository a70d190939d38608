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
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models import TinyModel

torch.set_num_threads(1)

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
_GEMMA3 = _NAMES | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
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


def qwen3(tiny: TinyModel, tensors: Mapping[str, NDArray[np.float32]] | None = None, **extra: Any) -> torch.nn.Module:
    """Qwen3ForCausalLM, or Qwen3MoeForCausalLM where the tiny model has experts; `extra` goes to its config."""
    s = tiny.shape
    fields: dict[str, Any] = {
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


def logits(model: torch.nn.Module, tokens: Sequence[int]) -> NDArray[np.float32]:
    """(T, V). Gemma3's score softcap is handed to its attention here: the model class itself forgets to."""
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    extra = {"softcap": softcap} if softcap else {}
    with torch.no_grad():
        out: NDArray[np.float32] = model(torch.tensor([list(tokens)]), **extra).logits[0].float().numpy()
    return out


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
