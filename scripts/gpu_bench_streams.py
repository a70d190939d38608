"""Part of gpu_bench.py: what a layer of DeepSeek V4 Flash does between its blocks and before its experts, one row and
many: hyper-connections, closing a block and opening the next, and routing.

A time is the difference between plans of many layers and of few, each with a matrix of its own, so that no cache of
what they read helps and nothing around the ops counts. Bytes of one row are those of the matrix; of many rows those of
the streams too, as often as kernels read and write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from device_plans import DeviceArrays, planned
from gpu_bench_sparse import Measured, Timer
from numpy.typing import NDArray

from apu_engine._native import Device
from apu_engine.plan.builder import PlanBuilder
from apu_engine.plan.operands import Streams
from apu_engine.plan.spec import Limits, Tensor

SHAPE = {"D": 4096, "S": 4, "E": 256, "k": 6, "V": 1}
STREAMS = Streams(4, 20, 1e-6)
EPS = 1e-6
LAYERS = 200  # 150 MiB of matrices of streams
ROWS = (1, 512)


def stream_ops(device: Device, timed: Timer, rows: Sequence[int]) -> list[Measured]:
    d, s, out = SHAPE["D"], SHAPE["S"], []
    matrix, router = s * (s + 2) * s * d * 2, SHAPE["E"] * d * 2
    streams = s * d * 4
    for count in rows:
        times = "" if count == 1 else f"{count} x "
        many = 0 if count == 1 else count
        seconds = time_layers(device, timed, count, add_opening, 1)
        shape = f"{times}{s * (s + 2)}x{s * d}"
        out.append(Measured("open", shape, seconds, matrix + many * (2 * streams + d * 4)))
        seconds = time_layers(device, timed, count, add_block, 2)
        out.append(Measured("close+open", shape, seconds, matrix + many * (4 * streams + 2 * d * 4)))
        seconds = time_layers(device, timed, count, add_route, 1)
        out.append(Measured("route", f"{times}{SHAPE['E']}x{d}", seconds, router + many * d * 4))
    return out


@cache
def random(shape: tuple[int, ...]) -> NDArray[np.float16]:
    return (np.random.default_rng(1).standard_normal(shape) * 0.01).astype(np.float16)


def half(b: PlanBuilder, arrays: DeviceArrays, name: str, letters: str) -> Tensor:
    return b.weight(arrays.add(f"{name}{b.layer}", random(b.shape(letters))), letters)


def ones(b: PlanBuilder, arrays: DeviceArrays, name: str, size: int) -> Tensor:
    return b.weight(arrays.add(f"{name}{b.layer}", np.ones(size, np.float32)), str(size))


def add_opening(b: PlanBuilder, arrays: DeviceArrays, x: Tensor) -> tuple[Tensor, Tensor]:
    n = SHAPE["S"] * (SHAPE["S"] + 2)
    matrix = half(b, arrays, "fn", f"{n} S*D")
    scale, offset = ones(b, arrays, "scale", 3), ones(b, arrays, "offset", n)
    return b.streams_in("in", x, matrix, scale, offset, STREAMS, EPS)


def add_block(b: PlanBuilder, arrays: DeviceArrays, x: Tensor) -> None:
    made, mix = add_opening(b, arrays, x)
    b.streams_out(x, made, mix, STREAMS)


def add_route(b: PlanBuilder, arrays: DeviceArrays, x: Tensor) -> None:
    b.route(b.scratch("rows", "T D"), half(b, arrays, "router", "E D"), score="sqrt_softplus", scale=1.5)


def time_layers(device: Device, timed: Timer, rows: int, add: Any, ops: int) -> float:
    """Seconds of the `ops` that `add` makes of a layer."""
    with DeviceArrays(device) as arrays:
        b = PlanBuilder(arrays, Limits(rows, 1, 1, rows, 1), SHAPE)
        table = b.weight(arrays.add("table", np.ones((1, SHAPE["D"]), np.float32)), "V D")
        x = b.embed(table, copies=SHAPE["S"])
        for b.layer in range(LAYERS):
            add(b, arrays, x)
        b.layer = -1
        hidden = b.gather_norm(b.scratch("last", "T D"), ones(b, arrays, "norm", SHAPE["D"]), EPS)
        b.sample(b.matmul(["logits"], hidden, [table])[0])
        with planned(device, b) as plan:
            step = plan.new_step()
            step.add_sequence([0] * rows, 0, [])
            timed(plan, step, 0, 1)
            few, many = LAYERS // 4, LAYERS
            return (timed(plan, step, 1, 1 + many * ops) - timed(plan, step, 1, 1 + few * ops)) / (many - few)
