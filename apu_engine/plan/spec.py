"""The plan as plain data, before it becomes native structs: tensors, states and ops, each known by its index.

A builder makes it, the dump reads it, Plan hands it over. It needs no device and no mapping, so a plan
of an 80 GB file can be listed from its header alone. Shape letters: T rows of a step, O output rows, D model,
H heads, K kv heads, d head size, F feed-forward, V vocabulary, E experts, k experts of a row, Fe their feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from apu_engine._native import NONE, PAGE_TOKENS, lib
from apu_engine.weights.ggml_types import TYPES, type_name

OP_NAMES: dict[int, str] = {
    lib.APU_OP_EMBED: "embed",
    lib.APU_OP_RMS_NORM: "rms_norm",
    lib.APU_OP_MATMUL: "matmul",
    lib.APU_OP_ROPE_STORE: "rope_store",
    lib.APU_OP_ATTENTION: "attention",
    lib.APU_OP_GATHER_NORM: "gather_norm",
    lib.APU_OP_SAMPLE: "sample",
    lib.APU_OP_ROUTE: "route",
    lib.APU_OP_EXPERTS: "experts",
    lib.APU_OP_LATENT_STORE: "latent_store",
    lib.APU_OP_HEAD_MATMUL: "head_matmul",
    lib.APU_OP_LATENT_ATTENTION: "latent_attention",
    lib.APU_OP_STREAMS_IN: "streams_in",
    lib.APU_OP_STREAMS_OUT: "streams_out",
    lib.APU_OP_SHARED_STORE: "shared_store",
    lib.APU_OP_COMPRESS: "compress",
    lib.APU_OP_INDEX: "index",
    lib.APU_OP_SPARSE_ATTENTION: "sparse_attention",
}


def most_pages(tokens: int, window: int, rows: int) -> int:
    """The most pages a sequence of `tokens` holds at once when a step adds at most `rows`; `window` 0 keeps all."""
    pages = -(-tokens // PAGE_TOKENS)
    if window:
        span = window + rows - 1  # tokens that the first and the last row of a step reach together
        pages = min(pages, (span + PAGE_TOKENS - 2) // PAGE_TOKENS + 1)
    return pages


class Segment(NamedTuple):
    """Rows [row_begin, row_begin + row_count) of a weight at a device address."""

    address: int
    row_begin: int
    row_count: int
    row_stride: int
    padding: int


class Scales(NamedTuple):
    """A weight's scale plane: one for `block_rows` by `block_columns` elements, `row_bytes` side by side.

    Segments count rows of the weight; see apu_plane in native/include/apu.h.
    """

    dtype: int
    block_rows: int
    block_columns: int
    row_bytes: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(-(-segment.row_count // self.block_rows) for segment in self.segments) * self.row_bytes


@dataclass(slots=True)
class Tensor:
    """A weight (with segments) or scratch (with an arena offset once placed).

    `letters` says the shape: "T H*d".
    """

    id: int
    name: str
    letters: str
    shape: tuple[int, ...]
    dtype: int
    rows: int = lib.APU_ROWS_FIXED
    segments: tuple[Segment, ...] = ()
    offset: int = 0
    scales: Scales | None = None

    @property
    def is_weight(self) -> bool:
        return bool(self.segments)

    @property
    def row_bytes(self) -> int:
        block = TYPES[self.dtype]
        return self.shape[-1] // block.elements * block.nbytes

    @property
    def row_count(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.row_count + (self.scales.nbytes if self.scales else 0)

    @property
    def type_name(self) -> str:
        return type_name(self.dtype)


@dataclass(slots=True)
class State:
    """K, V or other rows of one layer: pages of (heads, rows_per_page rows of head_size) that span 128 tokens; page ids
    are shared within a group.

    Window 0: all tokens.
    """

    id: int
    name: str
    dtype: int
    layer: int
    group: int
    window: int
    heads: int
    head_size: int
    page_count: int
    rows_per_page: int = PAGE_TOKENS
    address: int = 0

    @property
    def page_bytes(self) -> int:
        """Of one page: what 128 tokens take, all heads."""
        block = TYPES[self.dtype]
        return self.rows_per_page * self.heads * (self.head_size // block.elements) * block.nbytes

    @property
    def token_bytes(self) -> int:
        """Of one token, all heads: a page's share, rounded up."""
        return -(-self.page_bytes // PAGE_TOKENS)


@dataclass(slots=True)
class Op:
    """One apu_op; absent operands are NONE."""

    kind: int
    layer: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return OP_NAMES[self.kind]

    def reads(self) -> list[int]:
        return [tensor for tensor in self.inputs if tensor != NONE]

    def writes(self) -> list[int]:
        return [tensor for tensor in self.outputs if tensor != NONE]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most a step may hold; `max_positions` bounds every position, `vocabulary` every token id."""

    max_rows: int
    max_sequences: int
    max_outputs: int
    max_positions: int
    vocabulary: int


@dataclass(slots=True)
class PlanSpec:
    """A whole plan. `dims` sizes the shape letters.

    `slices` names op ranges [first, last); "forward" then "sample" is one step.
    """

    limits: Limits
    dims: dict[str, int] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    arena_bytes: int = 0
    slices: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def group_count(self) -> int:
        return 1 + max((state.group for state in self.states), default=-1)

    @property
    def state_bytes(self) -> int:
        """Reserved for all states together."""
        return sum(state.page_bytes * state.page_count for state in self.states)
