"""DeepSeek V4 Flash: sparse attention over compressed rows, hyper-connections, experts that follow from the token.

A layer attends to a window of 128 tokens and, by its ratio, to rows that stand for 128 tokens each, all of them, or for
4, of which an indexer chooses. One head is key and value of all 64; its rotated part is rotated back from the results.
Rows are rounded as the model was trained, to E4M3, and the indexer's to FP4, unless the cache is F32. What is to be
compressed lies in windowed pages like other rows. Rotations of layers without compressed rows have a base of their own
and no YaRN, whose magnitude is left alone everywhere. Next-token prediction, mostly a file of its own, is unused here.
"""

from __future__ import annotations

from dataclasses import replace

from apu_engine._native import lib
from apu_engine.arch.blocks import Blocks
from apu_engine.arch.config import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_WIDTH,
    Config,
    Experts,
    Keys,
    Sparse,
    predicting_layers,
    read_common,
)
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.operands import ROPE_PAIRS, Pages, Rope, Streams
from apu_engine.plan.spec import State, Tensor
from apu_engine.weights.model_file import ModelFile

CHOSEN = 4  # the ratio whose rows are made of two times as many tokens, and chosen by an indexer
RATIOS = (0, CHOSEN, 128)
MAX_CHOSEN = 1 << 16  # compressed rows that a row attends to
MAX_STREAMS = 16
SQRT_SOFTPLUS = 4  # expert_gating_func


def read(model: ModelFile) -> Config:
    """Hyperparameters from metadata; FormatError names the key that cannot be right."""
    keys, fields = read_common(model, activation="silu", rope_style=ROPE_PAIRS, experts=_experts, context=1 << 20)
    layers, d = fields["layers"], fields["d"]
    layers -= predicting_layers(keys, layers)
    if fields["K"] != 1:
        raise keys.fail("attention.head_count_kv", f"expected 1, found {fields['K']}")
    ratios = keys.integers("attention.compress_ratios", layers)
    if set(ratios) - set(RATIOS):
        raise keys.fail("attention.compress_ratios", f"expected entries of {RATIOS}, found {sorted(set(ratios))}")
    groups = keys.integer("attention.output_group_count", 1, fields["H"])
    if fields["H"] % groups:
        raise keys.fail("attention.output_group_count", f"{groups} does not divide the head count {fields['H']}")
    fields["sparse"] = Sparse(
        ratios,
        q_rank=keys.integer("attention.q_lora_rank", 1, MAX_WIDTH),
        rank=keys.integer("attention.output_lora_rank", 1, MAX_WIDTH),
        groups=groups,
        index_heads=keys.integer("attention.indexer.head_count", 1, MAX_HEADS),
        index_size=keys.integer("attention.indexer.key_length", 1, MAX_HEAD_SIZE),
        index_used=keys.integer("attention.indexer.top_k", 1, MAX_CHOSEN),
    )
    if fields["sparse"].index_size < fields["ropes"][0].dims:
        raise keys.fail("attention.indexer.key_length", f"expected at least {fields['ropes'][0].dims}, those rotated")
    fields["streams"] = Streams(
        keys.integer("hyper_connection.count", 1, MAX_STREAMS),
        keys.integer("hyper_connection.sinkhorn_iterations", 1, 1000),
        keys.number("hyper_connection.epsilon", 0.0, 0.1),
    )
    window = keys.integer("attention.sliding_window", max(128, *ratios), MAX_CONTEXT)
    plain, compressed = _ropes(keys, fields["ropes"][0].dims)
    fields |= {"layers": layers, "windows": (window,) * layers}
    fields |= {"ropes": tuple(compressed if ratio else plain for ratio in ratios), "attention_scale": d**-0.5}
    fields |= {"hash_layers": keys.integer("hash_layer_count", 0, layers, default=0)}
    fields |= {"limits": keys.numbers("swiglu_clamp_exp", layers, 0.0, 1e6)}
    shared = "swiglu_clamp_shexp" if keys.has("swiglu_clamp_shexp") else "swiglu_clamp_exp"
    fields |= {"shared_limits": keys.numbers(shared, layers, 0.0, 1e6)}
    return Config(**fields)


def _experts(keys: Keys) -> Experts:
    count = keys.integer("expert_count", 1, MAX_EXPERTS)
    score = keys.integer("expert_gating_func", 0, 1 << 16, default=0)
    if score not in (0, SQRT_SOFTPLUS):  # 0 is written for "not said"
        raise keys.fail("expert_gating_func", f"expected {SQRT_SOFTPLUS} (square root of softplus), found {score}")
    return Experts(
        count,
        used=keys.integer("expert_used_count", 1, count),
        F=keys.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        score="sqrt_softplus",
        normalise=keys.model.get_bool(keys.name("expert_weights_norm"), default=True),
        scale=keys.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0,
        shared=keys.integer("expert_shared_count", 1, MAX_EXPERTS, default=1),
    )


def _ropes(keys: Keys, dims: int) -> tuple[Rope, Rope]:
    """(of layers without compressed rows, of the others)"""
    plain = Rope(dims, ROPE_PAIRS, keys.number("rope.freq_base", 1.0, 1e12, default=10000.0))
    compressed = replace(plain, base=keys.number("attention.compress_rope_freq_base", 1.0, 1e12))
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, default=0.0)
    if factor <= 1.0:
        return plain, compressed
    kind = keys.model.get_str(keys.name("rope.scaling.type"), default="yarn")
    if kind != "yarn":
        raise keys.fail("rope.scaling.type", f"expected yarn, found {kind!r}: not supported")
    return plain, replace(
        compressed,
        frequency_scale=1.0 / factor,
        extrapolation=1.0,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        original_context=keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT),
    )


def caches(b: PlanBuilder, c: Config, layer: int, window: Pages, whole: Pages, dtype: int) -> tuple[State, ...]:
    """The current layer's states: rows of the window; open and compressed rows; the same of the indexer."""
    assert c.sparse is not None
    shared, ratio = b.shared_cache(window, dtype), c.sparse.ratios[layer]
    if not ratio:
        return (shared,)
    series = 2 if ratio == CHOSEN else 1
    rows = b.compressed_cache("compressed", c.d, ratio, series, window, whole, dtype)
    if ratio != CHOSEN:
        return (shared, *rows)
    return (shared, *rows, *b.compressed_cache("index", c.sparse.index_size, ratio, series, window, whole, dtype))


def build(b: Blocks) -> None:
    x = b.embed()  # (T, S*D)
    for layer in b.layers():
        opened, mix = _open(b, x, "attn")
        x = _close(b, x, _attention(b, opened, layer), mix)
        opened, mix = _open(b, x, "ffn")
        table = b.table("ffn_gate_tid2eid", "V k") if layer < b.config.hash_layers else None
        limits = (b.config.limits[layer], b.config.shared_limits[layer])
        x = _close(b, x, b.experts(opened, residual=None, table=table, limits=limits), mix)
    c, s = b.config, b.config.streams
    assert s is not None
    scale, offset = b.vector("output_hc_scale", "1"), b.vector("output_hc_base", "S")
    b.head(b.builder.streams_head(x, b.matrix("output_hc_fn", "S S*D"), scale, offset, s, c.eps))


def _open(b: Blocks, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    s = b.config.streams
    assert s is not None
    rows = s.count * (s.count + 2)
    matrix = b.matrix(f"hc_{name}_fn", f"{rows} S*D")
    scale, offset = b.vector(f"hc_{name}_scale", "3"), b.vector(f"hc_{name}_base", f"{rows}")
    return b.builder.streams_in(f"{name}_in", x, matrix, scale, offset, s, b.config.eps)


def _close(b: Blocks, x: Tensor, made: Tensor, mix: Tensor) -> Tensor:
    assert b.config.streams is not None
    return b.builder.streams_out(x, made, mix, b.config.streams)


def _attention(b: Blocks, x: Tensor, layer: int) -> Tensor:
    """(T, D) -> (T, D)"""
    c, p, cache = b.config, b.builder, b.caches[layer]
    s, rope = c.sparse, c.ropes[layer]
    assert s is not None
    rounded = cache[0].dtype != lib.APU_F32
    e4m3, fp4 = (lib.APU_ROUND_E4M3, lib.APU_ROUND_FP4) if rounded else (lib.APU_ROUND_NONE, lib.APU_ROUND_NONE)
    ratio, chosen = s.ratios[layer], s.ratios[layer] == CHOSEN
    norm, q_norm = b.vector("attn_norm"), b.vector("attn_q_a_norm", "Rq")

    names, matrices = ["q", "kv"], [b.matrix("attn_q_a", "Rq D"), b.matrix("attn_kv", "d D")]
    wide = "2*d" if chosen else "d"
    if ratio:
        names += ["compressor_kv", "compressor_gate"]
        matrices += [b.matrix(f"attn_{name}", f"{wide} D") for name in names[2:]]
    q, kv, *open_rows = p.matmul(names, x, matrices, norm=norm, eps=c.eps)
    matrices = [b.matrix("attn_q_b", "H*d Rq")] + ([b.matrix("indexer.attn_q_b", "Hi*di Rq")] if chosen else [])
    q, *index_q = p.matmul(("q_heads", "index_q")[: len(matrices)], q, matrices, norm=q_norm, eps=c.eps)
    kv_norm = b.vector("attn_kv_a_norm", "d")
    p.shared_store(q, kv, rope, cache[0], norm=kv_norm, eps=c.eps, rounding=e4m3)
    if ratio:
        _compress(b, "attn_compressor", open_rows, cache[1:3], rope, "d", f"{ratio} {wide}", e4m3)
    ids = None
    if chosen:
        names = ["indexer.proj", "indexer_compressor_kv", "indexer_compressor_gate"]
        matrices = [b.matrix(name, f"{rows} D") for name, rows in zip(names, ("Hi", "2*di", "2*di"), strict=True)]
        weights, *open_rows = p.matmul(("index_weights", *names[1:]), x, matrices, norm=norm, eps=c.eps)
        _compress(b, "indexer_compressor", open_rows, cache[3:], rope, "di", f"{ratio} 2*di", fp4)
        scale = (s.index_size * s.index_heads) ** -0.5
        ids = p.index(index_q[0], weights, rope, cache[4], scale=scale, rounding=fp4)
    over = (cache[0], cache[2]) if ratio else cache
    sinks = b.vector("attn_sinks", "H")
    attended = p.sparse_attention(q, ids, rope, over, scale=c.attention_scale, sinks=sinks)
    low = p.head_matmul("output_low", attended, b.grouped("attn_output_a", "G Ro dg"), "T G*Ro")
    (out,) = p.matmul(("attn_output",), low, [b.matrix("attn_output_b", "D G*Ro")])
    return out


def _compress(
    b: Blocks,
    name: str,
    rows: list[Tensor],
    cache: tuple[State, ...],
    rope: Rope,
    size: str,
    offset: str,
    rounding: int,
) -> None:
    b.builder.compress(
        rows[0],
        rows[1],
        rope,
        (cache[0], cache[1]),
        offset=b.matrix(f"{name}_ape", offset),
        norm=b.vector(f"{name}_norm", size),
        eps=b.config.eps,
        rounding=rounding,
    )
