"""Part of gpu_bench.py: latent attention and matrices of heads at the shapes of DeepSeek V2-Lite, V3 and V4 Flash.

An op's time is the difference between many ops and few, which take caches or matrices in turn, so that no cache helps
and nothing around the ops counts. One row of a long context, and 512 rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from device_plans import DeviceArrays, planned

from apu_engine._native import PAGE_TOKENS, Device
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.plan import Plan
from apu_engine.plan.spec import Limits, State, Tensor
from apu_engine.weights.ggml_types import GGML_TYPES

KEY, VALUE = 576, 512
ROWS = 512  # of a prefill
LAYERS = 24  # caches or matrices that take turns
ROUNDS = 8  # of few rows: an op takes microseconds, the start of a plan more than some ops

Timer = Callable[[Plan, Any, int, int], float]
Given = TypeVar("Given")


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

    def cache(b: PlanBuilder, _: DeviceArrays) -> tuple[State]:
        return b.latent_cache(0, 0, pages, type_number(a.type))

    def attend(b: PlanBuilder, q: Tensor, given: tuple[State]) -> None:
        b.latent_attention(q, given, KEY**-0.5)

    dims = {"D": a.heads * KEY, "H": a.heads, "K": 1, "d": KEY, "Rk": VALUE, "V": 1}
    seconds = time_op(device, timed, dims, a.context, a.rows, cache, attend)
    seen = a.rows * (2 * a.context - a.rows + 1) // 2
    flops = 2 * a.heads * (KEY + VALUE) * seen
    nbytes = a.context * KEY // block.elements * block.nbytes
    return Measured("latent", a.type, f"{a.rows} x {a.heads} x {a.context}", seconds, nbytes, flops, a.rows)


def time_heads(device: Device, timed: Timer, h: Heads) -> Measured:
    number, shape = type_number(h.type), (h.heads, h.k, h.n) if h.across else (h.heads, h.n, h.k)
    block = GGML_TYPES[number]
    nbytes = h.heads * h.n * h.k // block.elements * block.nbytes
    packed = np.random.default_rng(1).integers(1, 60, nbytes, dtype=np.uint8)

    def matrix(b: PlanBuilder, arrays: DeviceArrays) -> Tensor:
        return b.weight(arrays.add(f"w{b.layer}", packed, number, shape), " ".join(map(str, shape)))

    def multiply(b: PlanBuilder, x: Tensor, given: Tensor) -> None:
        b.head_matmul("out", x, given, f"T {h.heads * (h.n + h.rest)}", across=h.across)

    dims = {"D": h.heads * (h.k + h.rest), "H": h.heads, "K": 1, "d": KEY, "V": 1}
    seconds = time_op(device, timed, dims, max(h.rows, PAGE_TOKENS), h.rows, matrix, multiply)
    name = f"{h.heads} x {h.k}x{h.n} across" if h.across else f"{h.heads} x {h.n}x{h.k}"
    shown = name if h.rows == 1 else f"{h.rows} x {name}"
    return Measured("heads", h.type, shown, seconds, nbytes, 2 * h.rows * h.heads * h.n * h.k, h.rows)


def time_op(
    device: Device,
    timed: Timer,
    dims: dict[str, int],
    context: int,
    rows: int,
    make: Callable[[PlanBuilder, DeviceArrays], Given],
    add: Callable[[PlanBuilder, Tensor, Given], None],
) -> float:
    """Seconds of one op for the last rows of a context."""
    ops = LAYERS * ROUNDS if rows <= 8 else 8
    with DeviceArrays(device) as arrays:
        b = PlanBuilder(arrays, Limits(rows, 1, 1, context, 1), dims)
        draw = np.random.default_rng(1)
        table = b.weight(arrays.add("table", draw.standard_normal((1, dims["D"])).astype(np.float32)), "V D")
        norm = b.weight(arrays.add("norm", np.ones(dims["D"], np.float32)), "D")
        x = b.embed(table)
        given: list[Given] = []
        for b.layer in range(ops):
            if b.layer < LAYERS:
                given.append(make(b, arrays))
            add(b, x, given[b.layer % LAYERS])
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
            few = ops // 2
            return (timed(plan, step, 1, 1 + ops) - timed(plan, step, 1, 1 + few)) / (ops - few)


def type_number(name: str) -> int:
    return next(number for number, block in GGML_TYPES.items() if block.name == name)
