"""rope_store through the shim: rotation, norms, and what lies in the pages, against numpy in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from kv_pages import F16, F32, Q8_0, ROWS, Span, make_step, pack, state_args, unpack
from numpy.typing import NDArray
from shim import Shim

PAGES = 6
NAMES = {F32: "f32", F16: "f16", Q8_0: "q8_0"}


@lru_cache
def shim_of(wave: int, reverse: bool) -> Shim:
    return Shim(["rope.hip"], wave, reverse)


def rotate(
    x: NDArray[np.float64], positions: NDArray[np.int64], frequency: NDArray[np.float64], halves: bool
) -> NDArray[np.float64]:
    """x (T, heads, d)."""
    angle = positions[:, None] * frequency  # (T, pairs)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    n = len(frequency)
    out: NDArray[np.float64] = x.copy()
    first, second = (slice(0, n), slice(n, 2 * n)) if halves else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def norm(x: NDArray[np.float64], weight: NDArray[np.float32] | None, eps: float) -> NDArray[np.float64]:
    if weight is None:
        return x
    normed: NDArray[np.float64] = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed


@pytest.mark.parametrize("wave,reverse", [(32, False), (32, True), (64, False), (64, True)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": F16, "halves": True, "norms": True},
        {"dtype": Q8_0, "d": 64, "dv": 96, "factors": True, "magnitude": 1.2},
        {"dtype": Q8_0, "d": 128, "heads": 8, "kv_heads": 1, "halves": True, "rotary": 64},
        {"dtype": F16, "d": 20, "dv": 7, "rotary": 10},
        {"d": 256, "rotary": 0, "norms": True},
        {"dtype": F16, "heads": 9, "kv_heads": 3, "d": 64, "positions": 500_000},
    ],
    ids=str,
)
def test_against_numpy(options: dict[str, Any], wave: int, reverse: bool) -> None:
    o: dict[str, Any] = {"dtype": F32, "heads": 4, "kv_heads": 2, "d": 32, "halves": False, "magnitude": 1.0, **options}
    dtype, heads, kv_heads, d = o["dtype"], o["heads"], o["kv_heads"], o["d"]
    dv, pairs = o.get("dv", d), o.get("rotary", d) // 2
    shim, rng = shim_of(wave, reverse), np.random.default_rng(3)
    shim.clear()
    base = o.get("positions", 0)
    spans = [Span(base, 3, []), Span(base + ROWS - 2, 5, []), Span(base + 31, 1, [])]
    free = rng.permutation(PAGES).tolist()
    for s in spans:
        s.table = [free[0]] * (base // ROWS) + [
            free.pop(0) for _ in range(base // ROWS, (s.position + s.count - 1) // ROWS + 1)
        ]
    at = [(s.table[p // ROWS], p) for s in spans for p in range(s.position, s.position + s.count)]
    rows, positions = len(at), np.array([p for _, p in at])
    q, k = (rng.standard_normal((rows, n, d)).astype(np.float32) for n in (heads, kv_heads))
    v = rng.standard_normal((rows, kv_heads, dv)).astype(np.float32)
    weights = [rng.standard_normal(d).astype(np.float32) if o.get("norms") else None for _ in range(2)]
    frequency = 10000.0 ** (-np.arange(pairs) / max(pairs, 1))
    factors = rng.uniform(1, 8, pairs).astype(np.float32) if o.get("factors") else None

    old = [
        pack(rng.standard_normal((PAGES, kv_heads, ROWS, n)).astype(np.float32), dtype, i == 1)
        for i, n in enumerate((d, dv))
    ]
    states = [shim.input(data, readonly=False) for data, _ in old]
    grid = 16  # rows of the bucket; scratch holds as many

    def padded(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.concatenate([x, np.full((grid - rows, *x.shape[1:]), np.nan, np.float32)])

    q_buffer = shim.input(padded(q), readonly=False)

    def maybe(x: NDArray[Any] | None) -> Any:
        return 0 if x is None else shim.input(x)

    args = shim.args(
        "RopeStoreArgs",
        step=make_step(shim, spans, rows_bucket=grid),
        k_state=state_args(shim, states[0], old[0][0].shape[1], kv_heads, d, dtype),
        v_state=state_args(shim, states[1], old[1][0].shape[1], kv_heads, dv, dtype),
        q=q_buffer,
        k=shim.input(padded(k)),
        v=shim.input(padded(v)),
        q_norm=maybe(weights[0]),
        k_norm=maybe(weights[1]),
        turns=maybe(frequency * 2 / np.pi) if pairs else 0,
        factors=maybe(factors),
        eps=1e-6,
        magnitude=o["magnitude"],
        heads=heads,
        pairs=pairs,
        halves=o["halves"],
    )
    waves = 256 // wave
    shim.launch(
        "rope_store", (grid, -(-(heads + 2 * kv_heads) // waves), 1), 256, args, 4 * (2 * pairs + waves * max(d, dv))
    )

    angles = frequency / (1 if factors is None else factors.astype(np.float64))
    expected_q, expected_k = (
        rotate(norm(x.astype(np.float64), w, 1e-6), positions, angles, o["halves"])
        for x, w in zip((q, k), weights, strict=True)
    )
    for x in (expected_q, expected_k):
        x[..., : 2 * pairs] *= o["magnitude"]
    np.testing.assert_allclose(q_buffer.array[:rows], expected_q, atol=2e-6 * 4)
    assert np.isnan(q_buffer.array[rows:]).all()
    pages, offsets = np.array([p for p, _ in at]), positions % ROWS
    for i, (expected, n) in enumerate(((expected_k, d), (v.astype(np.float64), dv))):
        found = unpack(states[i].array, kv_heads, n, dtype, i == 1)
        real = old[i][1].copy()
        real[pages, :, offsets] = expected
        scale = np.abs(expected).max()
        bound = {F32: 2e-6, F16: 2**-11 * 1.01, Q8_0: 0.502 / 127}[dtype] * scale
        np.testing.assert_allclose(found[pages, :, offsets], expected, atol=bound)
        kept = np.ones(found.shape[:3], bool)
        kept[pages, :, offsets] = False
        assert np.array_equal(found[kept], real[kept])


@pytest.mark.parametrize("wave,reverse", [(32, False), (32, True), (64, False), (64, True)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": F16, "halves": True, "heads": 16, "factors": True},
        {"dtype": Q8_0, "d": 96, "rotary": 32, "magnitude": 1.2},
        {"dtype": F16, "d": 42, "rotary": 10, "q_size": 11, "heads": 1},
        {"dtype": Q8_0, "d": 576, "rotary": 64, "q_size": 192, "heads": 7, "base": 40_000},
    ],
    ids=str,
)
def test_latent_rows(options: dict[str, Any], wave: int, reverse: bool) -> None:
    o: dict[str, Any] = {"dtype": F32, "heads": 4, "d": 48, "rotary": 16, "q_size": 40, **options}
    dtype, heads, d, q_size, pairs = o["dtype"], o["heads"], o["d"], o["q_size"], o["rotary"] // 2
    halves, magnitude, base = o.get("halves", False), o.get("magnitude", 1.0), o.get("base", 0)
    rank = d - 2 * pairs
    shim, rng = shim_of(wave, reverse), np.random.default_rng(4)
    shim.clear()
    spans = [Span(base + ROWS - 2, 5, [0] * (base // ROWS) + [4, 1]), Span(base + 31, 1, [0] * (base // ROWS) + [2])]
    at = [(s.table[p // ROWS], p) for s in spans for p in range(s.position, s.position + s.count)]
    rows, grid, positions = len(at), len(at) + 2, np.array([p for _, p in at])
    q = rng.standard_normal((rows, heads, q_size)).astype(np.float32)
    c = rng.standard_normal((rows, d)).astype(np.float32)
    weight = rng.standard_normal(rank).astype(np.float32)
    frequency = 10000.0 ** (-np.arange(pairs) / pairs)
    factors = rng.uniform(1, 8, pairs).astype(np.float32) if o.get("factors") else None
    old, real = pack(rng.standard_normal((PAGES, 1, ROWS, d)).astype(np.float32), dtype, False)
    state = shim.input(old, readonly=False)

    def padded(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.concatenate([x, np.full((grid - rows, *x.shape[1:]), np.nan, np.float32)])

    q_buffer = shim.input(padded(q), readonly=False)
    args = shim.args(
        "RowStoreArgs",
        step=make_step(shim, spans, rows_bucket=grid),
        state=state_args(shim, state, old.shape[1], 1, d, dtype),
        q=q_buffer,
        c=shim.input(padded(c)),
        norm=shim.input(weight),
        turns=shim.input(frequency * 2 / np.pi),
        factors=0 if factors is None else shim.input(factors),
        eps=1e-6,
        magnitude=magnitude,
        heads=heads,
        q_size=q_size,
        pairs=pairs,
        halves=halves,
    )
    shim.launch("latent_store", (grid, heads // (256 // wave) + 1, 1), 256, args, 4 * (2 * pairs + d))

    angles = frequency / (1 if factors is None else factors.astype(np.float64))

    def rotated(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return magnitude * rotate(x, positions, angles, halves)

    expected_q, latent = q.astype(np.float64), c.astype(np.float64)[:, None]
    expected_q[..., q_size - 2 * pairs :] = rotated(expected_q[..., q_size - 2 * pairs :])
    expected = np.concatenate([norm(latent[..., :rank], weight, 1e-6), rotated(latent[..., rank:])], -1)
    np.testing.assert_allclose(q_buffer.array[:rows], expected_q, atol=8e-6)
    assert np.array_equal(q_buffer.array[:rows, :, : q_size - 2 * pairs], q[..., : q_size - 2 * pairs])
    assert np.isnan(q_buffer.array[rows:]).all()
    pages, offsets = np.array([p for p, _ in at]), positions % ROWS
    found = unpack(state.array, 1, d, dtype, False)
    bound = {F32: 2e-6, F16: 2**-11 * 1.01, Q8_0: 0.502 / 127}[dtype] * np.abs(expected).max()
    np.testing.assert_allclose(found[pages, :, offsets], expected, atol=bound)
    kept = np.ones(found.shape[:3], bool)
    kept[pages, :, offsets] = False
    assert np.array_equal(found[kept], real[kept])
