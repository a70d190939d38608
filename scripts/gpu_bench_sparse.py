"""Part of gpu_bench.py: what a layer of DeepSeek V4 Flash stores, compresses, chooses and attends to, for one row.

An op's time is the difference between plans of many layers and of few, each with states of its own, so that no cache
helps and nothing around the ops counts. Bytes are those of the rows that the op reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from device_plans import DeviceArrays, planned

from apu_engine._native import NO_PAGE, PAGE_TOKENS, Device, lib
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.operands import Pages, Rope
from apu_engine.plan.plan import Plan
from apu_engine.plan.spec import Limits, State, Tensor

SHAPE = {"D": 8192, "H": 64, "K": 1, "d": 512, "Hi": 64, "di": 128, "ki": 512, "V": 1}
ROPE = Rope(64, base=160000.0)
EPS = 1e-6
TOKENS = 4  # of a row that the index chooses
WINDOW = 128
LAYERS = 24
CONTEXTS = (8192, 65536)
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16) / 8  # what FP4 has

Timer = Callable[[Plan, Any, int, int], float]


class Given(NamedTuple):
    """What the ops of a plan share."""

    builder: PlanBuilder
    arrays: DeviceArrays
    q: Tensor  # (T, Hi * di)
    weights: Tensor  # (T, Hi)
    pages: int
    ids: list[Tensor]  # what an index has chosen, if one has

    def cache(self, size: int, tokens: int, series: int) -> tuple[State, State]:
        open_pages, rows = Pages(1, WINDOW, 1), Pages(0, 0, self.pages)
        return self.builder.compressed_cache("cache", size, tokens, series, open_pages, rows, lib.APU_F16)

    def constant(self, name: str, *shape: int) -> Tensor:
        ref = self.arrays.add(f"{name}{self.builder.layer}", np.ones(shape, np.float32))
        return self.builder.weight(ref, " ".join(map(str, shape)))


class Measured(NamedTuple):
    kernel: str
    shape: str
    seconds: float
    nbytes: int


def sparse_ops(device: Device, timed: Timer, contexts: Sequence[int]) -> list[Measured]:
    size, heads = SHAPE["d"], SHAPE["H"]
    out = []
    for context in contexts:
        nbytes = context // TOKENS * SHAPE["di"] * 2
        out.append(Measured("index", f"1 x {context}", time_op(device, timed, context, add_index), nbytes))
    seconds = time_op(device, timed, contexts[0], add_store)
    out.append(Measured("store", f"{heads} x {size}", seconds, heads * size * 4))
    for d, tokens, series in ((size, 4, 2), (SHAPE["di"], 4, 2), (size, 128, 1)):

        def add(given: Given, d: int = d, tokens: int = tokens, series: int = series) -> None:
            add_compress(given, d, tokens, series)

        seconds = time_op(device, timed, contexts[0], add)
        out.append(Measured("compress", f"{tokens * series} x {d}", seconds, tokens * series * d * 8))
    for context in contexts:
        for tokens, most in ((TOKENS, SHAPE["ki"]), (PAGE_TOKENS, context)):

            def attend(given: Given, tokens: int = tokens) -> None:
                add_attention(given, tokens)

            rows = WINDOW + min(context // tokens, most)
            seconds = time_op(device, timed, context, attend)
            out.append(Measured("attend", f"{heads} x {rows}", seconds, rows * size * 2))
    return out


def add_index(given: Given) -> Tensor:
    rows = given.cache(SHAPE["di"], TOKENS, 2)[1]
    return given.builder.index(given.q, given.weights, ROPE, rows, scale=8192**-0.5, rounding=lib.APU_ROUND_FP4)


def add_store(given: Given) -> None:
    b = given.builder
    cache = b.shared_cache(Pages(0, WINDOW, given.pages), lib.APU_F16)
    q, kv, norm = b.scratch("heads", "T H*d"), b.scratch("kv", "T d"), given.constant("norm", SHAPE["d"])
    b.shared_store(q, kv, ROPE, cache, norm=norm, eps=EPS, rounding=lib.APU_ROUND_E4M3)


def add_compress(given: Given, size: int, tokens: int, series: int) -> None:
    b, width = given.builder, series * size
    b.compress(
        b.scratch("values", f"T {width}"),
        b.scratch("gate", f"T {width}"),
        ROPE,
        given.cache(size, tokens, series),
        offset=given.constant("ape", tokens, width),
        norm=given.constant("norm", size),
        eps=EPS,
        rounding=lib.APU_ROUND_FP4 if size == SHAPE["di"] else lib.APU_ROUND_E4M3,
    )


def add_attention(given: Given, tokens: int) -> None:
    """Over the window and rows of so many tokens: what an index chooses, which all layers share, or all."""
    b = given.builder
    if tokens == TOKENS and b.layer == 0:
        given.ids.append(add_index(given))
    window = b.shared_cache(Pages(1, WINDOW, 1), lib.APU_F16)
    rows = given.cache(SHAPE["d"], tokens, 2 if given.ids else 1)[1]
    ids = given.ids[0] if given.ids else None
    b.sparse_attention(b.scratch("heads", "T H*d"), ids, ROPE, (window, rows), scale=SHAPE["d"] ** -0.5, sinks=None)


def time_op(device: Device, timed: Timer, context: int, add: Callable[[Given], Any]) -> float:
    """Seconds of one op for the last row of a context, which ends its tokens."""
    draw = np.random.default_rng(1)
    pages = -(-context // PAGE_TOKENS)
    with DeviceArrays(device) as arrays:
        b = PlanBuilder(arrays, Limits(1, 1, 1, context, 1), SHAPE)
        table, mix = (
            b.weight(arrays.add(name, draw.standard_normal(b.shape(letters)).astype(np.float32)), letters)
            for name, letters in (("table", "V D"), ("mix", "Hi D"))
        )
        q = b.embed(table)
        given = Given(b, arrays, q, b.matmul(["weights"], q, [mix])[0], pages, [])
        for b.layer in range(LAYERS):
            add(given)
        b.layer = -1
        b.sample(b.matmul(["logits"], b.gather_norm(q, given.constant("norm", SHAPE["D"]), EPS), [table])[0])
        with planned(device, b) as plan:
            nbytes = sum(state.page_bytes for state in plan.spec.states if state.group == 0)
            for page in range(pages):
                plan.import_page(0, page, LEVELS[draw.integers(0, 16, nbytes // 2)].tobytes())
            near = np.full(pages, NO_PAGE, np.uint32)
            near[-1] = 0
            step = plan.new_step()
            tables = np.stack([np.arange(pages, dtype=np.uint32), near])
            step.add_sequence([0], context - 1, list(tables[: plan.spec.group_count]))
            first = 2 + len(given.ids)
            timed(plan, step, 0, first)
            few, many = LAYERS // 2, LAYERS
            return (timed(plan, step, first, first + many) - timed(plan, step, first, first + few)) / (many - few)
