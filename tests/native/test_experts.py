"""ROUTE and EXPERTS against numpy in float64: ties, broken rows, empty experts, segments, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rig import NONE, OUTPUT, Rig, Step, refused, rms_norm

from apu_engine._native import Device, lib

F64 = NDArray[np.float64]
EPS = 1e-5
ROWS = 40
LIMIT = 2.5  # of mixtures with biases


@pytest.fixture(scope="module", params=[1, 2, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[Device]:
    with Device("cpu", threads=request.param) as device:
        yield device


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantize_q8_0(w: NDArray[np.float32]) -> tuple[NDArray[np.uint8], F64]:
    """(bytes (E, N, row bytes), the values that they stand for)."""
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    q = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
    packed = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], -1).reshape(*w.shape[:-1], -1)
    return np.ascontiguousarray(packed), (q * scale.astype(np.float64)).reshape(w.shape)


class Mixture:
    """EMBED x, ROUTE, gate and up, down; by default onto the residual x itself."""

    def __init__(
        self,
        x: NDArray[np.float32],
        router: NDArray[Any],
        k: int,
        F: int = 0,
        *,
        norm: NDArray[np.float32] | None = None,
        score: int = lib.APU_SCORE_SOFTMAX,
        divide: bool = True,
        scale: float = 1.0,
        floor: float = 0.0,
        kinds: str = "fff",
        cuts: tuple[int, int, int, int] = (1, 1, 1, 1),
        residual: str = "in place",
        precision: int = 0,
        biased: bool = False,
    ) -> None:
        D, E = x.shape[1], len(router)
        self.rig = rig = Rig(rows=ROWS, vocabulary=len(x))
        self.x = rig.input(x)
        self.ids = rig.scratch("ids", k, dtype=lib.APU_I32)
        self.weights = rig.scratch("weights", k)
        w = NONE if norm is None else rig.weight("norm", norm)
        self.biases: dict[str, NDArray[np.float32]] = {}

        def bias(name: str, *shape: int) -> int:
            if not biased:
                return NONE
            self.biases[name] = random(*shape, seed=sum(shape)) * np.float32(2)
            return rig.weight(name, self.biases[name].reshape(-1))

        rig.op(
            lib.APU_OP_ROUTE,
            ins=(self.x,),
            outs=(self.ids, self.weights),
            weights=(w, rig.weight("router", router, cuts=cuts[0]), NONE, NONE, bias("router_bias", E)),
            ints=(score, int(divide)),
            floats=(EPS, scale, floor),
        )
        self.h = self.out = NONE
        self.values: list[F64] = []
        if not F:
            return
        matrices = []
        for i, (name, shape) in enumerate((("gate", (E, F, D)), ("up", (E, F, D)), ("down", (E, D, F)))):
            data = random(*shape, seed=10 + i) * np.float32(shape[2] ** -0.5)
            if kinds[i] == "q":
                packed, values = quantize_q8_0(data)
                matrices.append(rig.weight(name, packed, dtype=lib.APU_Q8_0, shape=shape, cuts=cuts[1 + i]))
            else:
                data = data.astype(np.float16) if kinds[i] == "h" else data
                values = data.astype(np.float64)
                matrices.append(rig.weight(name, data, cuts=cuts[1 + i]))
            self.values.append(values)
        self.h = rig.scratch("h", (k, F))
        self.out = self.x if residual == "in place" else rig.scratch("out", D)
        rig.op(
            lib.APU_OP_EXPERTS,
            ins=(self.x, self.ids),
            outs=(self.h,),
            weights=(w, *matrices[:2], bias("gate_bias", E, F), bias("up_bias", E, F)),
            ints=(lib.APU_ACT_SWIGLU_OAI if biased else lib.APU_ACT_SILU, precision),
            floats=(EPS, LIMIT if biased else 0.0),
        )
        rig.op(
            lib.APU_OP_EXPERTS,
            ins=(self.h, self.ids, self.weights, NONE if residual == "none" else self.x),
            outs=(self.out,),
            weights=(NONE, matrices[2], NONE, bias("down_bias", E, D)),
            ints=(lib.APU_ACT_NONE, precision),
        )

    def expected(self, x: NDArray[np.float32], ids: NDArray[np.int32], weights: NDArray[np.float32]) -> F64:
        """(T, D) of the experts alone; x (T, D) already normed."""
        gate, up, down = self.values
        out = np.zeros(x.shape)
        for t, chosen in enumerate(ids):
            for e, weight in zip(chosen, weights[t], strict=True):
                g, u = gate[e] @ x[t], up[e] @ x[t]
                if not self.biases:
                    out[t] += weight * (down[e] @ (g / (1 + np.exp(-g)) * u))
                    continue
                g = np.minimum(g + self.biases["gate_bias"][e], LIMIT)
                u = np.clip(u + self.biases["up_bias"][e], -LIMIT, LIMIT)
                h = g / (1 + np.exp(-1.702 * g)) * (u + 1)
                out[t] += weight * (down[e] @ h + self.biases["down_bias"][e])
        return out


def routed(
    logits: F64, k: int, *, sigmoid: bool = False, divide: bool = True, scale: float = 1.0
) -> tuple[NDArray[np.int64], F64]:
    """The k best of (T, E), ids ascending, and their weights."""
    score = np.exp(logits - logits.max(-1, keepdims=True))
    score = 1 / (1 + np.exp(-logits)) if sigmoid else score / score.sum(-1, keepdims=True)
    ids = np.sort(np.argsort(-score, -1, kind="stable")[:, :k], -1)
    weights = np.take_along_axis(score, ids, -1)
    return ids, scale * (weights / weights.sum(-1, keepdims=True) if divide else weights)


@pytest.mark.parametrize("rows", [1, 2, 3, 9, ROWS])
@pytest.mark.parametrize(("E", "k"), [(1, 1), (5, 5), (8, 3), (130, 8)])
def test_route(workers: Device, rows: int, E: int, k: int) -> None:
    x, router, norm = random(64, 96), random(E, 96, seed=2) / np.float32(8), random(96, seed=3)
    for sigmoid in (False, True):
        for divide, scale in ((True, 1.0), (False, 2.5)):
            options = {"score": int(sigmoid), "divide": divide, "scale": scale, "norm": norm}
            mixture = Mixture(x, router, k, cuts=(min(E, 3), 1, 1, 1), **options)
            ids, weights = routed(
                rms_norm(x[:rows], norm, EPS) @ router.T.astype(np.float64),
                k, sigmoid=sigmoid, divide=divide, scale=scale,
            )  # fmt: skip
            with mixture.rig.build(workers) as plan:
                plan.run(Step().sequence(range(rows)))
                assert np.array_equal(plan.read(mixture.ids, rows), ids)
                np.testing.assert_allclose(plan.read(mixture.weights, rows), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["h", "q"])
def test_router_of_another_type_is_computed_in_float(device: Device, kind: str) -> None:
    x, router = random(64, 64), random(16, 64, seed=2)
    packed, values = quantize_q8_0(router)
    mixture = Mixture(x, router.astype(np.float16) if kind == "h" else router, 4)
    if kind == "h":
        values = router.astype(np.float16).astype(np.float64)
    else:
        mixture.rig.ops[-1]["w"][1] = mixture.rig.weight("q", packed, dtype=lib.APU_Q8_0, shape=router.shape)
    with mixture.rig.build(device) as plan:
        plan.run(Step().sequence(range(ROWS)))
        ids, weights = routed(x[:ROWS] @ values.T, 4)
        assert np.array_equal(plan.read(mixture.ids, ROWS), ids)
        np.testing.assert_allclose(plan.read(mixture.weights, ROWS), weights, rtol=1e-5)


def test_ties_go_to_the_lowest_ids(device: Device) -> None:
    x = np.ones((64, 32), np.float32)
    router = np.zeros((12, 32), np.float32)
    router[[3, 7, 9]] = 0.25  # the best three are equal, so are the other nine
    for k, expected in ((1, [3]), (2, [3, 7]), (3, [3, 7, 9]), (5, [0, 1, 3, 7, 9]), (12, list(range(12)))):
        mixture = Mixture(x, router, k)
        with mixture.rig.build(device) as plan:
            plan.run(Step().sequence(range(3)))
            assert plan.read(mixture.ids, 3).tolist() == [expected] * 3


def test_a_broken_row_stays_alone(device: Device) -> None:
    """A row of NaN still goes to k experts, and leaves its neighbours alone."""
    x, router = random(64, 64), random(8, 64, seed=2)
    clean = Mixture(x, router, 3, 32)
    broken = x.copy()
    broken[2, 5] = np.inf
    broken[4] = np.nan
    mixture = Mixture(broken, router, 3, 32)
    with clean.rig.build(device) as plan:
        plan.run(Step().sequence(range(9)))
        ids, out = plan.read(clean.ids, 9), plan.read(clean.out, 9)
    with mixture.rig.build(device) as plan:
        plan.run(Step().sequence(range(9)))
        found = plan.read(mixture.ids, 9)
        good = [0, 1, 3, 5, 6, 7, 8]
        assert np.array_equal(found[good], ids[good])
        assert np.array_equal(plan.read(mixture.out, 9)[good], out[good])
        for row in found[[2, 4]]:
            assert len(set(row)) == 3 and row.min() >= 0 and row.max() < 8
        assert np.isnan(plan.read(mixture.out, 9)[4]).all()


def test_scores_that_vanish_give_no_nan(device: Device) -> None:
    x, router = np.ones((64, 32), np.float32), np.full((6, 32), -100, np.float32)
    mixture = Mixture(x, router, 2, score=lib.APU_SCORE_SIGMOID, floor=2.0**-14)
    with mixture.rig.build(device) as plan:
        plan.run(Step().sequence([0]))
        assert plan.read(mixture.ids, 1).tolist() == [[0, 1]]
        assert plan.read(mixture.weights, 1).tolist() == [[0, 0]]


SHAPES = {  # E, k, F
    "usual": (8, 3, 96),
    "all": (4, 4, 64),
    "single": (1, 1, 64),
    "many": (200, 5, 32),
    "wide": (3, 2, 352),
}


@pytest.mark.parametrize("kinds", ["fff", "qqq", "fqh"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(workers: Device, shape: str, kinds: str) -> None:
    """Any number of rows equals the rows one by one, bit for bit, and numpy within the types' error."""
    E, k, F = SHAPES[shape]
    x, router, norm = random(64, 160), random(E, 160, seed=2) / np.float32(8), random(160, seed=3)
    cuts = (1, E, 2, min(7, E))  # one segment for each expert, and cuts within an expert
    mixture = Mixture(x, router, k, F, norm=norm, kinds=kinds, cuts=cuts)
    with mixture.rig.build(workers) as plan:
        single = []
        for token in range(ROWS):
            plan.run(Step().sequence([token]))
            single.append(plan.read(mixture.out, 1)[0])
        for rows in (2, 3, 8, 17, ROWS):
            plan.run(Step().sequence(range(rows)))
            assert np.array_equal(plan.read(mixture.out, rows), single[:rows]), rows
        ids, weights = plan.read(mixture.ids, ROWS), plan.read(mixture.weights, ROWS)
    expected = x[:ROWS] + mixture.expected(rms_norm(x[:ROWS], norm, EPS), ids, weights)
    tolerance = 0.02 if "q" in kinds else 1e-4
    assert np.abs(single - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("kinds", ["fff", "qqq"])
def test_biases_and_the_activation_that_goes_with_them(workers: Device, kinds: str) -> None:
    """Of the router, gate, up and down; gates and ups beyond their limits."""
    E, k, F = SHAPES["usual"]
    x, router, norm = random(64, 160), random(E, 160, seed=2) / np.float32(8), random(160, seed=3)
    mixture = Mixture(x, router, k, F, norm=norm, kinds=kinds, biased=True)
    normed = rms_norm(x[:ROWS], norm, EPS)
    with mixture.rig.build(workers) as plan:
        plan.run(Step().sequence(range(ROWS)))
        whole, ids, weights = (plan.read(at, ROWS) for at in (mixture.out, mixture.ids, mixture.weights))
        for token in (0, 7, ROWS - 1):
            plan.run(Step().sequence([token]))
            assert np.array_equal(plan.read(mixture.out, 1)[0], whole[token])
    expected_ids, expected_weights = routed(normed @ router.T.astype(np.float64) + mixture.biases["router_bias"], k)
    assert np.array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)
    expected = x[:ROWS] + mixture.expected(normed, ids, weights)
    assert np.abs(whole - expected).max() <= (0.02 if "q" in kinds else 1e-4) * np.abs(expected).max()


@pytest.mark.parametrize("rows", [1, 2, 9, ROWS])
def test_exact_precision(workers: Device, rows: int) -> None:
    x, router = random(64, 96), random(8, 96, seed=2) / np.float32(8)
    mixture = Mixture(x, router, 3, 64, kinds="qqq", precision=lib.APU_PRECISION_EXACT)
    with mixture.rig.build(workers) as plan:
        plan.run(Step().sequence(range(rows)))
        ids, weights = plan.read(mixture.ids, rows), plan.read(mixture.weights, rows)
        expected = x[:rows] + mixture.expected(x[:rows], ids, weights)
        np.testing.assert_allclose(plan.read(mixture.out, rows), expected, atol=1e-4)


@pytest.mark.parametrize("residual", ["in place", "apart", "none"])
@pytest.mark.parametrize("rows", [1, 9])
def test_residual(device: Device, residual: str, rows: int) -> None:
    x, router = random(64, 96), random(8, 96, seed=2) / np.float32(8)
    mixture = Mixture(x, router, 3, 64, residual=residual)
    with mixture.rig.build(device) as plan:
        plan.run(Step().sequence(range(rows)))
        ids, weights = plan.read(mixture.ids, rows), plan.read(mixture.weights, rows)
        expected = mixture.expected(x[:rows], ids, weights) + (0 if residual == "none" else x[:rows])
        np.testing.assert_allclose(plan.read(mixture.out, rows), expected, atol=1e-4)
        if residual != "in place":
            assert np.array_equal(plan.read(mixture.x, rows), x[:rows])


@pytest.mark.parametrize("kinds", ["fff", "qqq"])
def test_all_rows_at_one_expert(workers: Device, kinds: str) -> None:
    """Others stay empty, and one has every row: more than fit a tile's narrow part."""
    x = np.abs(random(64, 64))
    router = np.full((6, 64), -1, np.float32)
    router[4] = 1
    mixture = Mixture(x, router, 1, 352, kinds=kinds)
    with mixture.rig.build(workers) as plan:
        plan.run(Step().sequence(range(ROWS)))
        ids, weights, out = (plan.read(t, ROWS) for t in (mixture.ids, mixture.weights, mixture.out))
        assert (ids == 4).all()
        expected = x[:ROWS] + mixture.expected(x[:ROWS], ids, weights)
        assert np.abs(out - expected).max() <= (0.02 if kinds == "qqq" else 1e-4) * np.abs(expected).max()
        plan.run(Step().sequence([7]))
        assert np.array_equal(plan.read(mixture.out, 1)[0], out[7])


def test_any_slice_order_stays_in_bounds(workers: Device) -> None:
    """Where the ids' memory was reused, a slice run out of order finds numbers that are no ids."""
    mixture = Mixture(random(64, 64), random(8, 64, seed=2), 3, 32)
    rig = mixture.rig
    garbage = rig.input(np.full((64, 3), -1e30, np.float32), "garbage")
    rig.tensors[garbage]["offset"] = rig.tensors[mixture.ids]["offset"]
    with rig.build(workers) as plan:
        for rows in (1, ROWS):
            step = Step().sequence(range(rows))
            plan.run(step)  # ends with garbage
            plan.run(step, 2, 4)
            assert np.isfinite(plan.read(mixture.x, rows)).all()


# ---- what validation refuses ---------------------------------------------------------------------------------------


def whole() -> Mixture:
    """Ops: 0 embed, 1 route, 2 gate and up, 3 down; T 40, D 64, E 8, k 3, F 32."""
    return Mixture(random(64, 64), random(8, 64, seed=2), 3, 32, norm=random(64, seed=3), residual="apart")


def ident(m: Mixture, name: str) -> int:
    return next(i for i, item in enumerate(m.rig.tensors) if item["name"] == name)


def put(op: int, field: str, index: int, value: Any) -> Callable[[Mixture], None]:
    def change(m: Mixture) -> None:
        m.rig.ops[op][field][index] = ident(m, value) if isinstance(value, str) else value

    return change


def tensor(name: str, key: str, value: Any) -> Callable[[Mixture], None]:
    def change(m: Mixture) -> None:
        m.rig.tensors[ident(m, name)][key] = value

    return change


def extra(op: int, field: str, index: int, *shape: int, dtype: int = lib.APU_F32, rows: int = -1) -> Any:
    """A new scratch tensor "extra" in an operand's place."""

    def change(m: Mixture) -> None:
        made = m.rig.scratch("extra", shape, *([] if rows < 0 else [rows]), dtype=dtype)
        m.rig.ops[op][field][index] = made

    return change


def onto(name: str, other: str) -> Callable[[Mixture], None]:
    def change(m: Mixture) -> None:
        m.rig.tensors[ident(m, name)]["offset"] = m.rig.tensors[ident(m, other)]["offset"]

    return change


def without_route(m: Mixture) -> None:
    del m.rig.ops[1]


BROKEN: list[tuple[Callable[[Mixture], None], str]] = [
    (put(1, "in", 0, NONE), "op 1 ROUTE: in0 is missing"),
    (put(1, "in", 0, "ids"), 'op 1 ROUTE: in0 "ids": expected F32, found I32'),
    (put(1, "in", 1, "h"), "op 1 ROUTE: in1 is .* does not use it"),
    (put(1, "w", 1, NONE), "op 1 ROUTE: w1 is missing"),
    (put(1, "w", 0, "router"), r'op 1 ROUTE: w0 "router": expected shape \(64\), found \(8, 64\)'),
    (put(1, "w", 1, "gate"), r'op 1 ROUTE: w1 "gate": expected shape \(any, 64\), found \(8, 32, 64\)'),
    (put(1, "out", 0, "weights"), 'op 1 ROUTE: out0 "weights": expected I32, found F32'),
    (put(1, "out", 1, "ids"), 'op 1 ROUTE: out1 "ids": expected F32, found I32'),
    (put(1, "out", 1, "h"), 'op 1 ROUTE: out1 "h": expected 3 elements a row, found 96'),
    (put(1, "out", 1, NONE), "op 1 ROUTE: out1 is missing"),
    (extra(1, "out", 0, 9, dtype=lib.APU_I32), r'op 1 ROUTE: out0 "extra" \(40, 9\): expected at most 8 experts a row'),
    (extra(1, "out", 0, 3, dtype=lib.APU_I32, rows=OUTPUT), 'op 1 ROUTE: out0 "extra".*rows differ from those of "x"'),
    (put(1, "i", 0, 3), r"op 1 ROUTE: i0 \(score\) is 3, expected 0 to 2"),
    (put(1, "i", 1, 2), r"op 1 ROUTE: i1 \(divide by the sum\) is 2"),
    (put(1, "f", 0, -1.0), r"op 1 ROUTE: f0 \(eps\) is -1"),
    (put(1, "f", 1, 0.0), r"op 1 ROUTE: f1 \(scale\) is 0"),
    (put(1, "f", 2, -1.0), r"op 1 ROUTE: f2 \(smallest divisor\) is -1"),
    (onto("ids", "x"), 'op 1 ROUTE: out0 "ids" lies on in0 "x"'),
    (onto("weights", "ids"), 'op 1 ROUTE: out1 "weights" lies on out0 "ids"'),
    (without_route, 'op 1 EXPERTS: in1 "ids": expected ids of an earlier ROUTE'),
    (put(2, "in", 1, NONE), "op 2 EXPERTS: in1 is missing"),
    (put(2, "in", 1, "weights"), 'op 2 EXPERTS: in1 "weights": expected I32, found F32'),
    (put(2, "in", 2, "weights"), "op 2 EXPERTS: in2 is .* does not use it"),
    (put(2, "w", 1, "router"), r'op 2 EXPERTS: w1 "router": expected shape \(8, any, 64\), found \(8, 64\)'),
    (put(2, "w", 1, "down"), r'op 2 EXPERTS: w1 "down": expected shape \(8, any, 64\), found \(8, 64, 32\)'),
    (tensor("gate", "shape", (4, 64, 64)), r'op 2 EXPERTS: w1 "gate": expected shape \(8, any, 64\)'),
    (put(2, "w", 2, "down"), r'op 2 EXPERTS: w2 "down": expected shape \(8, 32, 64\), found \(8, 64, 32\)'),
    (put(2, "w", 2, NONE), "op 2 EXPERTS: w2 is missing"),
    (put(2, "w", 3, "norm"), r'op 2 EXPERTS: w3 "norm": expected shape \(256\), found \(64\)'),
    (put(2, "w", 5, "up"), "op 2 EXPERTS: w5 is .* does not use it"),
    (put(1, "w", 4, "norm"), r'op 1 ROUTE: w4 "norm": expected shape \(8\), found \(64\)'),
    (put(2, "w", 0, "router"), r'op 2 EXPERTS: w0 "router": expected shape \(64\)'),
    (put(2, "out", 0, "out"), 'op 2 EXPERTS: out0 "out": expected 96 elements a row, found 64'),
    (put(2, "i", 0, 9), r"op 2 EXPERTS: i0 \(activation\) is 9"),
    (put(2, "i", 1, lib.APU_PRECISION_FINE), r"op 2 EXPERTS: i1 \(precision\) is 2, expected 0 to 1"),
    (put(2, "f", 0, float("nan")), "op 2 EXPERTS: f0 is nan"),
    (onto("h", "x"), 'op 2 EXPERTS: out0 "h" lies on in0 "x"'),
    (put(3, "in", 0, "x"), r'op 3 EXPERTS: in0 "x" \(40, 64\): expected a part for each of 3 experts'),
    (put(3, "in", 2, NONE), "op 3 EXPERTS: in2 is missing"),
    (put(3, "in", 2, "x"), 'op 3 EXPERTS: in2 "x": expected 3 elements a row, found 64'),
    (put(3, "in", 3, "h"), 'op 3 EXPERTS: in3 "h": expected 64 elements a row, found 96'),
    (put(3, "in", 3, "ids"), 'op 3 EXPERTS: in3 "ids": expected F32, found I32'),
    (put(3, "w", 0, "norm"), "op 3 EXPERTS: w0 is .* does not use it"),
    (put(3, "w", 1, "up"), r'op 3 EXPERTS: w1 "up": expected shape \(8, any, 32\), found \(8, 32, 64\)'),
    (put(3, "w", 2, "up"), "op 3 EXPERTS: w2 is .* does not use it"),
    (put(3, "out", 0, "h"), 'op 3 EXPERTS: out0 "h": expected 64 elements a row, found 96'),
    (extra(3, "out", 0, 64, rows=OUTPUT), 'op 3 EXPERTS: out0 "extra".*rows differ'),
    (onto("out", "h"), 'op 3 EXPERTS: out0 "out" lies on in0 "h"'),
    (onto("weights", "out"), 'op 3 EXPERTS: out0 "out" lies on in2 "weights"'),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_broken_plan(device: Device, change: Callable[[Mixture], None], message: str) -> None:
    mixture = whole()
    refused(mixture.rig, device, lambda: change(mixture), message)
