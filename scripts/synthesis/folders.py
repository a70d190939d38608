"""The same models as Hugging Face folders: safetensors in shards, config.json, tokenizer and chat template.

Names and hyperparameters are those that apu_engine reads (weights/families), turned round; every expert is a tensor of
its own and each head's keys and values are joined, as models are published. All tensors have one type, norms too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apu_engine.text import pretokenizers
from apu_engine.weights.families import FAMILIES, Family
from synthesis.architectures import ARCHITECTURES, Preset, Tensor

SHARD_BYTES = 4_000_000_000  # most of one file
TYPES = {"BF16": 2, "F16": 2, "F32": 4}
_LEFT_OUT = ("rope_freqs.weight",)  # what config.json says
_KINDS = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
SUPPORTED = (*_KINDS, "deepseek2")


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder. `offset` is what is added to a norm by the model, and so is missing in the file."""

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def model_type(arch: str, preset: Preset) -> str:
    if arch != "deepseek2":
        return _KINDS[arch]
    return "deepseek_v3" if preset.letters.get("sigmoid") else "deepseek_v2"


def stored(kind: str, table: Iterable[Tensor], letters: Mapping[str, int]) -> Iterator[Stored]:
    """The tensors of a file under a folder's names, in its order."""
    family = FAMILIES[kind]
    modules = {ours: module for module, ours in family.names.items() if isinstance(ours, str)}
    outer = {ours: ("" if ours == "output" else "model.") + module for module, ours in family.outer.items()}
    modules |= {f"{ours}.weight": f"{module}.weight" for ours, module in modules.items() if "." not in ours}
    for tensor in table:
        if tensor.name in _LEFT_OUT:
            continue
        offset = family.norm_offset if tensor.name.endswith("norm.weight") else 0.0
        if not tensor.name.startswith("blk."):
            yield Stored(f"{outer[tensor.name.removesuffix('.weight')]}.weight", tensor.shape, offset)
            continue
        _, layer, own = tensor.name.split(".", 2)
        shape = tensor.shape
        if own == "attn_v_b.weight":
            continue  # with the keys
        if own == "attn_k_b.weight":
            heads, rank, keys = shape
            own, shape = "attn_kv_b.weight", (heads * (keys + letters["dv"]), rank)
        name = f"model.layers.{layer}.{modules[own]}"
        if "*" not in name:
            yield Stored(name, shape, offset)
            continue
        for expert in range(shape[0]):
            yield Stored(name.replace("*", str(expert)), shape[1:])


def shards(tensors: Iterable[Stored], dtype: str) -> list[list[Stored]]:
    """Neighbours that fill a file."""
    out: list[list[Stored]] = [[]]
    room = SHARD_BYTES
    for tensor in tensors:
        nbytes = tensor.elements * TYPES[dtype]
        if nbytes > room and out[-1]:
            out.append([])
            room = SHARD_BYTES
        out[-1].append(tensor)
        room -= nbytes
    return out


def shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def header(tensors: Iterable[Stored], dtype: str) -> bytes:
    """What comes before a file's data, which begins at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.elements * TYPES[dtype]
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def norm(tensor: Stored, dtype: str, seed: int, index: int) -> bytes:
    """A vector of 0.9 to 1.1, less what the model adds."""
    drawn = np.random.default_rng((seed, index)).uniform(0.9, 1.1, tensor.shape)
    values = (drawn - tensor.offset).astype("<f4")
    if dtype == "BF16":
        return bytes((values.view("<u4") >> 16).astype("<u2"))
    return bytes(values.astype({"F16": "<f2", "F32": "<f4"}[dtype]))


def texts(
    kind: str, arch: str, title: str, preset: Preset, layers: int, dtype: str, files: list[list[Stored]]
) -> dict[str, str]:
    """The folder's other files by name."""
    letters = dict(preset.letters) | {"L": layers}
    vocabulary = ARCHITECTURES[arch].vocabulary(letters["V"])
    tokens = vocabulary["tokenizer.ggml.tokens"]

    def token(role: str) -> str | None:
        number = vocabulary.get(f"tokenizer.ggml.{role}_token_id")
        return None if number is None else tokens[number]

    ends = [vocabulary[f"tokenizer.ggml.{role}_token_id"] for role in ("eos", "eot") if token(role) is not None]
    tokenizer_config = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "add_bos_token": vocabulary["tokenizer.ggml.add_bos_token"],
        "chat_template": vocabulary["tokenizer.chat_template"],
    }
    documents: dict[str, Any] = {
        "config.json": config(kind, arch, preset, letters, dtype) | {"_name_or_path": title},
        "generation_config.json": {"do_sample": True, "eos_token_id": ends, "temperature": 0.6, "top_p": 0.95},
        "tokenizer_config.json": tokenizer_config,
    }
    if len(files) > 1:
        names = shard_names(len(files))
        total = sum(tensor.elements for tensors in files for tensor in tensors) * TYPES[dtype]
        placed = {tensor.name: name for tensors, name in zip(files, names, strict=True) for tensor in tensors}
        documents["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": placed}
    out = {name: json.dumps(document, indent=2) for name, document in documents.items()}
    return out | {"tokenizer.json": json.dumps(tokenizer(vocabulary), ensure_ascii=False)}


def config(kind: str, arch: str, preset: Preset, letters: Mapping[str, int], dtype: str) -> dict[str, Any]:
    """config.json from the metadata that a GGUF file of the model would have."""
    family: Family = FAMILIES[kind]
    keys = {**ARCHITECTURES[arch].keys(letters), **preset.keys}
    out: dict[str, Any] = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype],
        "vocab_size": letters["V"],
        "tie_word_embeddings": preset.tied,
        "rope_theta": keys.get("rope.freq_base", 10000.0),
    }
    out |= {name: keys[key] for key, name in family.keys.items() if key in keys}
    out["hidden_activation" if kind == "gemma3_text" else "hidden_act"] = (
        "gelu_pytorch_tanh" if kind == "gemma3_text" else "silu"
    )
    if kind == "gemma3_text":
        out |= {"query_pre_attn_scalar": letters["d"], "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    if kind == "qwen3_moe":
        out |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if arch == "llama":
        out["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        out["rope_scaling"]["original_max_position_embeddings"] = 8192
    if arch == "deepseek2":
        out |= _latent(keys)
    elif keys.get("rope.scaling.type") == "linear":
        out["rope_scaling"] = {"rope_type": "linear", "factor": keys["rope.scaling.factor"]}
    return out


def _latent(keys: Mapping[str, Any]) -> dict[str, Any]:
    turned, groups = keys["rope.dimension_count"], keys.get("expert_group_count", 1)
    sigmoid = keys["expert_gating_func"] == 2
    out = {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys["attention.key_length_mla"] - turned,
        "v_head_dim": keys["attention.value_length_mla"],
        "num_key_value_heads": keys["attention.head_count"],
        "norm_topk_prob": keys["expert_weights_norm"],
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", 1),
    }
    if keys.get("rope.scaling.type") == "yarn":
        scale = 10 * keys["rope.scaling.yarn_log_multiplier"]
        out["rope_scaling"] = {
            "type": "yarn",
            "factor": keys["rope.scaling.factor"],
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
            "mscale": scale,
            "mscale_all_dim": scale,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    return out


def tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json of a vocabulary: all but words is added to it."""
    tokens, types = meta["tokenizer.ggml.tokens"], np.asarray(meta["tokenizer.ggml.token_type"])
    added = [
        {"id": number, "content": tokens[number], "special": bool(types[number] == 3)} | _AS_IT_IS
        for number in np.flatnonzero((types == 3) | (types == 4)).tolist()
    ]
    words = {tokens[number]: number for number in np.flatnonzero(np.isin(types, (1, 2, 6))).tolist()}
    model: dict[str, Any] = {"type": "BPE", "vocab": words}
    out: dict[str, Any] = {"version": "1.0", "added_tokens": added, "model": model}
    if meta["tokenizer.ggml.model"] == "gpt2":
        kind = pretokenizers.KINDS[meta["tokenizer.ggml.pre"]]
        pre_tokenizer, normalizer = pretokenizers.build(kind)
        model |= {"merges": meta["tokenizer.ggml.merges"], "ignore_merges": kind.ignore_merges}
        out |= {"pre_tokenizer": _state(pre_tokenizer), "decoder": {"type": "ByteLevel"} | _BYTE_LEVEL}
        return out | {"normalizer": _state(normalizer)}
    merges = [(word[:-1], word[-1]) for word, number in words.items() if types[number] == 1 and len(word) > 1]
    model |= {"merges": merges, "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    return out | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}}


_AS_IT_IS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _state(part: Any) -> Any:
    """The JSON of a component of the tokenizers library."""
    return None if part is None else json.loads(part.__getstate__())
