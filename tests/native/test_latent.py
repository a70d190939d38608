"""LATENT_STORE, HEAD_MATMUL, LATENT_ATTENTION, groups and bias of ROUTE against numpy in float64, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import NONE, Q8_0, Plan, Rig, Step, pages, put, refused, rms_norm

from apu_engine._native import Device, InvalidError, lib

F64 = NDArray[np.float64]
PAGES = 8
TOKENS = 64
EPS = 1e-5


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- attention


def attention(
    heads: int, d: int, value: int, kv: Any = np.float32, window: int = 0, cap: float = 0.0, sinks: bool = False
) -> tuple[Rig, int, Callable[[int, int, list[int]], F64]]:
    """(rig, out, what one row is: of a token, a position and a page table)."""
    rig = Rig(rows=64, vocabulary=TOKENS, positions=PAGES * 128)
    queries = random(TOKENS, heads * d, seed=2) * 2
    state = rig.state("latent", 1, d, PAGES, dtype=kv, window=window)
    held = rig.fill(state, random(PAGES, 1, 128, d, seed=3))[:, 0]
    sink = random(heads, seed=4)
    q, out = rig.input(queries, "q"), rig.scratch("out", heads * value)
    rig.op(
        lib.APU_OP_LATENT_ATTENTION,
        ins=(q,),
        outs=(out,),
        weights=(rig.weight("sinks", sink) if sinks else NONE,),
        states=(state,),
        ints=(value,),
        floats=(d**-0.5, cap),
    )

    def expected(token: int, position: int, table: list[int]) -> F64:
        first = max(0, position - window + 1) if window else 0
        rows = np.array([held[table[p // 128], p % 128] for p in range(first, position + 1)])
        s = queries[token].reshape(heads, d).astype(np.float64) @ rows.T * d**-0.5
        s = cap * np.tanh(s / cap) if cap else s
        bottom = sink[:, None] if sinks else np.full((heads, 1), -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), bottom)
        e = np.exp(s - top)
        weights = e / (e.sum(-1, keepdims=True) + np.exp(bottom - top))
        return np.asarray((weights @ rows[:, :value]).reshape(-1))

    return rig, out, expected


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize(
    ("heads", "d", "value", "options"),
    [
        (16, 96, 64, {}),
        (16, 96, 64, {"kv": np.float16}),
        (16, 96, 64, {"kv": Q8_0}),
        (3, 64, 64, {"window": 200}),
        (13, 32, 20, {"sinks": True}),
        (4, 576, 512, {"kv": np.float16, "cap": 5.0}),
        (1, 40, 8, {}),
    ],
)
def test_latent_attention(isa: str, heads: int, d: int, value: int, options: dict[str, Any]) -> None:
    rig, out, expected = attention(heads, d, value, **options)
    tables = [[5, 2, 7, 0], [1, 6, 3, 4]]
    with Device("cpu", threads=3, isa=isa) as device, rig.build(device) as plan:
        plan.run(Step(1).sequence(range(40), 340, [tables[0]]).sequence(range(9), 0, [tables[1]]))
        found = plan.read(out, 49).astype(np.float64)
        for row in (0, 1, 17, 39):
            np.testing.assert_allclose(found[row], expected(row, 340 + row, tables[0]), atol=2e-5)
        for row in (0, 8):
            np.testing.assert_allclose(found[40 + row], expected(row, row, tables[1]), atol=2e-5)
        for row in (0, 1, 23, 39):  # alone, the same bits
            plan.run(Step(1).sequence([row], 340 + row, [tables[0]]))
            assert np.array_equal(plan.read(out, 1)[0], found[row].astype(np.float32))


# ---------------------------------------------------------------- store


@pytest.mark.parametrize("style", [lib.APU_ROPE_PAIRS, lib.APU_ROPE_HALVES])
@pytest.mark.parametrize("kv", [np.float32, np.float16, Q8_0])
def test_latent_store(device: Device, style: int, kv: Any) -> None:
    heads, nope, rope, rank = 3, 10, 32, 64
    rig = Rig(rows=16, vocabulary=TOKENS)
    q_rows, c_rows, norm = (
        random(TOKENS, heads * (nope + rope)),
        random(TOKENS, rank + rope, seed=2),
        random(rank, seed=3),
    )
    q, c = rig.input(q_rows, "q"), rig.input(c_rows, "c")
    state = rig.state("latent", 1, rank + rope, 3, dtype=kv)
    rig.op(
        lib.APU_OP_LATENT_STORE,
        ins=(q, c),
        outs=(q,),
        weights=(rig.weight("norm", norm),),
        states=(state,),
        ints=(rope, style, 0, heads),
        floats=(EPS, 1e4, 1.0, 0.0, 1.25),
    )

    def rotated(x: F64, position: int) -> F64:
        angle = position * 1e4 ** (-np.arange(0, rope, 2) / rope)
        pairs = x.reshape(*x.shape[:-1], -1, 2) if style == lib.APU_ROPE_PAIRS else x.reshape(*x.shape[:-1], 2, -1)
        axis = -1 if style == lib.APU_ROPE_PAIRS else -2
        a, b = np.take(pairs, 0, axis), np.take(pairs, 1, axis)
        both = (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle))
        return 1.25 * np.stack(both, axis).reshape(x.shape)

    with rig.build(device) as plan:
        plan.run(Step(1).sequence(range(9), 124, [[2, 0]]))
        found = plan.read(q, 9).reshape(9, heads, -1)
        held = rig.held(state)[:, 0]
    for row in range(9):
        position = 124 + row
        head = q_rows[row].reshape(heads, -1).astype(np.float64)
        np.testing.assert_allclose(found[row, :, nope:], rotated(head[:, nope:], position), atol=1e-5)
        assert np.array_equal(found[row, :, :nope], head[:, :nope].astype(np.float32))
        latent = rms_norm(c_rows[row : row + 1, :rank], norm, EPS)[0]
        expected = np.concatenate([latent, rotated(c_rows[row, rank:].astype(np.float64), position)])
        error = {np.float32: 1e-5, np.float16: 4e-3, Q8_0: 0.05}[kv]
        np.testing.assert_allclose(held[[2, 0][position // 128], position % 128], expected, atol=error)


# ---------------------------------------------------------------- matrices of heads


def pack(w: NDArray[np.float32]) -> tuple[NDArray[np.uint8], F64]:
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    q = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    packed = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], -1).reshape(*w.shape[:-1], -1)
    return np.ascontiguousarray(packed), (q * scale.astype(np.float64)).reshape(w.shape)


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("kind", "precision", "error"), [("f", 0, 1e-5), ("h", 0, 1e-5), ("q", 1, 1e-5), ("q", 0, 0.02)]
)
@pytest.mark.parametrize(
    ("heads", "k", "n", "rest", "cuts"), [(5, 32, 64, 6, 5), (2, 160, 96, 0, 3), (1, 288, 32, 1, 1)]
)
def test_head_matmul(
    isa: str, across: bool, kind: str, precision: int, error: float, heads: int, k: int, n: int, rest: int, cuts: int
) -> None:
    rig = Rig(rows=140, vocabulary=TOKENS)
    x = random(TOKENS, heads * (k + rest))
    w = random(heads, *((k, n) if across else (n, k)), seed=2) * np.float32(k**-0.5)
    values = w.astype(np.float16).astype(np.float64) if kind == "h" else w.astype(np.float64)
    if kind == "q":
        packed, values = pack(w)
        weight = rig.weight("w", packed, dtype=lib.APU_Q8_0, shape=w.shape, cuts=cuts)
    else:
        weight = rig.weight("w", w.astype(np.float16) if kind == "h" else w, cuts=cuts)
    given, out = rig.input(x), rig.scratch("out", heads * (n + rest))
    rig.op(lib.APU_OP_HEAD_MATMUL, ins=(given,), outs=(out,), weights=(weight,), ints=(int(across), precision, rest))
    parts = x[np.arange(140) % TOKENS].reshape(140, heads, -1)
    product = np.einsum("thk,hkn->thn" if across else "thk,hnk->thn", parts[..., :k].astype(np.float64), values)
    with Device("cpu", threads=2, isa=isa) as device, rig.build(device) as plan:
        plan.run(Step().sequence(np.arange(140) % TOKENS))
        found = plan.read(out, 140).reshape(140, heads, -1)
        np.testing.assert_allclose(found[..., :n], product, atol=error * np.abs(product).max())
        assert np.array_equal(found[..., n:], parts[..., k:])
        for rows in (1, 2, 7, 33, 129):
            plan.run(Step().sequence(np.arange(rows) % TOKENS))
            assert np.array_equal(plan.read(out, rows).reshape(rows, heads, -1), found[:rows])


# ---------------------------------------------------------------- routing


def route(
    router: NDArray[np.float32], x: NDArray[np.float32], k: int, ints: tuple[int, ...], bias: NDArray[np.float32] | None
) -> tuple[Rig, int, int]:
    rig = Rig(rows=40, vocabulary=TOKENS)
    given = rig.input(x)
    ids, weights = rig.scratch("ids", k, dtype=lib.APU_I32), rig.scratch("weights", k)
    w = (NONE, rig.weight("router", router), NONE if bias is None else rig.weight("bias", bias))
    rig.op(lib.APU_OP_ROUTE, ins=(given,), outs=(ids, weights), weights=w, ints=ints, floats=(EPS, 2.5, 0.0))
    return rig, ids, weights


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    ("E", "k", "groups", "used", "sum2"),
    [(16, 3, 4, 2, 1), (16, 3, 4, 2, 0), (256, 8, 8, 4, 1), (160, 6, 8, 3, 0), (12, 6, 6, 3, 1), (8, 3, 0, 0, 0)],
)
def test_groups_and_bias(
    device: Device, biased: bool, sigmoid: bool, E: int, k: int, groups: int, used: int, sum2: int
) -> None:
    x, router = random(TOKENS, 96), random(E, 96, seed=2) / np.float32(8)
    bias = random(E, seed=3) * np.float32(0.3 if sigmoid else 0.05) if biased else None
    rig, ids, weights = route(router, x, k, (int(sigmoid), 1, groups, used, sum2), bias)
    logits = x[:40].astype(np.float64) @ router.T
    score = np.exp(logits - logits.max(-1, keepdims=True))
    score = 1 / (1 + np.exp(-logits)) if sigmoid else score / score.sum(-1, keepdims=True)
    choice = score + (0 if bias is None else bias)
    expected = []
    for row in choice:
        rank = row.copy()
        if groups:
            parts = np.sort(rank.reshape(groups, -1), -1)
            best = np.argsort(-(parts[:, -2:].sum(-1) if sum2 else parts[:, -1]), kind="stable")[used:]
            rank.reshape(groups, -1)[best] = -np.inf
        expected.append(np.sort(np.argsort(-rank, kind="stable")[:k]))
    with rig.build(device) as plan:
        plan.run(Step().sequence(range(40)))
        assert np.array_equal(plan.read(ids, 40), expected)
        chosen = np.take_along_axis(score, np.array(expected), -1)
        np.testing.assert_allclose(plan.read(weights, 40), 2.5 * chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


def test_equal_groups_go_to_the_lowest_and_a_broken_row_to_k_experts(device: Device) -> None:
    x, router = np.ones((TOKENS, 32), np.float32), np.zeros((12, 32), np.float32)
    x[1] = np.nan
    router[[1, 5, 10]] = 0.25
    rig, ids, _ = route(router, x, 4, (lib.APU_SCORE_SIGMOID, 1, 4, 2, lib.APU_GROUP_SUM2), None)
    with rig.build(device) as plan:
        plan.run(Step().sequence(range(3)))
        found = plan.read(ids, 3)
    assert found[[0, 2]].tolist() == [[0, 1, 2, 5]] * 2
    assert len(set(found[1].tolist())) == 4


# ---------------------------------------------------------------- refusals


def whole() -> Rig:
    """All of it once: ops 0 and 1 make q and c, 2 stores, 3 absorbs, 4 attends, 5 takes values, 6 routes."""
    rig = Rig(rows=16, vocabulary=TOKENS)
    q, c = rig.input(random(TOKENS, 3 * 24), "q"), rig.input(random(TOKENS, 40), "c")
    state = rig.state("latent", 1, 40, 3)
    rig.op(
        lib.APU_OP_LATENT_STORE,
        ins=(q, c),
        outs=(q,),
        weights=(rig.weight("norm", random(32)),),
        states=(state,),
        ints=(8, 0, 0, 3),
        floats=(EPS, 1e4, 1.0, 0.0, 1.0),
        layer=7,
    )
    absorbed, attended, out = rig.scratch("absorbed", 120), rig.scratch("attended", 96), rig.scratch("out", 60)
    keys, values = rig.weight("keys", random(3, 32, 16)), rig.weight("values", random(3, 20, 32))
    rig.op(lib.APU_OP_HEAD_MATMUL, ins=(q,), outs=(absorbed,), weights=(keys,), ints=(0, 0, 8), layer=7)
    rig.op(
        lib.APU_OP_LATENT_ATTENTION,
        ins=(absorbed,),
        outs=(attended,),
        states=(state,),
        ints=(32,),
        floats=(0.2,),
        layer=7,
    )
    rig.op(lib.APU_OP_HEAD_MATMUL, ins=(attended,), outs=(out,), weights=(values,), layer=7)
    ids, weights = rig.scratch("ids", 2, dtype=lib.APU_I32), rig.scratch("weights", 2)
    rig.op(
        lib.APU_OP_ROUTE,
        ins=(out,),
        outs=(ids, weights),
        weights=(NONE, rig.weight("router", random(8, 60)), rig.weight("bias", random(8))),
        ints=(1, 1, 4, 2, 1),
        floats=(EPS, 1.0, 0.0),
        layer=7,
    )
    return rig


BROKEN: list[tuple[Callable[[Rig], None], str]] = [
    (put(2, "state", 0, NONE), r"LATENT_STORE \(layer 7\): state0 is missing"),
    (put(2, "state", 1, 0), r"state1 is 0, but this op does not use it"),
    (put(2, "w", 0, NONE), r"w0 is missing"),
    (put(2, "w", 0, lambda rig: rig.weight("other", random(31))), r'w0 "other": expected shape \(32\)'),
    (put(2, "i", 0, 7), r"rotary dims\) is 7, expected an even"),
    (put(2, "i", 0, 0), r"rotary dims\) is 0, expected 2 to 24"),
    (put(2, "i", 0, 26), r"rotary dims\) is 26, expected 2 to 24"),
    (put(2, "i", 3, 0), r"i3 \(heads\) is 0"),
    (put(2, "i", 3, 5), r'in0 "q" .* expected 5 heads'),
    (put(2, "out", 0, lambda rig: rig.ops[3]["out"][0]), r"q is rotated in place"),
    (put(2, "in", 1, 1), r'in1 "q": expected 40 elements'),
    (put(2, "f", 1, 0.0), r"f1 \(base\) is 0"),
    (put(3, "i", 0, 2), r"HEAD_MATMUL \(layer 7\): i0 \(matrices lie across\) is 2"),
    (put(3, "i", 1, 2), r"precision\) is 2"),
    (put(3, "i", 2, 7), r'in0 "q": expected 69 elements'),
    (put(3, "i", 2, -1), r"i2 .* is -1"),
    (put(3, "i", 0, 1), r'in0 "q": expected 120 elements'),
    (put(3, "w", 0, lambda rig: rig.weight("flat", random(96, 16))), r'w0 "flat": expected shape'),
    (put(3, "out", 0, lambda rig: rig.ops[3]["in"][0]), r'out0 "q": expected 120 elements'),
    (put(4, "i", 0, 0), r"LATENT_ATTENTION \(layer 7\): i0 \(elements of a value\) is 0, expected 1 to 40"),
    (put(4, "i", 0, 41), r"is 41, expected 1 to 40"),
    (put(4, "i", 0, 31), r'out0 "attended": expected 93 elements'),
    (put(4, "in", 0, 1), r'in0 "q" .* expected whole heads of 40'),
    (put(4, "state", 0, NONE), r"state0 is missing"),
    (put(4, "f", 1, -1.0), r"soft cap"),
    (put(6, "i", 2, 3), r"i2 \(groups\) is 3, which does not divide the 8 experts"),
    (put(6, "i", 2, 9), r"i2 \(groups\) is 9"),
    (put(6, "i", 3, 0), r"i3 \(groups used\) is 0, expected 1 to 4"),
    (put(6, "i", 3, 5), r"i3 \(groups used\) is 5, expected 1 to 4"),
    (put(6, "i", 4, 2), r"i4 \(score of a group\) is 2"),
    (put(6, "i", 2, 8), r"adds two experts, but a group has one"),
    (put(6, "w", 2, lambda rig: rig.weight("other", random(7))), r'w2 "other": expected shape \(8\)'),
    (pages(0, "heads", 2), r'state0 "latent": expected one head, found 2|pages of'),
    (pages(0, "rows_per_page", 64), r"expected 128 rows a page"),
    (pages(0, "kind", lib.APU_STATE_FIXED), r"expected a paged state"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_broken_plan(device: Device, change: Callable[[Rig], None], message: str) -> None:
    rig = whole()
    refused(rig, device, lambda: change(rig), message)


def test_too_few_experts_in_the_groups(device: Device) -> None:
    rig, _, _ = route(random(8, 96), random(TOKENS, 96), 3, (1, 1, 8, 2, lib.APU_GROUP_MAX), None)
    with pytest.raises(InvalidError, match="at most 2 experts a row, those of 2 groups"):
        Plan(rig, device)
