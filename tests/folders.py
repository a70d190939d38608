"""Tiny random models as Hugging Face folders, written by transformers' own save_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_LATENT: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 48,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_LATENT.pop("head_dim")
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_GLM: dict[str, Any] = _SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_GLM |= {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}
_GPT_OSS: dict[str, Any] = _SIZES | {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 24}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, _SIZES),
    "mistral": (MistralForCausalLM, MistralConfig, _SIZES | {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _SIZES),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _SIZES),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _SIZES | _EXPERTS),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _SIZES | {"num_hidden_layers": 6, "sliding_window": 24}),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, _GLM),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, _GPT_OSS),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, _LATENT),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, _LATENT | {"n_group": 4, "topk_group": 2}),
}


def tiny(kind: str, **options: Any) -> torch.nn.Module:
    """A model of one of KINDS with weights that make a difference; `options` go to its config."""
    model_class, config_class, sizes = KINDS[kind]
    model: torch.nn.Module = model_class(config_class(**sizes | options, attn_implementation="eager"))
    randomise(model)
    return model.eval()


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights whose every part shows in the logits: matrices keep a row's size, norms differ from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or not values.is_floating_point() or values.dim() == 0:
                continue
            noise = torch.randn(values.shape, generator=generator)
            if "norm" in name:
                values.add_(0.1 * noise)
            elif values.dim() == 1:
                values.copy_(0.2 * noise)
            elif "embed_scale" not in name:
                router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
                values.copy_(noise * (2.0 if router else 1.0) / values.shape[-1] ** 0.5)


def load(folder: Path) -> torch.nn.Module:
    """What transformers makes of a folder, in float32."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def save(model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """`model` in `dtype`, which it has afterwards, as a folder; `options` go to save_pretrained."""
    model.to(dtype).save_pretrained(folder, **options)
    return folder


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add_tokenizer(folder: Path) -> Path:
    """The 256 bytes, a few merges and ChatML's control tokens, as tokenizer.json and the files beside it: 262 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the")]
    vocabulary = [*alphabet, *(left + right for left, right in merges)]
    document = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary)}, "merges": merges},
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.25, "top_k": 7, "eos_token_id": [261, 259]})
    )
    return folder
