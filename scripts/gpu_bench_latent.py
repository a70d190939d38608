"""Part of gpu_bench.py: latent attention and matrices of heads at the shapes of DeepSeek V2-Lite, V3 and V4 Flash.

An op's time is the difference between plans of many layers and of few, each with caches or matrices of its own, so that
no cache helps and nothing around the ops counts. One row of a long context, and 512 rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from device_plans import DeviceArrays, planned

from apu_engine._native import PAGE_TOKENS, Device
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.plan import Plan
from apu_engine.plan.spec import Limits, Tensor
from apu_engine.weights.ggml_types import GGML_TYPES

KEY, VALUE = 576, 512
ROWS = 512  # of a prefill
LAYERS, FEW = 24, 4

Timer = Callable[[Plan, Any, int, int], float]
Add = Callable[[PlanBuilder, DeviceArrays, Tensor], None]


class Attention(NamedTuple):
    heads: int
    context: int
    type: str
    rows: int = 1


class Heads(NamedTuple):
    """Matrices (H, N, K), or (H, K, N) where `across`; `rest` elements of a head pass by."""

    heads: int
    n: int
    k: int
    type: str
    rows: int = 1
    rest: int = 0
    across: bool = False


class Measured(NamedTuple):
    kernel: str
    type: str
    shape: str
    seconds: float
    nbytes: int  # latent rows or matrices, once
    flops: int
    rows: int


ATTENTION = (
    *(Attention(heads, context, kv) for kv in ("F16", "Q8_0") for heads in (16, 128) for context in (8192, 32768)),
    *(Attention(heads, 8192, kv, ROWS) for kv in ("F16", "Q8_0") for heads in (16, 128)),
)
HEADS = (
    *(Heads(16, 512, 128, kind, rest=64) for kind in ("F16", "Q8_0")),
    *(Heads(128, 512, 128, kind, rest=64) for kind in ("F16", "Q8_0", "Q5_0")),
    *(Heads(128, 128, 512, kind) for kind in ("F16", "Q8_0", "Q4_K")),
    Heads(8, 1024, 4096, "Q8_0"),
    Heads(16, 512, 128, "Q8_0", rest=64, across=True),
    Heads(128, 512, 128, "Q8_0", rest=64, across=True),
    Heads(128, 512, 128, "Q8_0", 4, 64),
    Heads(128, 512, 128, "Q8_0", ROWS, 64),
    Heads(128, 128, 512, "F16", ROWS),
    Heads(8, 1024, 4096, "Q8_0", ROWS),
)


QUICK = ((Attention(128, 8192, "F16"),), (Heads(128, 512, 128, "Q8_0", rest=64),))


def latent_ops(device: Device, timed: Timer, quick: bool) -> list[Measured]:
    attention, heads = QUICK if quick else (ATTENTION, HEADS)
    return [time_attention(device, timed, a) for a in attention] + [time_heads(device, timed, h) for h in heads]


def time_attention(device: Device, timed: Timer, a: Attention) -> Measured:
    block = GGML_TYPES[type_number(a.type)]
    pages = -(-a.context // PAGE_TOKENS)

    def add(b: PlanBuilder, _: DeviceArrays, q: Tensor) -> None:
        b.latent_attention(q, b.latent_cache(0, 0, pages, type_number(a.type)), KEY**-0.5)

    dims = {"D": a.heads * KEY, "H": a.heads, "K": 1, "d": KEY, "Rk": VALUE, "V": 1}
    seconds = time_op(device, timed, dims, a.context, a.rows, LAYERS if a.rows == 1 else 2 * FEW, add)
    seen = a.rows * (2 * a.context - a.rows + 1) // 2
    flops = 2 * a.heads * (KEY + VALUE) * seen
    nbytes = a.context * KEY // block.elements * block.nbytes
    return Measured("latent", a.type, f"{a.rows} x {a.heads} x {a.context}", seconds, nbytes, flops, a.rows)


def time_heads(device: Device, timed: Timer, h: Heads) -> Measured:
    number, shape = type_number(h.type), (h.heads, h.k, h.n) if h.across else (h.heads, h.n, h.k)
    block = GGML_TYPES[number]
    nbytes = h.heads * h.n * h.k // block.elements * block.nbytes
    packed = np.random.default_rng(1).integers(1, 60, nbytes, dtype=np.uint8)

    def add(b: PlanBuilder, arrays: DeviceArrays, x: Tensor) -> None:
        matrix = b.weight(arrays.add(f"w{b.layer}", packed, number, shape), " ".join(map(str, shape)))
        b.head_matmul("out", x, matrix, f"T {h.heads * (h.n + h.rest)}", across=h.across)

    dims = {"D": h.heads * (h.k + h.rest), "H": h.heads, "K": 1, "d": KEY, "V": 1}
    layers = LAYERS if h.rows == 1 else 2 * FEW
    seconds = time_op(device, timed, dims, max(h.rows, PAGE_TOKENS), h.rows, layers, add)
    name = f"{h.heads} x {h.k}x{h.n} across" if h.across else f"{h.heads} x {h.n}x{h.k}"
    shown = name if h.rows == 1 else f"{h.rows} x {name}"
    return Measured("heads", h.type, shown, seconds, nbytes, 2 * h.rows * h.heads * h.n * h.k, h.rows)


def time_op(
    device: Device, timed: Timer, dims: dict[str, int], context: int, rows: int, layers: int, add: Add
) -> float:
    """Seconds of one op for the last rows of a context."""
    with DeviceArrays(device) as arrays:
        b = PlanBuilder(arrays, Limits(rows, 1, 1, context, 1), dims)
        draw = np.random.default_rng(1)
        table = b.weight(arrays.add("table", draw.standard_normal((1, dims["D"])).astype(np.float32)), "V D")
        norm = b.weight(arrays.add("norm", np.ones(dims["D"], np.float32)), "D")
        x = b.embed(table)
        for b.layer in range(layers):
            add(b, arrays, x)
        b.layer = -1
        b.sample(b.matmul(["logits"], b.gather_norm(x, norm, 1e-5), [table])[0])
        with planned(device, b) as plan:
            pages = context // PAGE_TOKENS
            nbytes = sum(state.page_bytes for state in plan.spec.states)
            some = draw.integers(0x20, 0x30, nbytes, dtype=np.uint8).tobytes()
            for page in range(pages if nbytes else 0):
                plan.import_page(0, page, some)
            step = plan.new_step()
            step.add_sequence([0] * rows, context - rows, [np.arange(pages, dtype=np.uint32)] if nbytes else [])
            timed(plan, step, 0, 1)
            few = layers // 2
            return (timed(plan, step, 1, 1 + layers) - timed(plan, step, 1, 1 + few)) / (layers - few)


def type_number(name: str) -> int:
    return next(number for number, block in GGML_TYPES.items() if block.name == name)
