"""Pages of KV as the GPU lays them out (native/gpu/kernels/attention_args.h), in numpy; steps for kernels alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shim import Shim

F32, F16, Q8_0 = 0, 1, 8
NO_PAGE = 0xFFFFFFFF
ROWS = 128  # of a page
SPAN = 1024  # kSpan


def quantize(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Q8_0 of the last axis: quants like x, scales (..., d/32)."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(np.float32)
    scales = (np.abs(blocks).max(-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
    return np.rint(np.clip(blocks * inverse, -127, 127)).astype(np.int8).reshape(x.shape), scales


def pack(x: NDArray[np.float32], dtype: int, values: bool) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """x (pages, heads, 128, d) as (pages, bytes), and what it stands for."""
    pages, heads = x.shape[:2]
    flat = (pages, heads, -1)

    def tiles(a: NDArray[Any]) -> NDArray[Any]:  # (pages, heads, 4, d, 32)
        tiled: NDArray[Any] = a.reshape(pages, heads, 4, 32, a.shape[-1])
        return np.swapaxes(tiled, -1, -2)

    parts: list[NDArray[Any]]
    real: NDArray[np.float64]
    if dtype == F32:
        parts, real = [x.astype(np.float32)], x.astype(np.float64)
    elif dtype == F16:
        half = x.astype(np.float16)
        parts, real = [tiles(half) if values else half], half.astype(np.float64)
    else:
        q, scales = quantize(x)
        real = q.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, -1)
        biased = q.view(np.uint8) ^ np.uint8(128)
        sides = [tiles(biased), tiles(scales)] if values else [biased, scales]
        sides = [np.ascontiguousarray(a).reshape(pages, heads, 4, -1).view(np.uint8) for a in sides]
        parts = [np.concatenate(sides, -1)]
    data = [np.ascontiguousarray(p).reshape(flat).view(np.uint8) for p in parts]
    return np.concatenate(data, -1).reshape(pages, -1), real


def unpack(pages: NDArray[np.uint8], heads: int, d: int, dtype: int, values: bool) -> NDArray[np.float64]:
    """The inverse of pack: (pages, heads, 128, d)."""
    parts = pages.reshape(len(pages), heads, -1)

    def rows(a: NDArray[Any], n: int) -> NDArray[Any]:
        if not values or dtype == F32:
            return a.reshape(len(pages), heads, ROWS, n)
        tiled: NDArray[Any] = a.reshape(len(pages), heads, 4, n, 32)
        untiled: NDArray[Any] = tiled.swapaxes(-1, -2)
        return untiled.reshape(len(pages), heads, ROWS, n)

    if dtype != Q8_0:
        return rows(np.ascontiguousarray(parts).view(np.float32 if dtype == F32 else np.float16), d).astype(np.float64)
    of_tiles = parts.reshape(len(pages), heads, 4, -1)
    q = np.ascontiguousarray(of_tiles[..., : 32 * d] ^ np.uint8(128)).view(np.int8)
    scales = np.ascontiguousarray(of_tiles[..., 32 * d :]).view(np.float16)
    real: NDArray[np.float64] = rows(q, d) * np.repeat(rows(scales, d // 32).astype(np.float64), 32, -1)
    return real


@dataclass
class Span:
    """Rows of one sequence in a step: `count` from `position` on; `table` holds its pages."""

    position: int
    count: int
    table: list[int]


def make_step(shim: Shim, spans: list[Span], rows_bucket: int | None = None, window: int = 0) -> Any:
    """A StepView of one group; pages that no row sees become NO_PAGE, rows behind the last are poison."""
    rows: list[Any] = []
    pages: list[int] = []
    sequences, slots = [], []
    for s, span in enumerate(spans):
        sequences.append(shim.args("Sequence", row_begin=len(rows), row_count=span.count))
        slots.append(shim.args("Slot", page_begin=len(pages), page_count=len(span.table)))
        lowest = max(0, span.position - window + 1) if window else 0
        last = (span.position + span.count - 1) // ROWS
        pages += [p if lowest // ROWS <= i <= last else NO_PAGE for i, p in enumerate(span.table)]
        for i in range(span.count):
            rows.append(shim.args("Row", token=0, position=span.position + i, sequence=s))
    counts = shim.args("StepCounts", rows=len(rows), sequences=len(spans), outputs=0, pages=len(pages))
    size = ctypes.sizeof(rows[0])
    behind = b"\xff" * size * max(0, (rows_bucket or 0) - len(rows))
    return shim.args(
        "StepView",
        counts=shim.input(counts),
        rows=shim.input(b"".join(bytes(r) for r in rows) + behind),
        sequences=shim.input(sequences),
        slots=shim.input(slots),
        pages=shim.input(np.array(pages, np.uint32)),
        groups=1,
    )


def state_args(shim: Shim, address: Any, page_bytes: int, heads: int, d: int, dtype: int, window: int = 0) -> Any:
    """A PagedState."""
    return shim.args(
        "PagedState",
        address=address,
        page_bytes=page_bytes,
        head_bytes=page_bytes // heads,
        heads=heads,
        head_size=d,
        dtype=dtype,
        window=window,
        group=0,
    )
