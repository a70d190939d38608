"""What ops cost: bytes and multiply-adds by the plan's own operands, and the families that a profile groups by."""

from __future__ import annotations

from collections import Counter

import pytest

from apu_engine import arch
from apu_engine._native import lib
from apu_engine.plan import PlanSpec
from apu_engine.plan.cost import Rows, cost, family, is_matrix, operands
from apu_engine.weights.opening import open_model
from models import TinyModel


def _plan(tiny: TinyModel) -> PlanSpec:
    return arch.plan(open_model(tiny.path), arch.PlanOptions(ctx=300, max_rows=16, max_outputs=8))


def test_families_of_a_llama(tiny_llama: TinyModel) -> None:
    spec = _plan(tiny_llama)
    assert Counter(family(spec, op) for op in spec.ops) == {
        "embedding": 1, "attn qkv": 2, "rope": 2, "attention": 2, "attn out": 2, "gate/up": 2, "down": 2,
        "norms": 1, "head": 1, "sample": 1,
    }  # fmt: skip
    assert {family(spec, op) for op in spec.ops if is_matrix(op)} == {
        "attn qkv", "attn out", "gate/up", "down", "head"
    }  # fmt: skip


def test_unknown_matrices_keep_their_names(tiny_llama: TinyModel) -> None:
    spec = _plan(tiny_llama)
    op = next(op for op in spec.ops if family(spec, op) == "attn qkv")
    for number, tensor in enumerate(t for t in operands(spec, op) if len(t.shape) == 2):
        tensor.name = f"blk.0.odd_{number}.weight"
    assert family(spec, op) == "odd_0 + odd_1 + odd_2"


@pytest.mark.parametrize("rows", [1, 7])
def test_matrices_are_read_once_and_multiplied_by_every_row(tiny_llama: TinyModel, rows: int) -> None:
    spec = _plan(tiny_llama)
    for op in spec.ops:
        found = cost(spec, op, Rows(rows, 2, 40))
        matrices = [t for t in operands(spec, op) if len(t.shape) == 2]
        if op.kind == lib.APU_OP_EMBED:
            assert found.weight_bytes == rows * matrices[0].row_bytes and found.multiply_adds == 0
            continue
        assert found.weight_bytes == sum(t.nbytes for t in operands(spec, op))
        own = 2 if family(spec, op) == "head" else rows
        assert found.multiply_adds == own * sum(t.shape[0] * t.shape[1] for t in matrices)


def test_the_head_is_not_read_when_nothing_is_drawn(tiny_llama: TinyModel) -> None:
    spec = _plan(tiny_llama)
    head = next(op for op in spec.ops if family(spec, op) == "head")
    assert cost(spec, head, Rows(7, 0, 7)) == (0, 0, 0)


def test_a_window_bounds_what_attention_reads(tiny_gemma3: TinyModel) -> None:
    spec = _plan(tiny_gemma3)
    tokens = {  # (window, step) -> tokens read
        (24, Rows(1, 1, 10)): 10,
        (24, Rows(1, 1, 100)): 24,
        (24, Rows(16, 1, 100)): 39,
        (24, Rows(16, 1, 30)): 30,
        (0, Rows(16, 1, 100)): 100,
    }
    for (window, step), expected in tokens.items():
        op = next(
            op for op in spec.ops if op.kind == lib.APU_OP_ATTENTION and spec.states[op.states[0]].window == window
        )
        per_token = sum(spec.states[state].token_bytes for state in op.states)
        assert cost(spec, op, step) == (0, expected * per_token, 0)
