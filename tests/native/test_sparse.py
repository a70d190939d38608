"""Hyper-connections and compressed attention, op by op, against numpy in float64 and torch's own narrow floats; shapes
that once were hard; refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rig import NONE, Plan, Rig, Step, pages, put, refused, rms_norm

from apu_engine._native import NO_PAGE, Device, InvalidError, lib

F64 = NDArray[np.float64]
TOKENS = 64
EPS = 1e-6
PLAIN_ROPE = (EPS, 1e4, 1.0, 0.0, 1.0, 0.0, 0.0)


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_state(
    rig: Rig,
    name: str,
    size: int,
    pages: int,
    per_page: int,
    *,
    window: int = 0,
    group: int = 0,
    dtype: Any = np.float32,
) -> int:
    """A state of one head with `per_page` rows a page; `rig.memory(id)` is (pages, 1, per_page, size)."""
    state = rig.state(name, 1, size, 1, dtype=dtype, window=window, group=group)
    data = np.full((pages, 1, per_page, size), np.nan, dtype)
    rig.keep.append(data)
    rig.states[state] |= {
        "rows_per_page": per_page,
        "address": data.ctypes.data,
        "page_bytes": data[0].nbytes,
        "page_count": pages,
        "data": data,
    }
    return state


def rotated(x: F64, position: int, dims: int, sign: float = 1.0) -> F64:
    """The last `dims` elements in neighbouring pairs."""
    angle = sign * position * 1e4 ** (-np.arange(0, dims, 2) / dims)
    pairs = x[..., -dims:].reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    turned = np.stack((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), -1)
    return np.concatenate([x[..., :-dims], turned.reshape(*x.shape[:-1], dims)], -1)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize(
    ("S", "D", "kind"), [(4, 96, np.float32), (4, 530, np.float16), (2, 33, np.float32), (1, 8, np.float32)]
)
def test_streams(isa: str, S: int, D: int, kind: Any) -> None:
    rig = Rig(rows=40, vocabulary=TOKENS)
    x, made = random(TOKENS, S * D), random(TOKENS, D, seed=2)
    fn = (random(S * (S + 2), S * D, seed=3) * (S * D) ** -0.5).astype(kind)
    scale, offset = random(3, seed=4), random(S * (S + 2), seed=5)
    given, block = rig.input(x, "x"), rig.input(made, "made")
    out, mix = rig.scratch("out", D), rig.scratch("mix", S + S * S)
    w = [rig.weight(name, data) for name, data in (("fn", fn), ("scale", scale), ("offset", offset))]
    rig.op(lib.APU_OP_STREAMS_IN, ins=(given,), outs=(out, mix), weights=w, ints=(S, 20), floats=(EPS, 1e-6))
    rig.op(lib.APU_OP_STREAMS_OUT, ins=(given, block, mix), outs=(given,), ints=(S,))

    streams = x[:40].astype(np.float64).reshape(40, S, D)
    flat = streams.reshape(40, -1)
    numbers = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + EPS) @ fn.astype(np.float64).T
    numbers = numbers * np.repeat(scale, [S, S, S * S]) + offset
    gate = 1 / (1 + np.exp(-numbers[:, : 2 * S]))
    matrix = np.exp(numbers[:, 2 * S :].reshape(40, S, S))
    matrix = matrix / matrix.sum(-1, keepdims=True) + 1e-6
    for iteration in range(20):
        matrix = matrix / (matrix.sum(-1, keepdims=True) + 1e-6) if iteration else matrix
        matrix = matrix / (matrix.sum(-2, keepdims=True) + 1e-6)
    collapsed = np.einsum("ts,tsd->td", gate[:, :S] + 1e-6, streams)
    after = 2 * gate[:, S:, None] * made[:40, None] + np.einsum("tjk,tjd->tkd", matrix, streams)
    with Device("cpu", threads=3, isa=isa) as device, rig.build(device) as plan:
        plan.run(Step().sequence(range(40)))
        found = {tensor: plan.read(tensor, 40) for tensor in (out, mix, given)}
        np.testing.assert_allclose(found[out], collapsed, atol=3e-5)
        np.testing.assert_allclose(found[mix][:, S:].reshape(40, S, S), matrix, atol=1e-5)
        np.testing.assert_allclose(found[given].reshape(40, S, D), after, atol=3e-5)
        for rows in (1, 3, 17):
            plan.run(Step().sequence(range(rows)))
            assert all(np.array_equal(plan.read(tensor, rows), found[tensor][:rows]) for tensor in found)


# ---------------------------------------------------------------- rounding


def e4m3(x: F64) -> F64:
    """Groups of 64, the last one what is left."""
    out = torch.from_numpy(x.astype(np.float32))
    parts = []
    for part in out.split(64, -1):
        scale = 2.0 ** (part.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).log2().ceil()
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return np.asarray(torch.cat(parts, -1).numpy(), np.float64)


def fp4(x: F64) -> F64:
    """By a Hadamard matrix, then groups of 32; of two levels as near, the even one."""
    size, levels = x.shape[-1], np.array([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # even ones first
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    groups = (x @ hadamard * size**-0.5).reshape(*x.shape[:-1], -1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(groups).max(-1, keepdims=True) / 6))
    nearest = np.abs(np.abs(groups / scale)[..., None] - levels).argmin(-1)
    return np.asarray((np.sign(groups) * levels[nearest] * scale).reshape(x.shape))


def test_rows_are_rounded_to_e4m3(device: Device) -> None:
    d, rope = 176, 16  # groups of 64, 64 and 32
    spread = np.exp(random(TOKENS, d, seed=7) * 4)
    values = random(TOKENS, d) * spread.astype(np.float32)
    values[3, : d - rope] = 0
    norm, q_rows = random(d, seed=2), random(TOKENS, 2 * d, seed=3)
    rig = Rig(rows=TOKENS, vocabulary=TOKENS)
    q, kv, state = rig.input(q_rows, "q"), rig.input(values, "kv"), rows_state(rig, "rows", d, 1, 128)
    ints = (rope, lib.APU_ROPE_PAIRS, 0, lib.APU_ROUND_E4M3)
    w = (rig.weight("norm", norm),)
    rig.op(lib.APU_OP_SHARED_STORE, ins=(q, kv), outs=(q,), weights=w, states=(state,), ints=ints, floats=PLAIN_ROPE)
    with rig.build(device) as plan:
        plan.run(Step(1).sequence(range(TOKENS), 0, [[0]]))
        plan.fetch(rig.memory(state))
        held, heads = rig.memory(state)[0, 0, :TOKENS].astype(np.float64), plan.read(q, TOKENS)
    exact = rms_norm(values, norm, EPS)
    turned = np.array([rotated(row, t, rope) for t, row in enumerate(exact)])
    np.testing.assert_allclose(held[:, -rope:], turned[:, -rope:], rtol=1e-4, atol=1e-5)
    expected = e4m3(exact[:, :-rope])
    same = held[:, :-rope] == expected
    assert same.mean() > 0.999  # single ones lie at a boundary
    np.testing.assert_allclose(held[:, :-rope], expected, rtol=0.13)
    q_exact = rms_norm(q_rows.reshape(-1, d), np.ones(d), EPS).reshape(TOKENS, 2, d)
    q_exact = np.array([rotated(row, t, rope) for t, row in enumerate(q_exact)])
    np.testing.assert_allclose(heads.reshape(TOKENS, 2, d), q_exact, atol=1e-5)


def test_queries_are_rounded_to_fp4(device: Device) -> None:
    heads, d, rope = 3, 128, 64
    rig, _, q = indexer(heads=heads, d=d, k=4, pages=1, rope=rope, rounding=lib.APU_ROUND_FP4)
    given = rig.keep[0].astype(np.float64).reshape(TOKENS, heads, d)
    with rig.build(device) as plan:
        plan.run(Step(1).sequence(range(8), 0, [[0]]))
        found = plan.read(q, 8).reshape(8, heads, d)
    expected = fp4(np.array([rotated(given[t], t, rope) for t in range(8)]))
    assert (np.abs(found - expected) < 1e-6).mean() > 0.998
    assert len(np.unique(np.abs(found[0, 0, :32]))) <= 8


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "series", "d"), [(4, 2, 40), (128, 1, 48), (8, 1, 16), (1, 1, 8), (2, 2, 24)])
def test_compressed_rows(device: Device, tokens: int, series: int, d: int, kind: Any) -> None:
    rope, width = 8, series * d
    rig = Rig(rows=64, vocabulary=TOKENS)
    values, gates = random(TOKENS, width), random(TOKENS, width, seed=2) * 2
    bias, norm = random(tokens, width, seed=3).astype(kind), random(d, seed=4)
    ins = rig.input(values, "values"), rig.input(gates, "gates")
    open_rows = rows_state(rig, "open", 2 * width, 3, 128, window=128)
    rows = rows_state(rig, "rows", d, 4, 128 // tokens, group=1, dtype=kind)
    w = (rig.weight("bias", bias), rig.weight("norm", norm))
    rig.op(lib.APU_OP_COMPRESS, ins=ins, weights=w, states=(open_rows, rows), ints=(rope,), floats=PLAIN_ROPE)
    ids = np.random.default_rng(5).integers(0, TOKENS, 300)
    tables = [[2, 0, 1], [3, 1, 2]]
    with rig.build(device) as plan:
        for at, end in ((0, 61), (61, 62), (62, 126), (126, 190), (190, 251), (251, 300)):
            plan.run(Step(2).sequence(ids[at:end].tolist(), at, tables))
        plan.fetch(rig.memory(rows))
    held = rig.memory(rows)[:, 0]
    gate = gates[ids].astype(np.float64) + bias.astype(np.float64)[np.arange(300) % tokens]
    for row in range(300 // tokens):
        own = np.arange(row * tokens, (row + 1) * tokens)
        parts = [(own, slice(width - d, width))]
        if series == 2 and row:
            parts.append((own - tokens, slice(0, d)))
        g = np.concatenate([gate[at][:, part] for at, part in parts])
        v = np.concatenate([values[ids[at]][:, part] for at, part in parts]).astype(np.float64)
        weight = np.exp(g - g.max(0))
        pooled = (weight * v).sum(0) / weight.sum(0)
        expected = rotated(rms_norm(pooled[None], norm, EPS)[0], row * tokens, rope)
        at = row * tokens // 128
        found = held[tables[1][at], row % (128 // tokens)]
        np.testing.assert_allclose(found, expected, atol=1e-4 if kind == np.float32 else 5e-3)


# ---------------------------------------------------------------- choice


def indexer(
    *,
    heads: int,
    d: int,
    k: int,
    pages: int,
    rope: int = 2,
    rounding: int = 0,
    whole: bool = False,
    rows: int = 32,
    tokens: int = 4,
    dtype: Any = np.float32,
) -> tuple[Rig, int, int]:
    """(rig, ids, q); rows of `tokens` tokens. `whole`: small integers, zeros where q is rotated: many equal scores."""
    draw = np.random.default_rng(11)

    def numbers(*shape: int) -> NDArray[np.float32]:
        return (draw.integers(-2, 3, shape) if whole else draw.standard_normal(shape)).astype(np.float32)

    rig = Rig(rows=rows, vocabulary=TOKENS, positions=pages * 128)
    queries = numbers(TOKENS, heads, d)
    if whole:
        queries[..., -rope:] = 0
    q = rig.input(queries.reshape(TOKENS, -1), "q")
    weights = rig.input(numbers(TOKENS, heads), "weights")
    state = rows_state(rig, "rows", d, pages, 128 // tokens, dtype=dtype)
    rig.memory(state)[...] = numbers(*rig.memory(state).shape)
    ids = rig.scratch("ids", k, dtype=lib.APU_I32)
    floats = (*PLAIN_ROPE, 0.5)
    ints = (rope, lib.APU_ROPE_PAIRS, 0, rounding)
    rig.op(lib.APU_OP_INDEX, ins=(q, weights), outs=(ids, q), states=(state,), ints=ints, floats=floats)
    return rig, ids, q


def test_the_best_512_of_32768_rows_for_32_tokens_in_exact_order(device: Device) -> None:
    """Scores are small integers: thousands are equal, and of those the lowest rows are chosen."""
    heads, d, k, pages = 4, 8, 512, 1025
    rig, ids, _ = indexer(heads=heads, d=d, k=k, pages=pages, whole=True)
    q, weights = rig.keep[0].reshape(TOKENS, heads, d), rig.keep[1]
    rows = rig.memory(0)[:, 0]
    table = np.random.default_rng(2).permutation(pages)
    first = 32768 * 4 - 1
    with rig.build(device) as plan:
        plan.run(Step(1).sequence(range(32), first, [table.tolist()]))
        found = plan.read(ids, 32)
        plan.run(Step(1).sequence([7], first + 7, [table.tolist()]))
        assert np.array_equal(plan.read(ids, 1)[0], found[7])
    held = rows[table].reshape(-1, d)
    for t in range(32):
        n = (first + t + 1) // 4
        assert n >= 32768
        scores = weights[t] @ np.maximum(q[t] @ held[:n].T, 0)
        assert np.array_equal(found[t], np.sort(np.argsort(-scores, kind="stable")[:k]))


def test_rows_that_are_few_are_all_chosen(device: Device) -> None:
    rig, ids, _ = indexer(heads=3, d=16, k=9, pages=2)
    q, weights, held = rig.keep[0].reshape(TOKENS, 3, 16), rig.keep[1], rig.memory(0)[:, 0].reshape(-1, 16)
    with rig.build(device) as plan:
        plan.run(Step(1).sequence(range(32), 20, [[0, 1]]))
        found = plan.read(ids, 32)
    for t in range(32):
        n = (20 + t + 1) // 4
        if n <= 9:
            assert found[t].tolist() == [*range(n), *[-1] * (9 - n)]
            continue
        turned = rotated(q[t].astype(np.float64), 20 + t, 2)
        scores = weights[t] @ np.maximum(turned @ held[:n].T, 0)
        assert np.array_equal(found[t], np.sort(np.argsort(-scores, kind="stable")[:9]))


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize(("heads", "d", "kind"), [(20, 128, np.float16), (3, 64, np.float32), (16, 256, np.float16)])
def test_rows_of_fp4_are_chosen_as_their_numbers_say(isa: str, heads: int, d: int, kind: Any) -> None:
    """Scales differ by group; some pages hold rows that are no FP4, one has an unused group of zeros, one a NaN."""
    k, pages, rounding = 37, 12, lib.APU_ROUND_FP4
    rig, ids, q = indexer(heads=heads, d=d, k=k, pages=pages, rope=8, rounding=rounding, rows=40, dtype=kind)
    draw = np.random.default_rng(3)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * draw.choice([-1, 1], (pages, 32, d // 32, 32, 1))
    numbers = np.take_along_axis(levels, draw.integers(0, 8, (pages, 32, d // 32, 32, 1)), -1)[..., 0]
    numbers *= 2.0 ** draw.integers(-7, 1, (pages, 32, d // 32, 1))
    held = rig.memory(0)[:, 0]
    held[...] = numbers.reshape(pages, 32, d)
    held[3, 5] = random(d, seed=8)
    held[7, 31, -1] = 2.0**-13  # beside numbers of another size
    held[2, 4, :32] = 0
    held[1, 9, 3] = np.nan
    first = pages * 128 - 40
    table = draw.permutation(pages)
    with Device("cpu", threads=3, isa=isa) as device, rig.build(device) as plan:
        plan.run(Step(1).sequence(range(40), first, [table.tolist()]))
        found, queries = plan.read(ids, 40), plan.read(q, 40).reshape(40, heads, d).astype(np.float64)
        for t in (0, 17, 39):
            plan.run(Step(1).sequence([t], first + t, [table.tolist()]))
            assert np.array_equal(plan.read(ids, 1)[0], found[t])
    rows = held[table].reshape(-1, d).astype(np.float64)
    for t in range(40):
        n = (first + t + 1) // 4
        scores = np.nan_to_num(0.5 * rig.keep[1][t] @ np.maximum(queries[t] @ rows[:n].T, 0), nan=-np.inf)
        assert np.array_equal(found[t], np.unique(found[t])) and found[t][0] >= 0 and found[t][-1] < n
        left = np.delete(scores, found[t])
        assert scores[found[t]].min() >= left.max() - 1e-4 * np.abs(scores[np.isfinite(scores)]).max()


# ---------------------------------------------------------------- attention


# (tokens, chosen, position); the last one is a decode over 8,100 rows of 128 tokens.
ATTENDED = ((0, 0, 300), (4, 0, 700), (4, 150, 1000), (4, 6, 2), (128, 0, 8100 * 128 - 1))


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize("kv", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "chosen", "position"), ATTENDED)
def test_attention(isa: str, kv: Any, tokens: int, chosen: int, position: int) -> None:
    with Device("cpu", threads=3, isa=isa) as device:
        check_attention(device, kv, tokens, chosen, position)


def check_attention(
    device: Device,
    kv: Any,
    tokens: int,
    chosen: int,
    position: int,
    *,
    heads: int = 6,
    d: int = 32,
    bound: float = 2e-5,
) -> None:
    """Three rows up to `position`, then the last alone, with the same bits."""
    rope = 8
    pages = position // 128 + 1
    rig = Rig(rows=4, vocabulary=TOKENS, positions=pages * 128)
    queries, sinks = random(TOKENS, heads * d) * 2, random(heads, seed=2)
    q, out = rig.input(queries, "q"), rig.scratch("out", heads * d)
    window = rows_state(rig, "window", d, 3, 128, window=128, dtype=kv)
    rig.memory(window)[...] = random(3, 1, 128, d, seed=3)
    states, ids = [window], NONE
    if tokens:
        states.append(rows_state(rig, "rows", d, pages, 128 // tokens, group=1, dtype=kv))
        rig.memory(states[1])[...] = random(pages, 1, 128 // tokens, d, seed=4)
    if chosen:
        small = rows_state(rig, "small", 8, pages, 128 // tokens, group=1)
        rig.memory(small)[...] = random(pages, 1, 128 // tokens, 8, seed=5)
        index_q, weights = rig.input(random(TOKENS, 16, seed=6), "iq"), rig.input(random(TOKENS, 2, seed=7), "iw")
        ids = rig.scratch("ids", chosen, dtype=lib.APU_I32)
        floats = (*PLAIN_ROPE, 1.0)
        rig.op(lib.APU_OP_INDEX, ins=(index_q, weights), outs=(ids, index_q), states=(small,), ints=(2,), floats=floats)
    w = (rig.weight("sinks", sinks),)
    floats = (*PLAIN_ROPE, d**-0.5)
    rig.op(
        lib.APU_OP_SPARSE_ATTENTION, ins=(q, ids), outs=(out,), weights=w, states=states, ints=(rope,), floats=floats
    )
    near = [NO_PAGE] * pages
    for page in range(max(0, position - 129) // 128, pages):
        near[page] = page % 3
    far = np.random.default_rng(8).permutation(pages).tolist()
    tables = [near, far] if tokens else [near]
    begin = max(0, position - 2)
    with rig.build(device) as plan:
        count = position + 1 - begin
        plan.run(Step(len(tables)).sequence(range(count), begin, tables))
        found = plan.read(out, count).reshape(count, heads, d)
        picked = plan.read(ids, count) if chosen else None
        plan.run(Step(len(tables)).sequence([count - 1], position, tables))
        assert np.array_equal(plan.read(out, 1)[0].reshape(heads, d), found[-1])
    held = rig.memory(window)[:, 0].astype(np.float64)
    for t in range(count):
        p = begin + t
        rows = np.array([held[near[s // 128], s % 128] for s in range(max(0, p - 127), p + 1)])
        if tokens:
            all_rows = rig.memory(states[1])[far, 0].reshape(-1, d)[: (p + 1) // tokens].astype(np.float64)
            kept = all_rows if picked is None else all_rows[picked[t][picked[t] >= 0]]
            rows = np.concatenate([rows, kept])
        scores = queries[t].reshape(heads, d).astype(np.float64) @ rows.T * d**-0.5
        top = np.maximum(scores.max(-1), sinks)[:, None]
        e = np.exp(scores - top)
        expected = e / (e.sum(-1, keepdims=True) + np.exp(sinks[:, None] - top)) @ rows
        np.testing.assert_allclose(found[t], rotated(expected, p, rope, -1.0), atol=bound)


# ---------------------------------------------------------------- experts by token, limits


def test_experts_follow_from_the_token(device: Device) -> None:
    E, k, D = 8, 3, 32
    x, router = random(TOKENS, D), random(E, D, seed=2)
    table = np.ascontiguousarray(np.argsort(random(TOKENS, E, seed=3), -1)[:, :k].astype(np.int32))
    rig = Rig(rows=16, vocabulary=TOKENS)
    given, ids, weights = rig.input(x), rig.scratch("ids", k, dtype=lib.APU_I32), rig.scratch("weights", k)
    w = (NONE, rig.weight("router", router), NONE, rig.weight("table", table, dtype=lib.APU_I32, cuts=3))
    ints = (lib.APU_SCORE_SQRT_SOFTPLUS, 1)
    rig.op(lib.APU_OP_ROUTE, ins=(given,), outs=(ids, weights), weights=w, ints=ints, floats=(EPS, 1.5, 2.0**-14))
    tokens = np.random.default_rng(4).integers(0, TOKENS, 16)
    with rig.build(device) as plan:
        plan.run(Step().sequence(tokens.tolist()))
        found, given_weights = plan.read(ids, 16), plan.read(weights, 16)
    expected = np.sort(table[tokens], -1)
    assert np.array_equal(found, expected)
    scores = np.sqrt(np.log1p(np.exp(x[tokens].astype(np.float64) @ router.T)))
    chosen = np.take_along_axis(scores, expected.astype(np.int64), -1)
    np.testing.assert_allclose(given_weights, 1.5 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)
    table[9, 2] = -1
    with pytest.raises(InvalidError, match='"table": token 9 goes to expert -1, expected 0 to 7'):
        Plan(rig, device)


def test_a_gated_pair_has_a_limit(device: Device) -> None:
    x, gate, up = random(TOKENS, 32) * 3, random(24, 32, seed=2), random(24, 32, seed=3)
    rig = Rig(rows=16, vocabulary=TOKENS)
    given, out = rig.input(x), rig.scratch("out", 24)
    w = (NONE, rig.weight("gate", gate), rig.weight("up", up))
    rig.op(lib.APU_OP_MATMUL, ins=(given,), outs=(out,), weights=w, ints=(lib.APU_ACT_SILU,), floats=(0.0, 0.0, 4.0))
    with rig.build(device) as plan:
        plan.run(Step().sequence(range(16)))
        found = plan.read(out, 16)
    g = np.minimum(x[:16].astype(np.float64) @ gate.T, 4)
    u = np.clip(x[:16].astype(np.float64) @ up.T, -4, 4)
    assert (u == 4).any() and (u == -4).any() and (g == 4).any() and (g < -4).any()
    np.testing.assert_allclose(found, g / (1 + np.exp(-g)) * u, atol=1e-4)


# ---------------------------------------------------------------- refusals


def whole() -> Rig:
    """All of it once, after the four inputs; the numbers of the ops are below."""
    rig = Rig(rows=8, vocabulary=TOKENS)
    x, kv, gate = (
        rig.input(random(TOKENS, 96), "x"),
        rig.input(random(TOKENS, 48), "kv"),
        rig.input(random(TOKENS, 48), "gate"),
    )
    weights = rig.input(random(TOKENS, 2), "weights")
    out, mix, made = rig.scratch("out", 48), rig.scratch("mix", 6), rig.scratch("made", 48)
    ids, last = rig.scratch("ids", 5, dtype=lib.APU_I32), rig.scratch("last", 48)
    window = rows_state(rig, "window", 24, 3, 128, window=128)
    open_rows = rows_state(rig, "open", 96, 3, 128, window=128)
    rows = rows_state(rig, "rows", 24, 3, 32, group=1)
    names = (("fn", (8, 96)), ("scale", 3), ("offset", 8), ("norm", 24), ("bias", (4, 48)), ("sinks", 2))
    w = {name: rig.weight(name, np.ones(shape, np.float32)) for name, shape in names}
    w |= {
        name: rig.weight(name, np.ones(shape, np.float32)) for name, shape in (("fn1", (2, 96)), ("s1", 1), ("o1", 2))
    }
    floats, turn = (EPS, 1e-6), (*PLAIN_ROPE, 0.2)
    mixed = (w["fn"], w["scale"], w["offset"])
    rig.op(lib.APU_OP_STREAMS_IN, ins=(x,), outs=(out, mix), weights=mixed, ints=(2, 20), floats=floats, layer=7)
    row = rig.scratch("row", 24)
    rig.op(lib.APU_OP_MATMUL, ins=(kv,), outs=(row,), weights=(NONE, rig.weight("small", random(24, 48))), layer=7)
    store = {"outs": (out,), "weights": (w["norm"],), "states": (window,), "ints": (8, 0, 0, 1), "floats": turn}
    rig.op(lib.APU_OP_SHARED_STORE, ins=(out, row), **store, layer=7)
    weight, states = (w["bias"], w["norm"]), (open_rows, rows)
    rig.op(lib.APU_OP_COMPRESS, ins=(kv, gate), weights=weight, states=states, ints=(8,), floats=turn, layer=7)
    rig.op(lib.APU_OP_INDEX, ins=(kv, weights), outs=(ids, kv), states=(rows,), ints=(8,), floats=turn, layer=7)
    both = {"weights": (w["sinks"],), "states": (window, rows), "ints": (8,), "floats": turn}
    rig.op(lib.APU_OP_SPARSE_ATTENTION, ins=(out, ids), outs=(made,), **both, layer=7)
    rig.op(lib.APU_OP_STREAMS_OUT, ins=(x, made, mix), outs=(x,), ints=(2,), layer=7)
    ends = (w["fn1"], w["s1"], w["o1"])
    rig.op(lib.APU_OP_STREAMS_IN, ins=(x,), outs=(last,), weights=ends, ints=(2,), floats=floats)
    return rig


IN, STORE, COMPRESS, INDEX, ATTEND, OUT, END = 4, 6, 7, 8, 9, 10, 11


def extra(inner: int, dtype: int = lib.APU_F32) -> Callable[[Rig], int]:
    return lambda rig: rig.scratch("extra", inner, dtype=dtype)


def named(*shape: int) -> Callable[[Rig], int]:
    return lambda rig: rig.weight("other", np.ones(shape, np.float32))


BROKEN: list[tuple[Callable[[Rig], None], str]] = [
    (put(0, "i", 0, 17), r"EMBED: i0 \(copies\) is 17, expected 0 to 16"),
    (put(0, "i", 0, 2), r'EMBED: out0 "x": expected 192 elements'),
    (put(IN, "i", 0, 0), r"STREAMS_IN \(layer 7\): i0 \(streams\) is 0, expected 1 to 16"),
    (put(IN, "i", 0, 5), r'in0 "x" .* expected 5 streams'),
    (put(IN, "i", 1, -1), r"i1 \(iterations\) is -1"),
    (put(IN, "w", 0, named(7, 96)), r'w0 "other": expected shape \(8, 96\)'),
    (put(IN, "w", 1, named(2)), r'w1 "other": expected shape \(3\)'),
    (put(IN, "w", 2, NONE), r"w2 is missing"),
    (put(IN, "out", 1, extra(5)), r'out1 "extra": expected 6 elements'),
    (put(IN, "out", 0, extra(96)), r'out0 "extra": expected 48 elements'),
    (put(IN, "f", 1, -1.0), r"f1 \(what is added\) is -1"),
    (put(END, "w", 0, named(8, 96)), r'w0 "other": expected shape \(2, 96\)'),
    (put(STORE, "state", 0, NONE), r"SHARED_STORE \(layer 7\): state0 is missing"),
    (put(STORE, "i", 0, 7), r"rotary dims\) is 7, expected an even"),
    (put(STORE, "i", 0, 26), r"rotary dims\) is 26, expected 2 to 24"),
    (put(STORE, "i", 3, 2), r"i3 \(rounding\) is 2, expected 0 to 1"),
    (put(STORE, "out", 0, extra(48)), r"q is rotated in place"),
    (put(STORE, "in", 1, extra(23)), r'in1 "extra": expected 24 elements'),
    (put(STORE, "w", 0, NONE), r"w0 is missing"),
    (pages(0, "heads", 2), r'state0 "window": expected one head, found 2|pages of'),
    (pages(0, "rows_per_page", 64), r'state0 "window": expected 128 rows a page, found 64'),
    (pages(0, "kind", lib.APU_STATE_FIXED), r"mixes paged and fixed|expected a paged state"),
    (pages(0, "dtype", lib.APU_BF16), r'state0 "window": expected F32 or F16, found BF16'),
    (put(COMPRESS, "w", 0, named(3, 48)), r'w0 "other" .* which divide 128'),
    (put(COMPRESS, "w", 0, named(8, 48)), r'state1 "rows": expected 16 rows a page, found 32'),
    (put(COMPRESS, "w", 0, named(4, 72)), r'w0 "other" .* expected rows of 24 or 48 elements'),
    (put(COMPRESS, "w", 0, named(4, 24)), r'state0 "open": expected rows of 48 elements in F32, found 96'),
    (put(COMPRESS, "w", 1, named(25)), r'w1 "other": expected shape \(24\)'),
    (put(COMPRESS, "in", 1, extra(24)), r'in1 "extra": expected 48 elements'),
    (put(COMPRESS, "i", 3, 3), r"i3 \(rounding\) is 3, expected 0 to 2"),
    (put(COMPRESS, "i", 3, 2), r"is FP4, but a row has 24 elements: expected a power of two"),
    (pages(1, "window", 7), r'state0 "open": window 7, but a row is made of 8 tokens'),
    (pages(2, "window", 128), r'state1 "rows": expected no window, found 128'),
    (put(INDEX, "in", 1, extra(3)), r'INDEX \(layer 7\): in1 "extra": expected 2 elements'),
    (put(INDEX, "out", 1, extra(48)), r"q is rotated in place"),
    (put(INDEX, "out", 0, extra(5)), r'out0 "extra": expected I32, found F32'),
    (put(INDEX, "state", 0, 0), r'state0 "window": expected no window, found 128'),
    (put(ATTEND, "state", 1, NONE), r"SPARSE_ATTENTION \(layer 7\): in1 chooses rows of state1, which is missing"),
    (put(ATTEND, "state", 1, 1), r'state1 "open": expected 24 elements and no window'),
    (put(ATTEND, "in", 1, extra(5)), r'in1 "extra": expected I32, found F32'),
    (put(ATTEND, "w", 0, named(3)), r'w0 "other": expected shape \(2\)'),
    (put(ATTEND, "out", 0, extra(47)), r'out0 "extra": expected 48 elements'),
    (put(ATTEND, "f", 1, 0.0), r"f1 \(base\) is 0"),
    (put(OUT, "in", 1, extra(47)), r'STREAMS_OUT \(layer 7\): in1 "extra": expected 48 elements'),
    (put(OUT, "in", 2, extra(5)), r'in2 "extra": expected 6 elements'),
    (put(OUT, "out", 0, extra(95)), r'out0 "extra": expected 96 elements'),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_broken_plan(device: Device, change: Callable[[Rig], None], message: str) -> None:
    rig = whole()
    refused(rig, device, lambda: change(rig), message)


def test_tables_of_experts_are_checked(device: Device) -> None:
    for shape, message in (((TOKENS, 4), "expected shape \\(64, 3\\) in I32"), ((TOKENS - 1, 3), "found \\(63, 3\\)")):
        rig = Rig(rows=8, vocabulary=TOKENS)
        x, ids, weights = rig.input(random(TOKENS, 32)), rig.scratch("ids", 3, dtype=lib.APU_I32), rig.scratch("w", 3)
        table = rig.weight("table", np.zeros(shape, np.int32), dtype=lib.APU_I32)
        w = (NONE, rig.weight("router", random(8, 32)), NONE, table)
        rig.op(lib.APU_OP_ROUTE, ins=(x,), outs=(ids, weights), weights=w, ints=(2, 1), floats=(EPS, 1.0, 0.0))
        with pytest.raises(InvalidError, match=message):
            Plan(rig, device)
