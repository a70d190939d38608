"""The router's kernels (route.hip) on the shim: products, scores, the k best and the weights, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import random_weights, truth
from rig import STEP
from shim import Shim, every_shim

THREADS = 256
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(3)
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def shims() -> list[Shim]:
    return list(every_shim(["route.hip"]))


def count(shim: Shim, rows: int) -> Any:
    return shim.args("RowCount", counts=shim.input(shim.args("StepCounts", rows=rows)), kind=STEP)


def products(
    shim: Shim,
    kernel: str,
    dtype: Q,
    router: Array,
    x: Array,
    norm: Array | None,
    parts: int,
    align: int = 16,
    share: int = 0,
) -> Array:
    """(T, E); the grid covers more rows than there are; `share` waves have an expert's parts, by default one each."""
    n, row_bytes = router.shape
    many = kernel.endswith("many")
    experts = 4 if kernel in ("route_scores_f32_many", "route_scores_f16_many") else 1
    matrix = {
        "data": shim.input(router, align=align, padding=16),
        "row_stride": row_bytes,
        "segment_count": 1,
        "rows": n,
        "k": x.shape[1],
        "type": int(dtype),
    }
    scores = shim.output((len(x) + 1, n), np.float32)
    args = shim.args(
        "RouteArgs",
        count=count(shim, len(x)),
        router=matrix,
        norm=0 if norm is None else shim.input(norm),
        scores=scores,
        eps=1e-6,
        parts=parts,
        share=share or parts,
        **{"in": shim.input(np.concatenate([x, x[:1]]))},  # memory holds the bucket's rows
    )
    block = THREADS // shim.wave // (share or parts) * experts
    shim.launch(kernel, (-(-n // block), len(x) // 8 + 1 if many else len(x) + 1), THREADS, args)
    shim.clear()
    assert np.isnan(scores.array[-1]).all()
    return scores.array[:-1]


def exact(router: Array, x: Array, norm: Array | None) -> Array:
    x = x.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * norm
    return x @ router.astype(np.float64).T


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("d", "experts"), [(4, 3), (128, 9), (768, 33), (1284, 8)])
@pytest.mark.parametrize("dtype", [Q.F32, Q.F16], ids=lambda dtype: dtype.name)
def test_products_of_aligned_rows(shims: list[Shim], dtype: Q, d: int, experts: int, normed: bool) -> None:
    """Of one row and of many: near the exact ones, and the same bits however many rows there are."""
    rng = np.random.default_rng((d, experts))
    router = rng.standard_normal((experts, d)).astype(np.float32 if dtype == Q.F32 else np.float16)
    name = f"route_scores_{dtype.name.lower()}"
    x = rng.standard_normal((11, d)).astype(np.float32)
    norm = rng.standard_normal(d).astype(np.float32) if normed else None
    want = exact(router, x, norm)
    for shim in shims:
        for parts in (1, 2, THREADS // shim.wave):
            few = products(shim, name, dtype, router.view(np.uint8), x, norm, parts)
            np.testing.assert_allclose(few, want, atol=2e-6 * np.abs(want).max() + 1e-6 * np.sqrt(d))
            for share in {1, max(parts // 2, 1), parts}:
                many = products(shim, f"{name}_many", dtype, router.view(np.uint8), x, norm, parts, share=share)
                assert np.array_equal(few.view(np.uint32), many.view(np.uint32))


@pytest.mark.parametrize("dtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_K, Q.MXFP4], ids=lambda dtype: dtype.name)
def test_products_of_any_type_at_any_address(shims: list[Shim], dtype: Q) -> None:
    for d in (256, 33) if dtype in (Q.F32, Q.F16, Q.BF16) else (512,):
        router = random_weights(dtype, 10, d)
        x = np.random.default_rng(d).standard_normal((9, d)).astype(np.float32)
        want = exact(truth(dtype, router), x, None)
        for shim in shims:
            few = products(shim, "route_scores_any", dtype, router, x, None, 2, align=1)
            many = products(shim, "route_scores_any_many", dtype, router, x, None, 2, align=1)
            np.testing.assert_allclose(few, want, atol=4e-6 * np.abs(want).max() + 1e-6)
            assert np.array_equal(few.view(np.uint32), many.view(np.uint32))


@pytest.mark.parametrize(("experts", "k"), [(9, 2), (64, 8), (128, 8), (200, 5), (256, 8)])
def test_one_kernel_for_few_rows(shims: list[Shim], experts: int, k: int) -> None:
    """The last block of a row's products chooses, twice over with the same counters."""
    rng = np.random.default_rng(experts)
    router, x = rng.standard_normal((experts, 512)).astype(np.float32), rng.standard_normal((3, 512)).astype(np.float32)
    norm = rng.standard_normal(512).astype(np.float32)
    logits = exact(router, x, norm) / 8
    want = np.exp(logits - logits.max(1, keepdims=True))
    wanted_ids, wanted_weights = reference(want / want.sum(1, keepdims=True), k, 1, 1.5)
    for shim in shims:
        counters = shim.output(4, np.uint32)
        counters.array[:] = 0
        ids, weights = shim.output((4, k), np.int32), shim.output((4, k), np.float32)
        args = shim.args(
            "RouteArgs",
            count=count(shim, 3),
            router={
                "data": shim.input(router),
                "row_stride": 2048,
                "segment_count": 1,
                "rows": experts,
                "k": 512,
                "type": int(Q.F32),
            },
            norm=shim.input(norm / 8),
            scores=shim.output((4, experts), np.float32),
            ids=ids,
            weights=weights,
            counters=counters,
            eps=1e-6,
            parts=2,
            k=k,
            score=SOFTMAX,
            divide=1,
            scale=1.5,
            **{"in": shim.input(np.concatenate([x, x[:1]]))},
        )
        for _ in range(2):
            shim.launch("route_scores_f32", (-(-experts // (THREADS // shim.wave // 2)), 4), THREADS, args)
            assert (counters.array == 0).all()
        shim.clear()
        assert np.array_equal(ids.array[:3], wanted_ids) and (ids.array[3] == -1).all()
        np.testing.assert_allclose(weights.array[:3], wanted_weights, rtol=2e-5)


def choose(shim: Shim, logits: Array, k: int, **fields: Any) -> tuple[Array, Array]:
    """Ids and weights; one block more than there are rows."""
    rows, experts = logits.shape
    ids, weights = shim.output((rows + 1, k), np.int32), shim.output((rows + 1, k), np.float32)
    options = {"score": SOFTMAX, "divide": 0, "scale": 1.0, "floor": 0.0, **fields}
    args = shim.args(
        "RouteArgs",
        count=count(shim, rows),
        scores=shim.input(np.concatenate([logits, logits[:1]])),  # memory holds the bucket's rows
        router={"rows": experts},
        ids=ids,
        weights=weights,
        k=k,
        **options,
    )
    shim.launch("route_choose", rows + 1, THREADS, args)
    shim.clear()
    assert (ids.array[rows] == -1).all() and np.isnan(weights.array[rows]).all()
    return ids.array[:rows], weights.array[:rows]


def reference(scores: Array, k: int, divide: int = 0, scale: float = 1, floor: float = 0) -> tuple[Array, Array]:
    """Ids and weights of (T, E) scores: the CPU's rules."""
    rank = np.where(np.isnan(scores), -np.inf, scores)
    ids = np.sort(np.argsort(-rank, axis=1, kind="stable")[:, :k], axis=1)
    weights = np.take_along_axis(scores, ids, 1).astype(np.float64)
    if divide:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), floor)
    return ids, weights * scale


@pytest.mark.parametrize(
    ("experts", "k"), [(4, 1), (4, 4), (60, 6), (128, 8), (256, 8), (300, 20), (520, 300), (1030, 9), (2100, 1100)]
)
@pytest.mark.parametrize("score", [SOFTMAX, SIGMOID, SQRT_SOFTPLUS])
def test_choice(shims: list[Shim], experts: int, k: int, score: int) -> None:
    logits = np.random.default_rng((experts, k)).standard_normal((3, experts)).astype(np.float32) * 3
    logits[1, : experts // 2] = logits[1, 0]  # equals: the lower ids
    wide = logits.astype(np.float64)
    want = 1 / (1 + np.exp(-wide))
    if score == SQRT_SOFTPLUS:
        wide[2] = logits[2] = 12 * logits[2]  # from where exp vanishes to where it is all there is
        want = np.sqrt(np.log1p(np.exp(wide)))
    if score == SOFTMAX:
        want = np.exp(wide - wide.max(1, keepdims=True))
        want /= want.sum(1, keepdims=True)
    for shim in shims:
        for rule in ({}, {"divide": 1, "scale": 2.5, "floor": 1e-20}, {"divide": 1, "scale": 1.0, "floor": 1e9}):
            ids, weights = choose(shim, logits, k, score=score, **rule)
            wanted_ids, wanted_weights = reference(want, k, **rule)
            assert np.array_equal(ids, wanted_ids)
            np.testing.assert_allclose(weights, wanted_weights, rtol=3e-6)


def test_a_broken_row_still_goes_to_k_experts(shims: list[Shim]) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    logits[0, 7] = np.nan
    for shim in shims:
        ids, weights = choose(shim, logits, 4)  # softmax: all NaN
        assert ids[0].tolist() == [0, 1, 2, 3] and np.isnan(weights[0]).all()
        ids, weights = choose(shim, logits, 40, score=SIGMOID)
        assert ids[0].tolist() == list(range(40)) and np.isnan(weights[0]).sum() == 1
        assert 7 not in choose(shim, logits, 39, score=SIGMOID)[0][0]


@pytest.mark.parametrize(
    ("experts", "k", "groups", "used", "sum2"),
    [
        (16, 3, 4, 2, 1),
        (160, 6, 8, 3, 0),
        (256, 8, 8, 4, 1),
        (256, 8, 256, 9, 0),
        (640, 8, 8, 3, 1),
        (1100, 20, 1, 1, 0),
    ],
)
@pytest.mark.parametrize("softmax", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_within_groups(
    shims: list[Shim], experts: int, k: int, groups: int, used: int, sum2: int, softmax: int, biased: bool
) -> None:
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((4, experts)).astype(np.float32) * 3
    logits[1] = logits[1, 0]  # equals: the lower groups and ids
    logits[2, ::3] = np.nan if not softmax else logits[2, 0]
    bias = rng.standard_normal(experts).astype(np.float32) * np.float32(0.05 if softmax else 0.4)
    score = 1 / (1 + np.exp(-logits))
    if softmax:
        score = np.exp(logits - logits.max(1, keepdims=True))
        score /= score.sum(1, keepdims=True)
    rank = np.where(np.isnan(score), -np.inf, score + (bias if biased else 0)).astype(np.float32)
    parts = np.sort(rank.reshape(4, groups, -1), -1)
    of_group = parts[..., -2:].sum(-1) if sum2 else parts[..., -1]
    worse = np.argsort(-of_group, axis=1, kind="stable")[:, used:]
    np.put_along_axis(rank.reshape(4, groups, -1), worse[..., None], -np.inf, 1)
    ids, _ = reference(rank, k)
    for shim in shims:
        options = {"score": SOFTMAX if softmax else SIGMOID, "groups": groups, "groups_used": used, "group_sum2": sum2}
        found, weights = choose(shim, logits, k, bias=shim.input(bias) if biased else 0, **options)
        assert np.array_equal(found, ids)
        np.testing.assert_allclose(weights, np.take_along_axis(score, ids, 1), rtol=3e-6)


@pytest.mark.parametrize(("experts", "k"), [(8, 1), (256, 6), (1100, 1030)])
def test_experts_of_tokens(shims: list[Shim], experts: int, k: int) -> None:
    """Rows take what the table says of their token, of the one sampled before, and of token 0 where there is none."""
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((4, experts)).astype(np.float32)
    table = np.array([rng.permutation(experts)[:k] for _ in range(5)], np.int32)
    table[1, 0] = -7  # damaged: the last expert
    ids = np.sort(np.where(table < 0, experts - 1, table)[[4, 2, 0, 1]], -1)
    score = np.sqrt(np.log1p(np.exp(logits.astype(np.float64))))
    weights = np.take_along_axis(score, ids, 1)
    tokens = [{"token": 4}, {"token": -1, "previous": 1}, {"token": -1, "previous": 0}, {"token": 1}]
    for shim in shims:
        found = choose(
            shim,
            logits,
            k,
            score=SQRT_SOFTPLUS,
            divide=1,
            scale=1.5,
            table={"data": shim.input(table.view(np.uint8), align=1), "row_stride": 4 * k, "segment_count": 1},
            tokens=shim.input([shim.args("Row", **row) for row in [*tokens, tokens[0]]]),
            sampled=shim.input(np.array([-1, 2], np.int32)),
        )
        assert np.array_equal(found[0], ids)
        np.testing.assert_allclose(found[1], 1.5 * weights / weights.sum(1, keepdims=True), rtol=3e-6)
