"""Attention over a window and compressed rows through the shim, against a float64 softmax; its spans; its bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from kv_pages import F16, F32, ROWS, Span, make_step
from numpy.typing import NDArray
from shim import Shim

VECTORS, BATCH, SPANS = 8, 128, 32  # spans are multiples of 64 rows
SHIMS = pytest.mark.parametrize("wave,reverse", [(32, False), (32, True), (64, True)], ids=["w32", "w32r", "w64r"])


@lru_cache
def shim_of(wave: int, reverse: bool) -> Shim:
    """Copies of wave 32 reversed run in the background."""
    staged = ["APU_SHIM_STAGED"] if wave == 32 and reverse else []
    return Shim(["sparse_attention.hip", "sparse_attention_tile.hip"], wave, reverse, staged)


@dataclass
class Case:
    """Random rows; a compressed row for each `tokens` tokens, `chosen` of them, or all; row r has query r % 16."""

    dtype: int = F32
    heads: int = 11
    d: int = 32
    pairs: int = 4
    window: int = ROWS
    tokens: int = 4  # 0: the window alone
    chosen: int = 0
    sinks: bool = True
    halves: bool = False
    pages: int = 12
    wave: int = 32
    reverse: bool = False
    near: NDArray[Any] = field(init=False)  # (pages, 128, d)
    far: NDArray[Any] = field(init=False)  # (pages, 128 / tokens, d)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.d + self.heads)
        kind = np.float32 if self.dtype == F32 else np.float16
        self.q = rng.standard_normal((16, self.heads, self.d)).astype(np.float32) * 2
        self.near = rng.standard_normal((min(self.pages, 12), ROWS, self.d)).astype(kind)
        self.far = rng.standard_normal((self.pages, ROWS // self.tokens if self.tokens else 1, self.d)).astype(kind)
        self.sink = rng.standard_normal(self.heads).astype(np.float32)
        self.scale = self.d**-0.5
        self.turns = 0.5 ** np.arange(self.pairs)
        self.shim = shim_of(self.wave, self.reverse)

    @property
    def tiles(self) -> bool:
        return self.dtype == F16 and self.d % 16 == 0

    def near_table(self, span: Span) -> list[int]:
        return [page % len(self.near) for page in span.table]

    def ids(self, spans: list[Span]) -> NDArray[np.int32]:
        """(T, chosen) ascending, then -1; of a row by its position alone."""
        out = []
        for span in spans:
            for position in range(span.position, span.position + span.count):
                seen = (position + 1) // self.tokens
                draw = np.random.default_rng(position).permutation(seen)[: self.chosen]
                out.append([*np.sort(draw), *[-1] * (self.chosen - len(draw))])
        return np.array(out, np.int32)

    def run(self, spans: list[Span], cut: bool, blocks: int = SPANS) -> NDArray[np.float32]:
        """(T, H, d); `cut`: in spans. What no row attends to is not a number."""
        shim, rows = self.shim, sum(s.count for s in spans)
        shim.clear()
        vectors = 32 if self.tiles else min(self.heads, VECTORS)
        chunks = -(-self.heads // vectors)
        out = shim.output((rows, self.heads, self.d), np.float32)
        step = make_step(shim, spans, rows_bucket=rows + 3)
        # group 0: the window; group 1: the same tables, whole
        tables = [p for span in spans for p in span.table]
        slots, at = [], 0
        for span in spans:
            lowest = max(0, span.position - self.window + 1) // ROWS if self.window else 0
            last = (span.position + span.count - 1) // ROWS
            near = [p if lowest <= i <= last else 0xFFFFFFFF for i, p in enumerate(self.near_table(span))]
            tables += near
            slots += [shim.args("Slot", page_begin=len(tables) - len(near)), shim.args("Slot", page_begin=at)]
            at += len(span.table)
        step.slots, step.pages, step.groups = (
            shim.input(slots).address,
            shim.input(np.array(tables, np.uint32)).address,
            2,
        )
        near, far = self._only_visible(spans)
        args = shim.args(
            "SparseAttentionArgs",
            step=step,
            window=self._state(near, 0, self.window),
            rows=self._state(far, 1, 0) if self.tokens else shim.args("PagedState"),
            q=shim.input(self.q[np.arange(rows) % 16]),
            ids=shim.input(self.ids(spans)) if self.chosen else 0,
            sinks=shim.input(self.sink) if self.sinks else 0,
            out=out,
            turns=shim.input(self.turns),
            scale=self.scale,
            magnitude=1.0,
            heads=self.heads,
            chunk_heads=vectors,
            chosen=self.chosen,
            pairs=self.pairs,
            halves=int(self.halves),
            spans=blocks if cut else 0,
            parts=shim.output((rows, self.heads, blocks, self.d), np.float32),
            part_ends=shim.output((rows, self.heads, blocks, 2), np.float32),
        )
        if self.tiles:
            shares, buffers = 256 // self.wave // 2, 2 if self.wave == 32 and self.reverse else 1
            lds = buffers * 32 * 520 * 2 + shares * 32 * 36 * 4 + 32 * 40 * 2 + 2 * 256 * 8 + 4 * (96 + 2 * self.pairs)
            kernel = "tile_512" if self.d == 512 else "tile_to_512"
        else:
            lds = 4 * (BATCH * (2 + VECTORS) + vectors * (2 * self.d + 3) + 2 * self.pairs)
            kernel = "f32" if self.dtype == F32 and self.d % 8 == 0 else "any"
        shim.launch(f"sparse_attention_{kernel}", ((rows + 3) * (blocks if cut else 1), chunks), 256, args, lds)
        if cut and blocks > 1:
            lds = 4 * (self.d + 32 + 2 * self.pairs + 4)
            shim.launch("sparse_attention_sum", (rows + 3, self.heads), 128, args, lds)
        found: NDArray[np.float32] = out.array.copy()
        return found

    def _state(self, pages: NDArray[Any], group: int, window: int) -> Any:
        return self.shim.args(
            "PagedState",
            address=self.shim.input(pages),
            page_bytes=pages[0].nbytes,
            head_bytes=pages[0].nbytes,
            heads=1,
            head_size=self.d,
            dtype=self.dtype,
            window=window,
            group=group,
            page_rows=pages.shape[1],
        )

    def _only_visible(self, spans: list[Span]) -> tuple[NDArray[Any], NDArray[Any]]:
        near, far = np.full_like(self.near, np.nan), np.full_like(self.far, np.nan)
        for span in spans:
            end = span.position + span.count
            low = max(0, span.position - self.window + 1) if self.window else 0
            at, table = np.arange(low, end), np.array(self.near_table(span))
            near[table[at // ROWS], at % ROWS] = self.near[table[at // ROWS], at % ROWS]
            table = np.array(span.table)
            if self.tokens:
                per, at = ROWS // self.tokens, np.arange(end // self.tokens)
                far[table[at // per], at % per] = self.far[table[at // per], at % per]
        return near, far

    def expected(self, spans: list[Span]) -> NDArray[np.float64]:
        ids, out, t = self.ids(spans) if self.chosen else None, [], 0
        for span in spans:
            table, near = np.array(span.table), np.array(self.near_table(span))
            for position in range(span.position, span.position + span.count):
                at = np.arange(max(0, position - self.window + 1) if self.window else 0, position + 1)
                c = [self.near[near[at // ROWS], at % ROWS]]
                if self.tokens:
                    per = ROWS // self.tokens
                    far = np.arange((position + 1) // self.tokens) if ids is None else ids[t][ids[t] >= 0]
                    c.append(self.far[table[far // per], far % per])
                rows = np.concatenate(c).astype(np.float64)
                s = self.q[t % 16].astype(np.float64) @ rows.T * self.scale
                sink = self.sink[:, None] if self.sinks else np.full((self.heads, 1), -np.inf)
                top = np.maximum(s.max(1, keepdims=True), sink)
                e = np.exp(s - top)
                o = e @ rows / (e.sum(1, keepdims=True) + np.exp(sink - top))
                angle = -position * self.turns * np.pi / 2
                last = self.d - 2 * self.pairs
                first, second = (
                    (slice(last, last + self.pairs), slice(last + self.pairs, None))
                    if self.halves
                    else (slice(last, None, 2), slice(last + 1, None, 2))
                )
                a, b = o[:, first].copy(), o[:, second].copy()
                o[:, first] = a * np.cos(angle) - b * np.sin(angle)
                o[:, second] = b * np.cos(angle) + a * np.sin(angle)
                out.append(o)
                t += 1
        return np.array(out)

    def check(self, spans: list[Span]) -> None:
        """Tiles: queries and weights are rounded to halves."""
        expected, bound = self.expected(spans), 6e-3 if self.tiles else 1e-5
        for cut in (True, False):
            np.testing.assert_allclose(self.run(spans, cut), expected, atol=bound, err_msg=f"cut {cut}")


TABLE = np.random.default_rng(1).permutation(12).tolist()
A, B, C = TABLE[:8], TABLE[8:10], TABLE[10:]
SMALL = [Span(0, 1, B), Span(900, 3, A), Span(127, 2, C)]


@SHIMS
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 0},
        {"tokens": 128, "sinks": False},
        {"chosen": 150},
        {"chosen": 7, "halves": True, "heads": 8},
        {"heads": 3, "d": 20, "chosen": 40},
        {"heads": 1, "d": 21, "pairs": 1, "window": 300},
        {"window": 0, "heads": 20, "tokens": 64},
        {"d": 512, "pairs": 32, "chosen": 100, "heads": 40},
        {"d": 64, "heads": 64, "chosen": 512},
    ],
    ids=str,
)
def test_against_float64(dtype: int, options: dict[str, Any], wave: int, reverse: bool) -> None:
    Case(dtype, wave=wave, reverse=reverse, **options).check(SMALL)


@SHIMS
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
def test_boundaries_of_batches_and_spans(dtype: int, wave: int, reverse: bool) -> None:
    case = Case(dtype, heads=2, tokens=1, window=64, wave=wave, reverse=reverse)
    for position in (0, 30, 31, 32, 63, 64, 95, 96, 127, 128, 447, 448, 959, 960):
        case.check([Span(position, 1, A)])


@SHIMS
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
def test_a_row_has_the_same_bits_in_company(dtype: int, wave: int, reverse: bool) -> None:
    case = Case(dtype, chosen=30, wave=wave, reverse=reverse)
    for cut in (True, False):
        together = case.run(SMALL, cut)[3]  # of the sequence A
        first = case.q[0].copy()
        case.q[0] = case.q[3]
        assert np.array_equal(case.run([Span(902, 1, A)], cut, blocks=5 if cut else SPANS)[0], together)
        case.q[0] = first


@SHIMS
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
def test_8100_compressed_rows(dtype: int, wave: int, reverse: bool) -> None:
    """Of 128 tokens each: one decode at 1,036,800 tokens, in spans of 320 rows."""
    pages = 8100
    case = Case(dtype, heads=4, d=64, tokens=128, pages=pages, wave=wave, reverse=reverse)
    case.check([Span(pages * ROWS - 1, 1, np.random.default_rng(3).permutation(pages).tolist())])


@SHIMS
@pytest.mark.parametrize("dtype", [F32, F16], ids=["f32", "f16"])
def test_ids_that_are_no_rows_get_no_weight(dtype: int, wave: int, reverse: bool) -> None:
    """What a slice finds that runs before its INDEX."""
    case = Case(dtype, chosen=5, wave=wave, reverse=reverse)
    junk = np.array([[1, 3, 2**31 - 1, -5, 25]], np.int32)  # 25 lies behind the position
    case.ids = lambda spans: junk  # type: ignore[method-assign]
    found = case.run([Span(100, 1, A)], True)
    junk = np.array([[1, 3, -1, -1, -1]], np.int32)
    np.testing.assert_allclose(found, case.expected([Span(100, 1, A)]), atol=6e-3 if case.tiles else 1e-5)
