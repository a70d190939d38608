"""A plan for people: one line per op with operands, shapes, types and bytes, and totals per decode step.

Bytes are what one decode step of one sequence reads: whole matrices, those of the experts that a row uses, one
row of the embedding table, and the KV cache per token of context. Their sum over the memory bandwidth bounds the
speed of decoding; it is the number to compare a measurement with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from apu_engine._native import NONE, lib
from apu_engine.plan.cost import ATTENTION_KINDS, decode_bytes, weight_bytes
from apu_engine.plan.spec import PlanSpec, Tensor


@dataclass(frozen=True, slots=True)
class OpLine:
    """`weight_bytes` read per decode step, `kv_bytes` per token of context, at most `window` of them."""

    index: int
    layer: int
    op: str
    inputs: str
    outputs: str
    weights: str
    weight_bytes: int
    kv_bytes: int
    window: int


def lines(spec: PlanSpec) -> Iterator[OpLine]:
    """One OpLine per op, in order."""
    for index, op in enumerate(spec.ops):
        weights = [spec.tensors[weight] for weight in op.weights if weight != NONE]
        states = [spec.states[state] for state in op.states]
        states = [state for state in states if not state.window] or states  # what grows
        yield OpLine(
            index=index,
            layer=op.layer,
            op=op.name,
            inputs=", ".join(_tensor(spec.tensors[i]) for i in op.reads()),
            outputs=", ".join(_tensor(spec.tensors[i]) for i in op.writes()),
            weights=", ".join(_tensor(weight) for weight in weights),
            weight_bytes=sum(weight_bytes(spec, op, weight) for weight in weights),
            kv_bytes=sum(state.token_bytes for state in states) if op.kind in ATTENTION_KINDS else 0,
            window=states[0].window if states else 0,
        )


def _tensor(tensor: Tensor) -> str:
    name = tensor.name
    if name.startswith("blk."):
        name = name.split(".", 2)[2]
    shape = tensor.letters if not tensor.is_weight else " ".join(map(str, tensor.shape))
    kind = f" {tensor.type_name}" if tensor.is_weight or tensor.dtype != lib.APU_F32 else ""
    return f"{name.removesuffix('.weight')} ({shape}){kind}"


def render(spec: PlanSpec, *, context: int | None = None) -> str:
    """The whole listing as text; equal layers are shown once, totals follow."""
    limits = spec.limits
    context = context or limits.max_positions
    table = list(lines(spec))
    signatures: dict[int, tuple[tuple[str, ...], ...]] = {}
    for line in table:
        if line.layer >= 0:
            key = (line.op, line.inputs, line.outputs, line.weights, str(line.window))
            signatures[line.layer] = (*signatures.get(line.layer, ()), key)
    shown: dict[tuple[tuple[str, ...], ...], int] = {}
    same: dict[int, list[int]] = {}
    for layer, signature in signatures.items():
        first = shown.setdefault(signature, layer)
        same.setdefault(first, []).append(layer)
    weights = [tensor for tensor in spec.tensors if tensor.is_weight]
    out = [
        f"{len(spec.ops)} ops, {len(weights)} weights, {len(spec.states)} states in "
        f"{spec.group_count} groups; T <= {limits.max_rows} rows, O <= {limits.max_outputs} outputs",
        ", ".join(f"{letter} = {size:,}" for letter, size in spec.dims.items()),
        f"{'op':>4} {'layer':>5}  {'kind':<12}{'bytes/step':>13}  operands",
    ]
    previous: int | None = None
    for line in table:
        if line.layer >= 0 and line.layer not in same:
            continue
        if line.layer != previous and line.layer in same and len(same[line.layer]) > 1:
            out.append(f"            -- the same in layers {_ranges(same[line.layer])}")
        previous = line.layer
        cost = f"{line.weight_bytes:,}" if not line.kv_bytes else f"{line.kv_bytes:,}/token"
        number = str(line.layer) if line.layer >= 0 else ""
        operands = f"{line.inputs} -> {line.outputs}".strip() if line.outputs else line.inputs
        window = f" window {line.window}" if line.window and line.kv_bytes else ""
        using = f"  with {line.weights}" if line.weights else ""
        out.append(f"{line.index:>4} {number:>5}  {line.op:<12}{cost:>13}  {operands}{using}{window}")
    read, kv = decode_bytes(spec, context)
    stored = sum(tensor.nbytes for tensor in weights)
    out += [
        f"scratch arena {spec.arena_bytes / 1e6:.1f} MB; states reserve {spec.state_bytes / 1e6:.1f} MB",
        f"a decode step reads {read / 1e6:.1f} of {stored / 1e6:.1f} MB of weights and, at {context:,} tokens of "
        f"context, {kv / 1e6:.1f} MB of KV cache",
    ]
    return "\n".join(out)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] + 1 == number:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
