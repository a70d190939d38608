"""Tiny models of random weights, written as GGUF files that any part of the engine can load.

`tiny_llama_gguf(path)`, `tiny_gemma3_gguf`, ... need neither torch nor transformers. Weights are drawn
so that the logits are of ordinary size; matrices are float32 or any type that the gguf package can quantise. The
tokenizers are complete: a byte-level BPE vocabulary with ChatML for llama and qwen3, an SPM vocabulary with byte
fallback for gemma3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class TinyModel:
    """What was written. `tensors` are the float32 values in GGUF's order of rows, before any quantisation."""

    path: Path
    arch: str
    shape: dict[str, Any]
    metadata: dict[str, Any]
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    types: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)

    def dequantized(self) -> dict[str, NDArray[np.float32]]:
        """The values that the file really holds, float32."""
        return {
            name: gguf.quants.dequantize(gguf.quants.quantize(values, self.types[name]), self.types[name])
            if name in self.types
            else values
            for name, values in self.tensors.items()
        }


def tiny_llama_gguf(
    path: Path,
    *,
    layers: int = 2,
    D: int = 64,
    H: int = 4,
    K: int = 2,
    d: int | None = None,
    F: int = 96,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-5,
    rope_base: float = 10000.0,
    rope_factors: NDArray[np.float32] | None = None,
    tied: bool = False,
    bias: bool = False,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A llama of `layers` layers. `metadata` adds or replaces keys; a value of None leaves the key out."""
    head = D // H if d is None else d
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, tied)
    for layer in range(layers):
        block = dense_block(rng, layer, D, H, K, head, F)
        if bias:
            for name, size in (
                ("attn_q", H * head),
                ("attn_k", K * head),
                ("attn_v", K * head),
                ("attn_output", D),
                ("ffn_gate", F),
                ("ffn_up", F),
                ("ffn_down", D),
            ):
                block[f"blk.{layer}.{name}.bias"] = normal(rng, (size,), 0.1)
        tensors |= block
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = np.asarray(rope_factors, np.float32)
    keys = attention_keys(K, d) | {"rope.freq_base": rope_base, "rope.dimension_count": head, "vocab_size": V}
    shape = {"layers": layers, "D": D, "H": H, "K": K, "d": head, "F": F, "V": V, "context": context, "eps": eps}
    shape |= {"rope_base": rope_base, "tied": tied, "bias": bias}
    words = bpe_tokenizer(V) if tokenizer else {}
    return written(path, "llama", shape, keys, tensors, words, metadata, quant)


def tiny_gemma3_gguf(
    path: Path,
    *,
    layers: int = 6,
    D: int = 64,
    H: int = 4,
    K: int = 1,
    d: int = 32,
    F: int = 96,
    V: int = 512,
    context: int = 512,
    eps: float = 1e-6,
    window: int = 24,
    rope_base: float = 1_000_000.0,
    tied: bool = True,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A gemma3 whose layers 0 to 4 have a sliding window of `window` tokens, layer 5 sees all."""
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, tied)
    for layer in range(layers):
        block = dense_block(rng, layer, D, H, K, d, F)
        for name, size in (("attn_q_norm", d), ("attn_k_norm", d), ("post_attention_norm", D), ("post_ffw_norm", D)):
            block[f"blk.{layer}.{name}.weight"] = 1.0 + normal(rng, (size,), 0.1)
        tensors |= block
    keys = attention_keys(K, d) | {"rope.freq_base": rope_base, "attention.sliding_window": window}
    shape = {"layers": layers, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V, "context": context, "eps": eps}
    shape |= {"rope_base": rope_base, "tied": tied, "window": window}
    words = spm_tokenizer(V) if tokenizer else {}
    return written(path, "gemma3", shape, keys, tensors, words, metadata, quant)


def tiny_qwen2_gguf(
    path: Path,
    *,
    layers: int = 2,
    D: int = 64,
    H: int = 4,
    K: int = 2,
    F: int = 96,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tied: bool = False,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A qwen2: q, k and v have biases, heads are D / H wide."""
    d = D // H
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, tied)
    for layer in range(layers):
        tensors |= dense_block(rng, layer, D, H, K, d, F)
        for name, size in (("attn_q", H * d), ("attn_k", K * d), ("attn_v", K * d)):
            tensors[f"blk.{layer}.{name}.bias"] = normal(rng, (size,), 0.5)
    keys = attention_keys(K, None) | {"rope.freq_base": rope_base}
    shape = {"layers": layers, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V, "context": context, "eps": eps}
    shape |= {"rope_base": rope_base, "tied": tied}
    words = bpe_tokenizer(V) | {"tokenizer.ggml.pre": "qwen2"} if tokenizer else {}
    return written(path, "qwen2", shape, keys, tensors, words, metadata, quant)


def tiny_qwen3_gguf(
    path: Path,
    *,
    experts: int = 0,
    used: int = 3,
    layers: int = 2,
    D: int = 64,
    H: int = 4,
    K: int = 2,
    d: int = 32,
    F: int = 96,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tied: bool = False,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """A dense qwen3, or a qwen3moe with `used` of `experts` experts of width F in every layer."""
    arch = "qwen3moe" if experts else "qwen3"
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, tied)
    for layer in range(layers):
        block = dense_block(rng, layer, D, H, K, d, F)
        for name in ("attn_q_norm", "attn_k_norm"):
            block[f"blk.{layer}.{name}.weight"] = 1.0 + normal(rng, (d,), 0.1)
        if experts:
            for name, shape in (("ffn_gate", (F, D)), ("ffn_up", (F, D)), ("ffn_down", (D, F))):
                del block[f"blk.{layer}.{name}.weight"]
                block[f"blk.{layer}.{name}_exps.weight"] = normal(rng, (experts, *shape), shape[1] ** -0.5)
            block[f"blk.{layer}.ffn_gate_inp.weight"] = normal(rng, (experts, D), 2 * D**-0.5)
        tensors |= block
    keys = attention_keys(K, d) | {"rope.freq_base": rope_base}
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": F}
        keys["feed_forward_length"] = F * max(1, used)
    shape = {"layers": layers, "D": D, "H": H, "K": K, "d": d, "F": F, "V": V, "context": context, "eps": eps}
    shape |= {"rope_base": rope_base, "tied": tied, "experts": experts, "used": used}
    words = bpe_tokenizer(V) | {"tokenizer.ggml.pre": "qwen2"} if tokenizer else {}
    return written(path, arch, shape, keys, tensors, words, metadata, quant)


def tiny_deepseek2_gguf(
    path: Path,
    *,
    q_rank: int = 24,
    joined: bool = False,
    sigmoid: bool = False,
    groups: int = 0,
    groups_used: int = 0,
    experts: int = 8,
    used: int = 3,
    shared: int = 2,
    dense: int = 1,
    layers: int = 3,
    D: int = 64,
    H: int = 4,
    rank: int = 48,
    nope: int = 24,
    rope: int = 16,
    value: int = 20,
    F: int = 96,
    Fe: int = 32,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-6,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """DeepSeek V2 (`q_rank` 0: V2-Lite), or V3's router where `sigmoid`; `joined`: attn_kv_b in one piece, and keys as
    older files have them. Layers below `dense` have no experts.
    """
    rng = np.random.default_rng(seed)
    tensors = trunk(rng, V, D, False)
    key = nope + rope
    for layer in range(layers):
        matrices = {"attn_kv_a_mqa": (rank + rope, D), "attn_output": (D, H * value)}
        norms = {"attn_norm": D, "attn_kv_a_norm": rank, "ffn_norm": D}
        if q_rank:
            matrices |= {"attn_q_a": (q_rank, D), "attn_q_b": (H * key, q_rank)}
            norms["attn_q_a_norm"] = q_rank
        else:
            matrices["attn_q"] = (H * key, D)
        if layer < dense:
            matrices |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
        else:
            Fs = Fe * shared
            matrices |= {"ffn_gate_exps": (experts, Fe, D), "ffn_up_exps": (experts, Fe, D)}
            matrices |= {"ffn_down_exps": (experts, D, Fe)}
            if shared:
                matrices |= {"ffn_gate_shexp": (Fs, D), "ffn_up_shexp": (Fs, D), "ffn_down_shexp": (D, Fs)}
        block = {f"{name}.weight": normal(rng, shape, shape[-1] ** -0.5) for name, shape in matrices.items()}
        block |= {f"{name}.weight": 1.0 + normal(rng, (size,), 0.1) for name, size in norms.items()}
        if layer >= dense:
            block["ffn_gate_inp.weight"] = normal(rng, (experts, D), 2 * D**-0.5)
            if sigmoid:
                block["exp_probs_b.bias"] = normal(rng, (experts,), 0.2)
        keys, values = (normal(rng, (H, size, rank), rank**-0.5) for size in (nope, value))
        if joined:
            block["attn_kv_b.weight"] = np.concatenate([keys, values], 1).reshape(-1, rank)
        else:
            block["attn_k_b.weight"] = np.ascontiguousarray(keys.transpose(0, 2, 1))
            block["attn_v_b.weight"] = values
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    keys: dict[str, Any] = {
        "leading_dense_block_count": dense,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "rope.freq_base": 10000.0,
        "vocab_size": V,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_shared_count": shared,
        "expert_feed_forward_length": Fe,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": sigmoid,
        "expert_gating_func": 2 if sigmoid else 1,
    }
    if q_rank:
        keys["attention.q_lora_rank"] = q_rank
    if groups:
        keys |= {"expert_group_count": groups, "expert_group_used_count": groups_used}
    if joined:
        keys |= attention_keys(H, key, value)
    else:
        keys |= attention_keys(1, rank + rope, rank)
        keys |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    shape = {"layers": layers, "D": D, "H": H, "rank": rank, "nope": nope, "rope": rope, "value": value, "V": V}
    shape |= {"q_rank": q_rank, "F": F, "Fe": Fe, "experts": experts, "used": used, "shared": shared, "dense": dense}
    shape |= {"groups": groups, "groups_used": groups_used, "sigmoid": sigmoid, "context": context, "eps": eps}
    words = bpe_tokenizer(V) if tokenizer else {}
    return written(path, "deepseek2", shape, keys, tensors, words, metadata, quant)


def tiny_deepseek4_gguf(
    path: Path,
    *,
    ratios: tuple[int, ...] = (0, 4, 128, 4),
    hashed: int = 2,
    D: int = 64,
    H: int = 4,
    d: int = 64,
    rope: int = 16,
    q_rank: int = 32,
    out_rank: int = 24,
    groups: int = 2,
    index_heads: int = 3,
    index_size: int = 32,
    top_k: int = 64,
    experts: int = 8,
    used: int = 3,
    Fe: int = 32,
    streams: int = 4,
    limit: float = 1.5,
    V: int = 320,
    context: int = 512,
    eps: float = 1e-6,
    quant: str = "F32",
    tokenizer: bool = True,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> TinyModel:
    """DeepSeek V4: `ratios` by layer, the first `hashed` layers with experts by token; YaRN on compressed layers."""
    rng = np.random.default_rng(seed)
    layers, mixed = len(ratios), streams * (streams + 2)
    tensors: dict[str, NDArray[Any]] = dict(trunk(rng, V, D, False))
    tensors["output_hc_fn.weight"] = normal(rng, (streams, streams * D), (streams * D) ** -0.5)
    tensors["output_hc_scale.weight"] = 1.0 + normal(rng, (1,), 0.2)
    tensors["output_hc_base.weight"] = normal(rng, (streams,), 0.5)
    for layer, ratio in enumerate(ratios):
        matrices = {
            "attn_q_a": (q_rank, D),
            "attn_q_b": (H * d, q_rank),
            "attn_kv": (d, D),
            "attn_output_a": (groups * out_rank, H * d // groups),
            "attn_output_b": (D, groups * out_rank),
            "ffn_gate_exps": (experts, Fe, D),
            "ffn_up_exps": (experts, Fe, D),
            "ffn_down_exps": (experts, D, Fe),
            "ffn_gate_shexp": (Fe, D),
            "ffn_up_shexp": (Fe, D),
            "ffn_down_shexp": (D, Fe),
            "ffn_gate_inp": (experts, D),
        }
        matrices |= {f"hc_{half}_fn": (mixed, streams * D) for half in ("attn", "ffn")}
        norms = {"attn_norm": D, "attn_q_a_norm": q_rank, "attn_kv_a_norm": d, "ffn_norm": D}
        vectors = {"attn_sinks": (H,)} | {f"hc_{half}_base": (mixed,) for half in ("attn", "ffn")}
        wide = 2 if ratio == 4 else 1
        for name, size in (("attn_compressor", d), ("indexer_compressor", index_size))[: (ratio > 0) + (ratio == 4)]:
            matrices |= {f"{name}_{part}": (wide * size, D) for part in ("kv", "gate")}
            vectors[f"{name}_ape"] = (ratio, wide * size)
            norms[f"{name}_norm"] = size
        if ratio == 4:
            matrices |= {"indexer.attn_q_b": (index_heads * index_size, q_rank), "indexer.proj": (index_heads, D)}
        block: dict[str, NDArray[Any]] = {}
        block |= {f"{name}.weight": normal(rng, shape, shape[-1] ** -0.5) for name, shape in matrices.items()}
        block |= {f"{name}.weight": 1.0 + normal(rng, (size,), 0.1) for name, size in norms.items()}
        block |= {f"{name}.weight": normal(rng, shape, 0.5) for name, shape in vectors.items()}
        block |= {f"hc_{half}_scale.weight": 1.0 + normal(rng, (3,), 0.2) for half in ("attn", "ffn")}
        if layer < hashed:
            table = np.argsort(rng.random((V, experts)), -1)[:, :used]
            block["ffn_gate_tid2eid.weight"] = np.ascontiguousarray(table.astype(np.int32))
        else:
            block["exp_probs_b.bias"] = normal(rng, (experts,), 0.2)
        tensors |= {f"blk.{layer}.{name}": values for name, values in block.items()}
    keys = attention_keys(1, d) | {
        "vocab_size": V,
        "attention.q_lora_rank": q_rank,
        "attention.output_lora_rank": out_rank,
        "attention.output_group_count": groups,
        "attention.sliding_window": 128,
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": index_heads,
        "attention.indexer.key_length": index_size,
        "attention.indexer.top_k": top_k,
        "rope.dimension_count": rope,
        "rope.freq_base": 10000.0,
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "hyper_connection.count": streams,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": hashed,
        "swiglu_clamp_exp": (limit,) * layers,
        "expert_count": experts,
        "expert_used_count": used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": Fe,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
    }
    shape = {
        "layers": layers,
        "ratios": ratios,
        "hashed": hashed,
        "D": D,
        "H": H,
        "d": d,
        "rope": rope,
        "q_rank": q_rank,
        "V": V,
    }
    shape |= {"out_rank": out_rank, "groups": groups, "index_heads": index_heads, "index_size": index_size}
    shape |= {"top_k": top_k, "experts": experts, "used": used, "Fe": Fe, "streams": streams, "limit": limit}
    shape |= {"context": context, "eps": eps}
    words = bpe_tokenizer(V) if tokenizer else {}
    return written(path, "deepseek4", shape, keys, tensors, words, metadata, quant)


def attention_keys(K: int, key: int | None, value: int | None = None) -> dict[str, Any]:
    """Heads' keys; sizes that follow from the width are left out."""
    sizes = {} if key is None else {"attention.key_length": key, "attention.value_length": value or key}
    return {"attention.head_count_kv": K} | sizes


def written(
    path: Path,
    arch: str,
    shape: dict[str, Any],
    keys: Mapping[str, Any],
    tensors: dict[str, NDArray[Any]],
    words: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    quant: str,
) -> TinyModel:
    """The file, with `keys` below the architecture's name and those that every architecture has, from `shape`."""
    common = {
        "block_count": shape["layers"],
        "context_length": shape["context"],
        "embedding_length": shape["D"],
        "attention.head_count": shape["H"],
        "attention.layer_norm_rms_epsilon": shape["eps"],
    }
    common |= {"feed_forward_length": shape["F"]} if "F" in shape else {}
    full = {"general.name": f"tiny {arch}"} | {f"{arch}.{name}": value for name, value in {**common, **keys}.items()}
    return write(TinyModel(path, arch, shape, {**full, **words, **(metadata or {})}, tensors), quant)


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def trunk(rng: np.random.Generator, V: int, D: int, tied: bool) -> dict[str, NDArray[np.float32]]:
    tensors = {
        "token_embd.weight": normal(rng, (V, D), 1.0 if not tied else D**-0.5 * 2),
        "output_norm.weight": 1.0 + normal(rng, (D,), 0.1),
    }
    if not tied:
        tensors["output.weight"] = normal(rng, (V, D), D**-0.5)
    return tensors


def dense_block(
    rng: np.random.Generator, layer: int, D: int, H: int, K: int, d: int, F: int
) -> dict[str, NDArray[np.float32]]:
    matrices = {
        "attn_q": (H * d, D),
        "attn_k": (K * d, D),
        "attn_v": (K * d, D),
        "attn_output": (D, H * d),
        "ffn_gate": (F, D),
        "ffn_up": (F, D),
        "ffn_down": (D, F),
    }
    tensors = {name: normal(rng, shape, shape[1] ** -0.5) for name, shape in matrices.items()}
    tensors |= {name: 1.0 + normal(rng, (D,), 0.1) for name in ("attn_norm", "ffn_norm")}
    return {f"blk.{layer}.{name}.weight": values for name, values in tensors.items()}


# ---------------------------------------------------------------- vocabularies


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BPE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = "Ġ t|h e|i n|Ġ a|Ġt he|r e|o n|Ġ w|e r|n d|Ġ s|o u|Ġ o|Ġa nd|o r|Ġo f|in g|e s|a t|l l|l o|he ll|hell o"
_SPM_PIECES = "▁t|he|in|▁a|▁the|re|on|▁w|er|nd|▁s|ou|▁o|▁an|▁and|or|▁of|ing|es|at|ll|lo|el|▁h|▁hel|▁hello"


def bpe_tokenizer(V: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary of `V` tokens with ChatML's specials at 0 to 2; at least 285."""
    merges = _MERGES.split("|")
    tokens = [*BPE_SPECIALS, *byte_characters().values(), *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL] * len(BPE_SPECIALS) + [NORMAL] * (len(tokens) - len(BPE_SPECIALS))
    _fill(tokens, types, V)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHATML,
    }


def spm_tokenizer(V: int) -> dict[str, Any]:
    """Metadata of an SPM vocabulary of `V` tokens with byte fallback; at least 400. No chat template."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, CONTROL, CONTROL]
    scores = [0.0] * len(tokens)
    for byte in range(256):
        tokens.append(f"<0x{byte:02X}>")
        types.append(BYTE)
        scores.append(0.0)
    for rank, piece in enumerate([*_SPM_PIECES.split("|"), "▁", *map(chr, range(0x21, 0x7F))]):
        tokens.append(piece)
        types.append(NORMAL)
        scores.append(-float(rank))
    _fill(tokens, types, V)
    scores += [-1e4] * (V - len(scores))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _fill(tokens: list[str], types: list[int], V: int) -> None:
    assert len(tokens) <= V, f"V must be at least {len(tokens)}"
    while len(tokens) < V:
        tokens.append(f"<unused{len(tokens)}>")
        types.append(UNUSED)


# ---------------------------------------------------------------- writing


def write(model: TinyModel, quant: str = "F32", *, alignment: int = 32, shard_tensors: int = 0) -> TinyModel:
    """Writes the file; matrices as `quant` (a GGML type name), vectors and routers as F32, as converters do.

    With `shard_tensors` it is split into shards of that many tensors; `path` is then the first shard.
    """
    matrix_type = gguf.GGMLQuantizationType[quant]
    writer = gguf.GGUFWriter(str(model.path), model.arch, split_max_tensors=shard_tensors)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in model.metadata.items():
        _add(writer, key, value)
    for name, values in model.tensors.items():
        if values.dtype == np.int32:  # a table
            writer.add_tensor(name, values)
            continue
        floats = (
            values.ndim < 2 or name.endswith(".bias") or any(part in name for part in ("ffn_gate_inp", "hc_", "_ape"))
        )
        dtype = gguf.GGMLQuantizationType.F32 if floats else matrix_type
        model.types[name] = dtype
        writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if shard_tensors:
        model.path = next(iter(sorted(model.path.parent.glob(f"{model.path.stem}-00001-of-*.gguf"))))
    return model


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
