"""The GPU's attention kernels through the shim against a float64 softmax; bits that do not depend on company."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from kv_pages import F16, F32, Q8_0, ROWS, SPAN, Span, make_step, pack, state_args
from numpy.typing import NDArray
from shim import Shim

PAGES = 30
LATENT_SPANS = ("latent_span16", "latent_span64")
LATENT_TILES = (*LATENT_SPANS, "latent_rows16", "latent_rows64")
NAMES = {F32: "f32", F16: "f16", Q8_0: "q8_0"}


@lru_cache
def shim_of(file: str, wave: int, reverse: bool) -> Shim:
    """One of wave 32 has bulk copies."""
    return Shim([file], wave, reverse, ["APU_SHIM_ASYNC"] if wave == 32 else [])


@dataclass
class Case:
    """Random pages and queries; row r of the step has query r % 64."""

    dtype: int
    heads: int = 4
    kv_heads: int = 2
    d: int = 32
    dv: int = 0
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    # "span", "rows": kernels on tiles; "latent": keys that begin with the values; "latent_span16" and alike on tiles
    kind: str = "fma"
    wave: int = 32
    reverse: bool = False
    slots: int = 4096
    grid: int = 20
    span_rows: int = 128
    most_spans: int = 7

    def __post_init__(self) -> None:
        self.latent = self.kind.startswith("latent")
        if self.latent:
            self.kv_heads, self.dv = 1, min(self.dv or self.d, self.d)
        elif self.dtype == Q8_0 and self.kind != "fma":
            self.d = max(self.d, 64)  # less goes through FMA
        self.dv = self.dv or self.d
        rng = np.random.default_rng(self.d + self.heads)
        self.group = self.heads // self.kv_heads
        self.q = rng.standard_normal((64, self.heads, self.d)).astype(np.float32) * 2
        shape = (PAGES, self.kv_heads, ROWS)
        self.k_bytes, self.k = pack(rng.standard_normal((*shape, self.d)).astype(np.float32), self.dtype, False)
        if self.latent:
            self.v_bytes, self.v = self.k_bytes, self.k[..., : self.dv]
        else:
            self.v_bytes, self.v = pack(rng.standard_normal((*shape, self.dv)).astype(np.float32), self.dtype, True)
        self.sink = rng.standard_normal(self.heads).astype(np.float32) if self.sinks else None
        self.scale = self.d**-0.5
        latent = "latent_attention.hip" if self.kind == "latent" else "latent_tiles.hip"
        file = "attention.hip" if self.kind == "fma" else latent if self.latent else "attention_tile.hip"
        self.shim = shim_of(file, self.wave, self.reverse)

    @property
    def kernel(self) -> str:
        if self.kind == "latent":
            return f"latent_attention_{'f32' if self.dtype == F32 and self.d % 8 == 0 else 'any'}"
        if self.latent:
            return f"latent_tiles_{NAMES[self.dtype]}_{self.kind[-2:]}"
        if self.kind == "fma":
            return "attention_f32" if self.dtype == F32 else "attention_any"
        exact = self.d == self.dv == self.most and (self.dtype == F16 or self.most <= 128)
        return f"attention_{self.kind}_{NAMES[self.dtype]}_{'' if exact else 'to_'}{self.most}"

    @property
    def most(self) -> int:
        return 64 if self.d == self.dv == 64 else 128 if max(self.d, self.dv) <= 128 else 256

    @property
    def threads(self) -> int:
        return 128 if self.kind == "span" else 8 * self.wave if self.kind in LATENT_TILES else 256

    def sizes(self) -> tuple[int, int]:
        """Vectors of a chunk, bytes of LDS."""
        if self.kind == "fma":
            return 8, 4 * (8 * (self.d + self.dv + ROWS + 3) + 1)
        if self.kind == "latent":
            return 8, 4 * (4 + 8 * (self.d + self.dv + ROWS + 3))
        if self.latent:
            vectors = int(self.kind[-2:])
            rows = 32 if vectors == 16 else 64
            ring = self.wave == 32 and self.dtype == F16
            lines = vectors + rows * (2 if ring else 1)
            scores = 1024 * max(0, 8 - rows * vectors // 256)
            return vectors, 1168 * lines + scores + (16 if ring else 16 * rows) + vectors * (rows // 4 + 4)
        waves = self.threads // self.wave
        stride = self.most // 32 % 2 * self.most or self.most + 32
        if self.kind == "rows":
            groups = waves // (2 if self.most > 128 else 1)
            return 16 * groups, 2 * groups * 16 * stride
        shares = waves // (2 if self.most > 128 else 1)
        halves = {(F16, 64): 3, (F16, 128): 3, (Q8_0, 64): 4, (Q8_0, 128): 2, (Q8_0, 256): 2}  # of a ring
        ring = halves.get((self.dtype, self.most), 0) if self.wave == 32 else 0
        front = max(waves * ring * (64 if self.dtype == F16 else 34) * self.most, 4 * 16 * shares * (self.most + 4))
        return 16, front + 2 * 16 * stride + 8 * 16 * shares + 16 + 8 * waves * ring

    def run(self, spans: list[Span], unwritten: float | None = None) -> NDArray[np.float32]:
        """(T, H, dv); positions behind the last row of each sequence hold `unwritten`, if given."""
        shim, rows = self.shim, sum(s.count for s in spans)
        shim.clear()
        vectors, lds = self.sizes()
        chunk_heads = min(self.group, vectors)
        chunk_rows = 1 if self.kind in LATENT_SPANS else vectors // chunk_heads
        chunks = -(-self.group // chunk_heads)
        k_bytes, v_bytes = self.k_bytes, self.v_bytes
        if unwritten is not None:
            k_bytes, v_bytes = self._with_unwritten(spans, unwritten)
        slot_floats = -(-(vectors if self.latent else chunk_rows * chunk_heads) * (self.dv + 2) // 32) * 32
        counters = shim.input(np.zeros(rows * self.kv_heads * chunks, np.uint32), readonly=False)
        out = shim.output((rows, self.heads, self.dv), np.float32)
        args = shim.args(
            "AttentionArgs",
            step=make_step(shim, spans, rows_bucket=rows + 3, window=self.window),
            k_state=self._state(k_bytes, self.d),
            v_state=self._state(v_bytes, self.dv),
            q=shim.input(self.q[np.arange(rows) % 64]),
            sinks=0 if self.sink is None else shim.input(self.sink),
            out=out,
            scale=self.scale,
            cap=self.cap,
            heads=self.heads,
            group=self.group,
            chunk_rows=chunk_rows,
            chunk_heads=chunk_heads,
            row_factor=65536 // chunk_heads + 1 if chunk_rows > 1 else 0,
            head_chunks=chunks,
            max_sequences=len(spans),
            min_rows=1,
            max_rows=1 << 20,
            parts=shim.output((max(self.slots, 1), slot_floats), np.float32, align=128),
            slots=0 if self.kind == "rows" or (self.latent and self.kind != "latent") else self.slots,
            slot_floats=slot_floats,
            counters=counters,
            vectors=vectors,
            span_rows=self.span_rows,
            most_spans=self.most_spans,
        )
        if self.kind in LATENT_SPANS:
            args.spans, together = self.most_spans, min(rows, self.slots // (self.most_spans * chunks))
            for args.first in range(0, rows, together):
                shim.launch(self.kernel, (together * args.spans, chunks), self.threads, args, lds)
                shim.launch("latent_combine", (together * chunk_heads, chunks), 512, args)
        elif self.kind in LATENT_TILES:
            shim.launch(self.kernel, (rows // chunk_rows + len(spans), chunks), self.threads, args, lds)
        else:
            shim.launch(self.kernel, (self.grid, self.kv_heads * chunks), self.threads, args, lds)
        assert not counters.array.any()
        result: NDArray[np.float32] = out.array.copy()
        return result

    def _state(self, pages: NDArray[np.uint8], d: int) -> Any:
        buffer = self.shim.input(pages, align=16)
        return state_args(self.shim, buffer, pages.shape[1], self.kv_heads, d, self.dtype, self.window)

    def _with_unwritten(self, spans: list[Span], value: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        written = np.zeros((PAGES, 1, ROWS, 1), bool)
        for span in spans:
            at = np.arange(span.position + span.count)
            written[np.array(span.table)[at // ROWS], :, at % ROWS] = True
        k, v = (np.where(written, x, value).astype(np.float32) for x in (self.k, self.v))
        with np.errstate(invalid="ignore"):
            k_bytes = pack(k, self.dtype, False)[0]
            return k_bytes, k_bytes if self.latent else pack(v, self.dtype, True)[0]

    def expected(self, row: int, span: Span, position: int) -> NDArray[np.float64]:
        """(H, dv) of the row at `position`."""
        first = max(0, position - self.window + 1) if self.window else 0
        at = np.arange(first, position + 1)
        pages, offsets = np.array(span.table)[at // ROWS], at % ROWS
        k, v = self.k[pages, :, offsets], self.v[pages, :, offsets]  # (S, K, d)
        q = self.q[row % 64].reshape(self.kv_heads, self.group, self.d).astype(np.float64)
        s = np.einsum("kgd,skd->kgs", q, k).reshape(self.heads, -1) * self.scale
        s = self.cap * np.tanh(s / self.cap) if self.cap else s
        sink = np.full((self.heads, 1), -np.inf) if self.sink is None else self.sink[:, None].astype(np.float64)
        top = np.maximum(s.max(1, keepdims=True), sink)
        e = np.exp(s - top)
        p = (e / (e.sum(1, keepdims=True) + np.exp(sink - top))).reshape(self.kv_heads, self.group, -1)
        result: NDArray[np.float64] = np.einsum("kgs,skd->kgd", p, v).reshape(self.heads, self.dv)
        return result

    def check(self, spans: list[Span], **options: Any) -> None:
        found, row = self.run(spans, **options), 0
        for span in spans:
            for i in range(span.count):
                expected = self.expected(row, span, span.position + i)
                # Tiles: queries, exponentials and values of Q8_0 are rounded to halves; scores reach 15, values 4.
                bound = 1e-5 if self.kind in FMA else 6e-3
                np.testing.assert_allclose(found[row], expected, atol=bound, err_msg=f"row {row}, {span}")
                row += 1


TABLE = np.random.default_rng(1).permutation(PAGES).tolist()
A, B, C = TABLE[:17], TABLE[17:23], TABLE[23:]
SMALL = [Span(0, 1, B), Span(1300, 3, A), Span(255, 1, C)]
SHIMS = pytest.mark.parametrize("wave,reverse", [(32, False), (64, True)], ids=["w32", "w64r"])
FMA = ("fma", "latent")
KINDS = pytest.mark.parametrize(
    "dtype,kind",
    [(t, kind) for t in (F32, F16, Q8_0) for kind in ("fma", "latent", "span", "rows") if t != F32 or kind in FMA],
    ids=lambda x: NAMES[x] if isinstance(x, int) else x,
)


@SHIMS
@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 8, "kv_heads": 8, "d": 64},
        {"heads": 8, "kv_heads": 1, "d": 64, "dv": 96},
        {"heads": 9, "kv_heads": 3, "d": 64, "window": 100},
        {"heads": 14, "kv_heads": 2, "d": 128, "window": 600},
        {"heads": 4, "kv_heads": 1, "d": 256, "cap": 1.5},
        {"heads": 20, "kv_heads": 1, "d": 32, "sinks": True},
        {"sinks": True, "window": 64, "cap": 3.0},
    ],
    ids=str,
)
def test_against_naive(dtype: int, kind: str, options: dict[str, Any], wave: int, reverse: bool) -> None:
    Case(dtype, kind=kind, wave=wave, reverse=reverse, **options).check(SMALL)


@SHIMS
@pytest.mark.parametrize("kind", ["fma", "span", "rows"])
@pytest.mark.parametrize("d,dv", [(80, 80), (96, 112), (32, 16), (40, 48)])
def test_odd_heads_of_f16(kind: str, d: int, dv: int, wave: int, reverse: bool) -> None:
    Case(F16, d=d, dv=dv, kind=kind, wave=wave, reverse=reverse).check(SMALL, unwritten=np.nan)


@SHIMS
@pytest.mark.parametrize("dtype,d,dv", [(F32, 20, 7), (F16, 20, 7), (F16, 8, 24), (F16, 320, 300), (Q8_0, 288, 320)])
def test_heads_beyond_tiles(dtype: int, d: int, dv: int, wave: int, reverse: bool) -> None:
    Case(dtype, d=d, dv=dv, wave=wave, reverse=reverse).check(SMALL, unwritten=np.nan)


LATENT = pytest.mark.parametrize(
    "kind,wave,reverse",
    [
        (kind, *shim)
        for kind in LATENT_TILES
        for shim in ((32, False), (32, True), (64, True))
        if kind[-1] == "6" or shim[0] == 32
    ],
)


@LATENT
@pytest.mark.parametrize(
    "dtype,options",
    [
        (F16, {"heads": 16, "d": 576, "dv": 512}),
        (Q8_0, {"heads": 16, "d": 576, "dv": 512}),
        (F16, {"heads": 70, "d": 96, "dv": 64, "sinks": True, "window": 300}),
        (Q8_0, {"heads": 9, "d": 64, "dv": 16, "cap": 1.5}),
        (F16, {"heads": 3, "d": 16, "window": 70}),
    ],
    ids=str,
)
def test_latent_tiles(dtype: int, options: dict[str, Any], kind: str, wave: int, reverse: bool) -> None:
    Case(dtype, kind=kind, wave=wave, reverse=reverse, **options).check(SMALL, unwritten=np.nan)


@LATENT
def test_latent_tiles_of_many_rows(kind: str, wave: int, reverse: bool) -> None:
    case = Case(F16, kind=kind, heads=10, d=32, wave=wave, reverse=reverse, window=200, slots=40)
    case.check([Span(450, 40, A), Span(3, 2, B), Span(0, 33, C)], unwritten=np.nan)


@LATENT
def test_latent_bits_do_not_depend_on_company(kind: str, wave: int, reverse: bool) -> None:
    case = Case(F16, kind=kind, heads=10, d=96, dv=64, wave=wave, reverse=reverse, sinks=True)
    alone = case.run([Span(1290, 1, A)])[0]
    case.q = np.roll(case.q, 2, 0)
    assert np.array_equal(alone, case.run([Span(700, 2, B), Span(1290, 1, A), Span(77, 1, C)])[2])
    assert np.array_equal(alone, case.run([Span(1288, 3, A)])[2])
    case.slots = 7
    assert np.array_equal(alone, case.run([Span(1288, 3, A), Span(5, 4, B)])[2])


@SHIMS
@pytest.mark.parametrize("dtype,d,dv", [(F32, 20, 7), (F16, 21, 21), (F16, 584, 520), (Q8_0, 96, 65)])
def test_latent_rows(dtype: int, d: int, dv: int, wave: int, reverse: bool) -> None:
    for heads in (1, 3, 16):
        Case(dtype, kind="latent", heads=heads, d=d, dv=dv, wave=wave, reverse=reverse).check(SMALL, unwritten=np.nan)


@SHIMS
@KINDS
def test_boundaries(dtype: int, kind: str, wave: int, reverse: bool) -> None:
    """Contexts that end at and around tiles, pages and spans; what lies behind them is not a number."""
    case = Case(dtype, kind=kind, d=64, wave=wave, reverse=reverse)
    for position in (
        0,
        30,
        31,
        32,
        ROWS - 1,
        ROWS,
        SPAN // 4 - 1,
        SPAN // 4,
        SPAN - 1,
        SPAN,
        SPAN + 31,
        2 * SPAN - 1,
        2 * SPAN,
    ):
        case.check([Span(position, 1, A)], unwritten=np.nan)


@SHIMS
@KINDS
def test_many_rows(dtype: int, kind: str, wave: int, reverse: bool) -> None:
    case = Case(dtype, kind=kind, d=32, wave=wave, reverse=reverse, window=200)
    case.check([Span(450, 70, A), Span(3, 2, B), Span(0, 33, C)], unwritten=np.nan)


@SHIMS
@KINDS
def test_bits_do_not_depend_on_company(dtype: int, kind: str, wave: int, reverse: bool) -> None:
    """A row alone, beside other sequences, after other rows of its own, and where parts have no room."""
    options: dict[str, Any] = {"kind": kind, "wave": wave, "reverse": reverse, "d": 64, "sinks": True}
    for window in (0, 500):
        case = Case(dtype, window=window, **options)
        alone = case.run([Span(1290, 1, A)])[0]
        case.q = np.roll(case.q, 2, 0)  # the same query in row 2
        among = case.run([Span(700, 2, B), Span(1290, 1, A), Span(77, 1, C)])[2]
        assert np.array_equal(alone, among)
        assert np.array_equal(alone, case.run([Span(1288, 3, A)])[2])
        if kind != "rows":
            case.slots, case.grid = 7, 2
            assert np.array_equal(alone, case.run([Span(700, 2, B), Span(1290, 1, A), Span(77, 1, C)])[2])


@SHIMS
@KINDS
def test_more_sequences_than_lanes(dtype: int, kind: str, wave: int, reverse: bool) -> None:
    case = Case(dtype, kind=kind, wave=wave, reverse=reverse, grid=7)
    case.check([Span((37 * i) % 600, 1, TABLE[i % 20 : i % 20 + 5]) for i in range(70)])
