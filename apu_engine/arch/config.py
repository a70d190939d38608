"""A model's hyperparameters, read from metadata that may lie: values have ranges and must agree.

Key names are those of the GGUF specification, below the architecture's own prefix ("llama.block_count"). What
the file leaves out gets the value that the format documents. Shapes are checked against these numbers when
tensors are bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from apu_engine.plan.operands import ROPE_HALVES, Rope, Streams
from apu_engine.weights.model_file import ModelFile

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20  # of any dimension but the vocabulary
MAX_HEADS = 4096
MAX_HEAD_SIZE = 1024
MAX_LATENT = 4096
MAX_VOCABULARY = 1 << 24
MAX_CONTEXT = 1 << 27
MAX_EXPERTS = 1 << 16
SCORES = {1: "softmax", 2: "sigmoid"}  # expert_gating_func


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: `used` of `count` experts of width `F` for each row.

    Weights are the router's scores, divided by their sum over the used ones where `normalise`, times `scale`. A row
    chooses within `groups_used` of `groups` parts of the experts, 0 for no parts. `shared` experts serve every row.
    """

    count: int
    used: int
    F: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    shared: int = 0
    groups: int = 0
    groups_used: int = 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: a token's row has `rank` elements and `rope` rotated ones, for all heads.

    A head's query has `nope` elements that meet the latent by its own matrix, and `rope`; its value has `value`.
    Queries come through a latent of `q_rank`, 0 for a single matrix.
    """

    rank: int
    rope: int
    nope: int
    value: int
    q_rank: int = 0


@dataclass(frozen=True, slots=True)
class Sparse:
    """Attention over a window and compressed rows of one head that is key and value of all.

    `ratios`: tokens of a compressed row by layer, 0 for none. Queries come through a latent of `q_rank`, results go in
    `groups` through as many of `rank`. Where rows are chosen, by `index_heads` heads of `index_size`, `index_used` are.
    """

    ratios: tuple[int, ...]
    q_rank: int
    rank: int
    groups: int
    index_heads: int
    index_size: int
    index_used: int


@dataclass(frozen=True, slots=True)
class Config:
    """A decoder-only transformer. Tuples have one entry per layer; window 0 sees all tokens."""

    layers: int
    D: int
    H: int
    K: int
    d: int
    F: int
    V: int
    eps: float
    context: int
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_factors: bool  # rope_freqs.weight applies
    attention_scale: float
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"
    experts: Experts | None = None
    dense_layers: int = 0  # that lead a mixture and have no experts
    latent: Latent | None = None  # K is then 1 and d the row's elements
    sparse: Sparse | None = None  # K is then 1
    streams: Streams | None = None
    hash_layers: int = 0  # the first ones, whose experts follow from the token
    limits: tuple[float, ...] = ()  # of experts' gated pairs, by layer
    shared_limits: tuple[float, ...] = ()  # of shared experts' ones

    @property
    def dims(self) -> dict[str, int]:
        """The shape letters; r is the number of rotated pairs; E, k and Fe are there where experts are, Fs is the width
        of the shared ones together. Of latent attention: Rk and Rq the ranks, dn, dr, dv a head's parts, dq = dn + dr.
        Of sparse attention: Rq and Ro the ranks, G groups of dg, Hi heads of di that choose ki. S streams.
        """
        r = self.ropes[0].dims // 2
        dims = {"D": self.D, "H": self.H, "K": self.K, "d": self.d, "F": self.F, "V": self.V, "r": r}
        if e := self.experts:
            dims |= {"E": e.count, "k": e.used, "Fe": e.F, "Fs": e.F * e.shared}
        if a := self.latent:
            dims |= {"Rk": a.rank, "Rq": a.q_rank, "dn": a.nope, "dr": a.rope, "dv": a.value, "dq": a.nope + a.rope}
        if s := self.sparse:
            dims |= {"Rq": s.q_rank, "Ro": s.rank, "G": s.groups, "dg": self.H * self.d // s.groups}
            dims |= {"Hi": s.index_heads, "di": s.index_size, "ki": s.index_used}
        return dims | ({"S": self.streams.count} if self.streams else {})

    @property
    def group_windows(self) -> tuple[int, ...]:
        """The windows of the page-table groups, full attention first; compressed rows of all tokens are kept."""
        rows = {0} if self.sparse and any(self.sparse.ratios) else set()
        return tuple(sorted({*self.windows, *rows}))


class Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.prefix = model.architecture

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def has(self, key: str) -> bool:
        return self.name(key) in self.model.metadata

    def integer(self, key: str, lo: int, hi: int, **default: Any) -> int:
        """The value; FormatError naming the key when it is missing (without `default`), no integer or out of range."""
        return int(self.model.get_int(self.name(key), lo=lo, hi=hi, **default))

    def number(self, key: str, lo: float, hi: float, **default: Any) -> float:
        """As `integer`, of a float."""
        return float(self.model.get_float(self.name(key), lo=lo, hi=hi, **default))

    def uniform(self, key: str, layers: int, lo: int, hi: int, **default: Any) -> int:
        """An integer that may be stored per layer, but must be the same in all."""
        values = self.model.get_per_layer(self.name(key), layers, lo=lo, hi=hi, **default)
        if len(set(values)) != 1:
            raise self.fail(
                key, f"differs between layers ({', '.join(map(str, values[:8]))}...), which is not supported"
            )
        return int(values[0])

    def integers(self, key: str, layers: int) -> tuple[int, ...]:
        """One integer for each layer; entries that follow belong to layers of other files."""
        return tuple(self._array(key, "int", layers).tolist())

    def numbers(self, key: str, layers: int, lo: float, hi: float) -> tuple[float, ...]:
        """One number for each layer as `integers`, or one for all; 0 where the file has none."""
        value = self.model.metadata.get(self.name(key), 0.0)
        if isinstance(value, (int, float)):
            return (self.number(key, lo, hi, default=0.0),) * layers
        return tuple(map(float, self._array(key, "float", layers, lo, hi).tolist()))

    def _array(self, key: str, kind: str, layers: int, lo: float | None = None, hi: float | None = None) -> Any:
        values = self.model.get_array(self.name(key), kind, lo=lo, hi=hi)
        if len(values) < layers:
            raise self.fail(key, f"expected an entry for each of {layers} layers, found {len(values)}")
        return values[:layers]

    def fail(self, key: str, problem: str) -> Exception:
        return self.model.fail(self.name(key), problem)


def read_common(
    model: ModelFile,
    *,
    head_size: int | None = None,
    activation: str,
    rope_style: int,
    rope_base: float = 10000.0,
    mixture: bool = False,
    latent: bool = False,
    experts: Callable[[Keys], Experts] | None = None,
    context: int | None = None,
) -> tuple[Keys, dict[str, Any]]:
    """(keys, the Config fields that all architectures share).

    `head_size` is the default where the file has none. A `mixture` has experts in every layer, others have none.
    `latent` is for latent attention, whose mixtures have shared experts, groups and dense layers too. `experts` reads
    another kind of mixture. `context` is the default where the file has none.
    """
    keys = Keys(model)
    layers = keys.integer("block_count", 1, MAX_LAYERS)
    if any(name.startswith(f"blk.{layers}.") for name in model.tensors):
        raise keys.fail("block_count", f"is {layers}, but the file has tensors of blk.{layers}; one of them is wrong")
    D = keys.integer("embedding_length", 1, MAX_WIDTH)
    H = keys.uniform("attention.head_count", layers, 1, MAX_HEADS)
    rows = read_latent(keys, layers, H) if latent else None
    K, d = (1, rows.rank + rows.rope) if rows else _kv_heads(keys, layers, D, H, head_size)
    rope = read_rope(keys, rows.rope if rows else d, rope_style, rope_base)
    found = experts(keys) if experts else read_experts(keys, latent) if mixture else None
    F: dict[str, Any] = {"default": found.F} if found else {}  # of dense layers, which a mixture may not have
    fields: dict[str, Any] = {
        "layers": layers,
        "D": D,
        "H": H,
        "K": K,
        "d": d,
        "F": keys.uniform("feed_forward_length", layers, 1, MAX_WIDTH, **F),
        "V": _vocabulary(keys),
        "eps": keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        "context": keys.integer("context_length", 1, MAX_CONTEXT, **({"default": context} if context else {})),
        "windows": (0,) * layers,
        "ropes": (rope,) * layers,
        "rope_factors": "rope_freqs.weight" in model.tensors,
        "attention_scale": keys.number("attention.scale", 1e-6, 1e3, default=d**-0.5),
        "activation": activation,
        "experts": found,
        "latent": rows,
    }
    if not model.get_bool(keys.name("attention.causal"), default=True):
        raise keys.fail("attention.causal", "expected true: encoders are not supported")
    if not found and keys.integer("expert_count", 0, MAX_EXPERTS, default=0):
        raise keys.fail("expert_count", "mixtures of experts are not supported for this architecture")
    return keys, fields


def predicting_layers(keys: Keys, layers: int) -> int:
    """How many of the file's last layers are for next-token prediction.

    `nextn_predict_layers` says how many the model has; converters that leave them out may write it all the same.
    """
    count = keys.integer("nextn_predict_layers", 0, layers - 1, default=0)
    prefix = f"blk.{layers - count}.nextn."
    return count if any(name.startswith(prefix) for name in keys.model.tensors) else 0


def windowed_layers(keys: Keys, layers: int, period: int) -> tuple[bool, ...]:
    """Whether each layer is windowed: the file's flags, or all but every n-th by its period, or `period`."""
    name = keys.name("attention.sliding_window_pattern")
    if keys.has("attention.sliding_window_pattern") and not isinstance(keys.model.metadata[name], int):
        return tuple(bool(flag) for flag in keys.model.get_array(name, "bool", length=layers))
    every = keys.integer("attention.sliding_window_pattern", 1, 1024, default=period)
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def _kv_heads(keys: Keys, layers: int, D: int, H: int, head_size: int | None) -> tuple[int, int]:
    """(K, d)"""
    K = keys.uniform("attention.head_count_kv", layers, 1, H, default=H)
    if H % K:
        raise keys.fail("attention.head_count_kv", f"{K} does not divide the head count {H}")
    if head_size is None and not keys.has("attention.key_length") and D % H:
        raise keys.fail(
            "attention.head_count",
            f"{H} heads do not divide embedding_length {D}, and no key_length is given",
        )
    d = keys.integer("attention.key_length", 1, MAX_HEAD_SIZE, default=head_size or D // H)
    if not 1 <= d <= MAX_HEAD_SIZE:
        raise keys.fail("attention.head_count", f"a head of {d} values; expected 1 to {MAX_HEAD_SIZE}")
    value = keys.integer("attention.value_length", 1, MAX_HEAD_SIZE, default=d)
    if value != d:
        raise keys.fail("attention.value_length", f"expected {d}, the key length, found {value}: not supported")
    return K, d


def read_latent(keys: Keys, layers: int, H: int) -> Latent:
    """Sizes of latent attention.

    Newer files describe it as one head of the row's elements and give the heads' own sizes as *_mla; older files, which
    have attn_kv_b whole, describe the heads.
    """
    rank = keys.integer("attention.kv_lora_rank", 1, MAX_LATENT)
    rope = keys.integer("rope.dimension_count", 2, MAX_HEAD_SIZE)
    row = rank + rope
    newer = keys.has("attention.key_length_mla")
    suffix = "_mla" if newer else ""
    key = keys.integer(f"attention.key_length{suffix}", rope + 1, MAX_HEAD_SIZE)
    value = keys.integer(f"attention.value_length{suffix}", 1, MAX_HEAD_SIZE)
    if newer and keys.integer("attention.key_length", 1, 2 * MAX_LATENT, default=row) != row:
        raise keys.fail("attention.key_length", f"expected {row}, kv_lora_rank {rank} and {rope} rotated elements")
    heads = keys.uniform("attention.head_count_kv", layers, 1, H, default=1)
    if heads not in (1, H):
        raise keys.fail("attention.head_count_kv", f"expected 1 or {H}, the head count, found {heads}")
    q_rank = keys.integer("attention.q_lora_rank", 0, MAX_WIDTH, default=0)
    return Latent(rank, rope, key - rope, value, q_rank)


def read_experts(keys: Keys, grouped: bool = False, score: int = 1) -> Experts:
    """The mixture that the file describes; weights are divided by their sum unless it says otherwise.

    `grouped` ones may have groups, shared experts and dense layers, and do not divide unless the file says so. `score`
    is SCORES' number for files that do not say.
    """
    count = keys.integer("expert_count", 1, MAX_EXPERTS)
    given = keys.integer("expert_gating_func", 0, 1 << 16, default=score)
    score = score if grouped and not given else given  # 0 is written for "not said"
    if score not in SCORES:
        raise keys.fail("expert_gating_func", f"expected 1 (softmax) or 2 (sigmoid), found {score}: not supported")
    if not grouped:
        for key in ("expert_shared_count", "expert_group_count", "leading_dense_block_count"):
            if keys.integer(key, 0, 1 << 16, default=0):
                raise keys.fail(key, "expected 0: not supported for this architecture")
    used = keys.integer("expert_used_count", 1, count)
    groups, groups_used = _expert_groups(keys, count, used, score) if grouped else (0, 0)
    return Experts(
        count,
        used,
        F=keys.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        score=SCORES[score],
        normalise=keys.model.get_bool(keys.name("expert_weights_norm"), default=not grouped),
        scale=keys.number("expert_weights_scale", 0.0, 1e6, default=0.0) or 1.0,  # 0 is written for "none"
        shared=keys.integer("expert_shared_count", 0, MAX_EXPERTS, default=0) if grouped else 0,
        groups=groups,
        groups_used=groups_used,
    )


def _expert_groups(keys: Keys, count: int, used: int, score: int) -> tuple[int, int]:
    """(groups, those that a row chooses within); (0, 0) where they limit nothing."""
    groups = keys.integer("expert_group_count", 0, count, default=0)
    if groups <= 1:
        return 0, 0
    if count % groups or (SCORES[score] == "sigmoid" and count < 2 * groups):
        raise keys.fail("expert_group_count", f"{groups} groups do not part expert_count {count} evenly")
    chosen = keys.integer("expert_group_used_count", 1, groups)
    if used > count // groups * chosen:
        raise keys.fail(
            "expert_group_used_count", f"{chosen} groups of {count // groups} hold less than expert_used_count {used}"
        )
    return (groups, chosen) if chosen < groups else (0, 0)


def _vocabulary(keys: Keys) -> int:
    """Rows of the embedding table, which metadata and tokenizer must agree with."""
    model = keys.model
    table = model.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise model.fail(
            'tensor "token_embd.weight"', "is missing or not a matrix; expected the (V, D) embedding table"
        )
    rows = table.shape[0]
    if rows > MAX_VOCABULARY:
        raise model.fail('tensor "token_embd.weight"', f"expected at most {MAX_VOCABULARY:,} rows, found {rows:,}")
    claimed = keys.integer("vocab_size", 1, MAX_VOCABULARY, default=rows)
    if claimed != rows:
        raise keys.fail("vocab_size", f"expected {rows:,}, the rows of token_embd.weight, found {claimed:,}")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) > rows:
        raise model.fail(
            "tokenizer.ggml.tokens", f"{len(tokens):,} tokens, but token_embd.weight has only {rows:,} rows"
        )
    return rows


def read_rope(keys: Keys, head_size: int, style: int, default_base: float) -> Rope:
    """Rotary embedding with its scaling: none, linear or yarn; llama3's factors come as a tensor."""
    dims = keys.integer("rope.dimension_count", 2, head_size, default=head_size)
    if dims % 2:
        raise keys.fail("rope.dimension_count", f"expected an even number, found {dims}")
    if keys.model.get_bool(keys.name("rope.halves"), default=False):  # of folders whose q and k are not permuted
        style = ROPE_HALVES
    base = keys.number("rope.freq_base", 1.0, 1e12, default=default_base)
    kind = keys.model.get_str(keys.name("rope.scaling.type"), default="")
    legacy = keys.number("rope.scale_linear", 1e-3, 1e6, default=1.0)
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, default=0.0) or legacy  # 0 is written for "none"
    if kind in ("", "none"):
        kind = "linear" if kind == "" and factor != 1.0 else "none"
    if kind == "none":
        return Rope(dims, style, base)
    if factor < 1.0:
        raise keys.fail("rope.scaling.factor", f"expected at least 1, found {factor}")
    magnitude = keys.number("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0)
    if kind == "linear":
        return Rope(dims, style, base, 1.0 / factor, magnitude=magnitude)
    if kind != "yarn":
        raise keys.fail("rope.scaling.type", f"expected none, linear or yarn, found {kind!r}: not supported")
    original = keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT)
    return Rope(
        dims,
        style,
        base,
        1.0 / factor,
        extrapolation=keys.number("rope.scaling.yarn_ext_factor", 0.0, 1.0, default=1.0),
        magnitude=keys.number("rope.scaling.yarn_attn_factor", 1e-3, 1e3, default=magnitude)
        * (1.0 + 0.1 * math.log(factor)),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        original_context=original,
        whole=keys.model.get_bool(keys.name("rope.scaling.yarn_truncate"), default=True),  # of folders
    )
