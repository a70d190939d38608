"""Places scratch tensors in one arena so that tensors which are alive together never overlap.

A tensor lives from the first op that writes it to the last that touches it, both included: an op's outputs
therefore never lie on its inputs, except where they are the same tensor (residuals, rotary embedding in
place). Greedy by size, each at the lowest free offset: plans are nearly linear, so more would gain nothing.
"""

from __future__ import annotations

from apu_engine.plan.spec import Op, Tensor

ALIGNMENT = 64


def lifetimes(ops: list[Op]) -> dict[int, tuple[int, int]]:
    """Tensor id -> (first op, last op) that read or write it."""
    spans: dict[int, tuple[int, int]] = {}
    for at, op in enumerate(ops):
        for tensor in (*op.reads(), *op.writes()):
            first, _ = spans.get(tensor, (at, at))
            spans[tensor] = (first, at)
    return spans


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(tensors: list[Tensor], ops: list[Op]) -> int:
    """Sets `offset` of every scratch tensor that `ops` use; returns the arena's size in bytes."""
    spans = lifetimes(ops)
    scratch = [tensor for tensor in tensors if not tensor.is_weight and tensor.id in spans]
    placed: list[Tensor] = []
    total = 0
    for tensor in sorted(scratch, key=lambda t: (-t.nbytes, spans[t.id])):
        first, last = spans[tensor.id]
        size = aligned(tensor.nbytes)
        offset = 0
        for other in sorted(placed, key=lambda t: t.offset):
            begin, end = spans[other.id]
            if begin > last or end < first:
                continue
            if offset + size <= other.offset:
                break
            offset = max(offset, other.offset + aligned(other.nbytes))
        tensor.offset = offset
        placed.append(tensor)
        total = max(total, offset + size)
    return total
