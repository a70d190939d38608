"""What an op reads and computes, from its operands alone: the figures that a measured time is compared with.

Weights count once per step, however many rows share them; an embedding counts the rows that it looks up; a matrix of
experts counts those that the rows chose, at most all. The KV cache counts once per step and layer, from the first
token that any row can see. Activations are not counted: they stay in the caches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from apu_engine._native import NONE, PAGE_TOKENS, lib
from apu_engine.plan.spec import Op, PlanSpec, Tensor
from apu_engine.weights.ggml_types import TYPES

_FAMILIES = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "attn qkv"),
    **dict.fromkeys(("attn_q_a", "attn_q_b", "attn_kv_a_mqa"), "attn qkv"),
    **dict.fromkeys(("attn_k_b", "attn_v_b"), "attn latent"),
    **dict.fromkeys(("attn_kv", "attn_compressor_kv", "attn_compressor_gate"), "attn qkv"),
    **dict.fromkeys(("indexer.attn_q_b", "indexer.proj"), "indexer"),
    **dict.fromkeys(("indexer_compressor_kv", "indexer_compressor_gate"), "indexer"),
    **dict.fromkeys(("attn_output", "attn_output_a", "attn_output_b"), "attn out"),
    **dict.fromkeys(("hc_attn_fn", "hc_ffn_fn", "output_hc_fn"), "streams"),
    **dict.fromkeys(("ffn_gate", "ffn_up"), "gate/up"),
    "ffn_down": "down",
    **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), "shared experts"),
    **dict.fromkeys(("ffn_gate_inp", "ffn_gate_tid2eid"), "router"),
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "experts"),
    **dict.fromkeys(("output", "token_embd"), "head"),
}
MATRIX_KINDS = frozenset(
    (lib.APU_OP_MATMUL, lib.APU_OP_ROUTE, lib.APU_OP_EXPERTS, lib.APU_OP_HEAD_MATMUL, lib.APU_OP_STREAMS_IN)
)
ATTENTION_KINDS = frozenset(
    (lib.APU_OP_ATTENTION, lib.APU_OP_LATENT_ATTENTION, lib.APU_OP_SPARSE_ATTENTION, lib.APU_OP_INDEX)
)
_KINDS = {
    lib.APU_OP_EMBED: "embedding",
    lib.APU_OP_RMS_NORM: "norms",
    lib.APU_OP_GATHER_NORM: "norms",
    **dict.fromkeys((lib.APU_OP_ROPE_STORE, lib.APU_OP_LATENT_STORE, lib.APU_OP_SHARED_STORE), "rope"),
    **dict.fromkeys(ATTENTION_KINDS - {lib.APU_OP_INDEX}, "attention"),
    lib.APU_OP_INDEX: "indexer",
    lib.APU_OP_STREAMS_OUT: "streams",
    lib.APU_OP_SAMPLE: "sample",
}


class Cost(NamedTuple):
    """Bytes read and multiply-adds of one op in one step."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    multiply_adds: int = 0

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class Rows(NamedTuple):
    """A step of one sequence: `rows` tokens, the last at position `end` - 1, and `outputs` rows of logits."""

    rows: int
    outputs: int
    end: int


DECODE = Rows(1, 1, 1)


def cost(spec: PlanSpec, op: Op, step: Rows = DECODE) -> Cost:
    """What `op` reads and computes in `step`."""
    weights = matrices = 0
    rows = op_rows(spec, op, step)
    for tensor in operands(spec, op):
        weights += weight_bytes(spec, op, tensor, rows)
        matrices += multiply_adds(spec, op, tensor, rows)
    return Cost(weights, kv_bytes(spec, op, step), matrices)


def operands(spec: PlanSpec, op: Op) -> list[Tensor]:
    """The weights of an op."""
    return [spec.tensors[weight] for weight in op.weights if weight != NONE]


def op_rows(spec: PlanSpec, op: Op, step: Rows) -> int:
    """How many rows of `step` the op works on: those of its result, or of what it reads when it has none."""
    of_outputs = any(spec.tensors[i].rows == lib.APU_ROWS_OUTPUT for i in (*op.writes(), *op.reads()))
    return step.outputs if of_outputs else step.rows


def weight_bytes(spec: PlanSpec, op: Op, weight: Tensor, rows: int = 1) -> int:
    """Bytes of `weight` that `rows` rows read together."""
    if op.kind == lib.APU_OP_EMBED or weight.dtype == lib.APU_I32:  # one row a token
        return weight.row_bytes * rows
    if used := experts_used(spec, op, weight):
        return weight.nbytes // weight.shape[0] * min(used * rows, weight.shape[0])
    return weight.nbytes if rows else 0


def multiply_adds(spec: PlanSpec, op: Op, weight: Tensor, rows: int) -> int:
    """Multiplications, each with its addition, of `weight` with `rows` rows; 0 for what is no matrix."""
    if not is_matrix(op) or len(weight.shape) < 2 or weight.dtype == lib.APU_I32:
        return 0
    if used := experts_used(spec, op, weight):
        return math.prod(weight.shape[1:]) * used * rows
    return weight.row_count * weight.shape[-1] * rows


def experts_used(spec: PlanSpec, op: Op, weight: Tensor) -> int:
    """How many of a matrix of experts (E, N, K) each row reads; 0 where `weight` is none."""
    if op.kind != lib.APU_OP_EXPERTS or len(weight.shape) < 3:
        return 0
    return spec.tensors[op.inputs[1]].shape[1]  # ids (T, k)


def kv_bytes(spec: PlanSpec, op: Op, step: Rows) -> int:
    """Bytes of the KV cache that attention reads: every visible token once, of compressed ones those chosen."""
    if op.kind not in ATTENTION_KINDS or not step.rows:
        return 0
    total, chosen = 0, rows_chosen(spec, op)
    for state in (spec.states[state] for state in op.states):
        tokens = min(step.end, state.window + step.rows - 1) if state.window else step.end
        if chosen and not state.window:
            tokens = min(tokens, chosen * step.rows * PAGE_TOKENS // state.rows_per_page)
        total += tokens * state.token_bytes
    return total


def rows_chosen(spec: PlanSpec, op: Op) -> int:
    """How many compressed rows a row of the step attends to at most; 0: all."""
    if op.kind != lib.APU_OP_SPARSE_ATTENTION or op.inputs[1] == NONE:
        return 0
    return spec.tensors[op.inputs[1]].shape[1]  # ids (T, k)


def decode_bytes(spec: PlanSpec, context: int) -> tuple[int, int]:
    """(weight bytes, KV bytes) that one decode step reads at `context` tokens, by one sequence."""
    weights = kv = 0
    for op in spec.ops:
        each = cost(spec, op, Rows(1, 1, context))
        weights += each.weight_bytes
        kv += each.kv_bytes
    return weights, kv


def is_matrix(op: Op) -> bool:
    """Whether the op multiplies with matrices."""
    return op.kind in MATRIX_KINDS


def family(spec: PlanSpec, op: Op) -> str:
    """What an op is for: "attn qkv", "attn out", "gate/up", "down", "experts", "head", "attention", "norms", ...

    An op of matrices is named after them; unknown ones keep their names, as "attn_x + attn_y".
    """
    if not is_matrix(op):
        return _KINDS.get(op.kind, op.name)
    names: dict[str, None] = {}
    for tensor in operands(spec, op):
        if len(tensor.shape) < 2:
            continue
        name = tensor.name.split(".", 2)[2] if tensor.name.startswith("blk.") else tensor.name
        name = name.removesuffix(".weight")
        names[_FAMILIES.get(name, name)] = None
    return " + ".join(names) or op.name


def matrix_types(spec: PlanSpec, op: Op) -> str:
    """Types of the matrices that the op multiplies with, the one of most bytes first: "Q8_0 + F16"; "" without any."""
    if not is_matrix(op):
        return ""
    sizes: dict[str, int] = {}
    for tensor in operands(spec, op):
        if len(tensor.shape) > 1 and tensor.dtype != lib.APU_I32:
            name = TYPES[tensor.dtype].name
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return " + ".join(sorted(sizes, key=lambda name: -sizes[name]))
