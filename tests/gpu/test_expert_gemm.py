"""GEMM grouped by expert: pairs sorted on the device, both halves against numpy, the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gemm_cases import FILES, Options, ceil_div, expected, kernel_of, make_rows
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, random_activations, random_weights
from matvec_cases import ACT_SILU, Floats, Side, make_matrix, quantize
from shim import Shim

SHIMS = [(32, False), (64, True)]


@pytest.fixture(params=SHIMS, ids=lambda p: f"w{p[0]}{'r' * p[1]}", scope="module")
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim(FILES, wave=request.param[0], reverse=request.param[1])


def choose(rows: int, used: int, experts: int, seed: int = 0) -> np.ndarray:
    """(T, k) ids, ascending in a row; some experts are used by all, some by none."""
    rng = np.random.default_rng((rows, used, experts, seed))
    weight = rng.random(experts) ** 4
    weight[experts // 2] = 0
    chosen = [
        np.sort(rng.choice(experts, used, replace=False, p=(weight + 1e-9) / (weight + 1e-9).sum()))
        for _ in range(rows)
    ]
    return np.array(chosen, np.int32)


class Sorted:
    """Pairs sorted by the kernels, as buffers."""

    def __init__(self, shim: Shim, ids: np.ndarray, experts: int, tile_rows: int) -> None:
        rows, used = ids.shape
        pairs = rows * used
        self.most = ceil_div(pairs, tile_rows) + min(experts, pairs)
        self.counts = shim.input(shim.args("StepCounts", rows=rows))
        self.sizes, self.pairs = shim.output(experts, np.uint32), shim.output(pairs, np.uint32)
        self.tiles, self.tile_count = shim.output((self.most, 4), np.uint32), shim.output(1, np.uint32)
        args = shim.args(
            "ExpertSortArgs",
            counts=self.counts,
            ids=shim.input(ids),
            sizes=self.sizes,
            pairs=self.pairs,
            tiles=self.tiles,
            tile_count=self.tile_count,
            used=used,
            experts=experts,
            tile_rows=tile_rows,
        )
        for kernel in ("expert_sizes", "expert_places"):
            shim.launch(kernel, experts, shim.threads(kernel), args)


@pytest.mark.parametrize(("rows", "used", "experts"), [(9, 2, 4), (70, 4, 9), (301, 3, 300)])
def test_sort(shim: Shim, rows: int, used: int, experts: int) -> None:
    shim.clear()
    ids = choose(rows, used, experts)
    made = Sorted(shim, ids, experts, 32)
    flat = ids.reshape(-1)
    assert np.array_equal(made.pairs.array, np.argsort(flat, kind="stable"))
    assert np.array_equal(made.sizes.array, np.bincount(flat, minlength=experts))
    begin = 0
    tiles = []
    for expert, size in enumerate(made.sizes.array):
        tiles += [[expert, begin + at, min(32, size - at), 0] for at in range(0, size, 32)]
        begin += size
    count = int(made.tile_count.array[0])
    assert count == len(tiles) <= made.most
    assert np.array_equal(made.tiles.array[:count], np.array(tiles))


def run_experts(
    shim: Shim,
    x: Floats,
    sides: Sequence[Side],
    ids: np.ndarray,
    experts: int,
    o: Options,
    second: bool = False,
) -> Floats:
    """(T * k, N): products of the pairs, or activated pairs of gate and up."""
    shim.clear()
    k, dtype = x.shape[1], sides[0].dtype
    pairs = ids.size
    name, shape, lds = kernel_of(dtype, o.large, o.staged, o.exact)
    made = Sorted(shim, ids, experts, shape.rows)
    n = len(sides[0].weights) // experts
    out = shim.output((pairs, n), np.float32)
    fields = [
        {
            "w": {**make_matrix(shim, side, k), "rows": n},
            "bias": 0 if side.bias is None else shim.input(side.bias),
            "out": out,
            "column_begin": n * m,
        }
        for m, side in enumerate(sides)
    ]
    pair = len(sides) == 2
    width = shape.columns // 2 if pair and name != "gemm_f32" else shape.columns
    common = {
        "counts": made.counts,
        "tiles": made.tiles,
        "tile_count": made.tile_count,
        "pairs": made.pairs,
        "sides": fields + [{}] * (4 - len(fields)),
        "side_count": len(sides),
        "activation": ACT_SILU if pair else 0,
        "pair": int(pair),
        "row_tiles": made.most,
        "max_rows": pairs,
        "all_columns": n * len(sides),
        "k": k,
        "columns": ceil_div(k, 256) * 256,
        "passes": 1,
        "split_steps": 1 << 20,
        "row_divisor": 1 if second else ids.shape[1],
    }
    if name == "gemm_f32":
        common["x"] = shim.input(x)
    else:
        source = x if dtype in FLOAT_TYPES else quantize(x)
        common["a"], common["a_scale"] = make_rows(shim, source, k, 1, made.pairs, 1 if second else ids.shape[1])
    grid = made.most * ceil_div(n, width)
    shim.launch(name, grid, shim.threads(name), shim.args("GemmArgs", **common), lds)
    return out.array.copy()


def values_of(dtype: Q, x: Floats) -> np.ndarray:
    return x.astype(np.float64) if dtype in FLOAT_TYPES else quantize(x).values(x.shape[1])


def products(dtype: Q, side: Side, values: np.ndarray, ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, k, N) in float64, and the bound of their error, for values (T, K) or (T, k, K)."""
    n = len(side.weights) // experts
    y, bound = expected(dtype, side.weights, values.reshape(-1, values.shape[-1]))
    y, bound = (v.reshape(*values.shape[:-1], experts, n) for v in (y, bound))
    if values.ndim == 2:
        y, bound = y[:, None], bound[:, None]
    at = np.broadcast_to(ids[:, :, None, None], (*ids.shape, 1, n))
    y, bound = (np.broadcast_to(v, (*ids.shape, experts, n)) for v in (y, bound))
    return np.take_along_axis(y, at, 2)[:, :, 0], np.take_along_axis(bound, at, 2)[:, :, 0]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [Q.Q4_0, Q.MXFP4, Q.Q4_K, Q.IQ1_S, Q.BF16, Q.F32], ids=lambda t: t.name.lower())
def test_first_half(shim: Shim, dtype: Q, large: bool) -> None:
    rows, used, experts, n, k = 21, 2, 4, 18, 256
    ids = choose(rows, used, experts)
    x = (random_activations(rows, k) / 64).astype(np.float32)
    cuts = tuple(n * e for e in range(1, experts)) if dtype is Q.Q4_K else ()
    biases = np.random.default_rng(1).standard_normal((2, experts, n)).astype(np.float32) * (dtype is not Q.Q4_0)
    sides = [
        Side(dtype, random_weights(dtype, experts * n, k, m), bias.reshape(-1), align=1, cuts=cuts)
        for m, bias in enumerate(biases)
    ]
    got = run_experts(shim, x, sides, ids, experts, Options(large=large)).reshape(rows, used, n)
    (gate, gate_bound), (up, up_bound) = (products(dtype, s, values_of(dtype, x), ids, experts) for s in sides)
    gate, up = (y + bias[ids] for y, bias in zip((gate, up), biases, strict=True))
    silu = gate / (1 + np.exp(-np.clip(gate, -700, None)))
    bound = 1.2 * np.abs(up) * gate_bound + (np.abs(silu) + gate_bound) * up_bound + 1e-5
    assert np.all(np.abs(got - silu * up) <= bound)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_second_half(shim: Shim, large: bool) -> None:
    rows, used, experts, n, k = 21, 3, 5, 37, 288
    dtype = Q.Q5_1
    ids = choose(rows, used, experts)
    x = random_activations(rows * used, k)
    bias = np.random.default_rng(1).standard_normal((experts, n)).astype(np.float32)
    side = Side(dtype, random_weights(dtype, experts * n, k), bias.reshape(-1), align=3)
    got = run_experts(shim, x, [side], ids, experts, Options(large=large), second=True)
    y, bound = products(dtype, side, values_of(dtype, x).reshape(rows, used, k), ids, experts)
    assert np.all(np.abs(got.reshape(rows, used, n) - (y + bias[ids])) <= bound + 1e-6)

    rng = np.random.default_rng(2)
    weights, residual = rng.random((rows, used)).astype(np.float32), rng.random((rows, n)).astype(np.float32)
    for r in (residual, None):
        out = shim.output((rows, n), np.float32)
        args = shim.args(
            "ExpertCombineArgs",
            counts=shim.input(shim.args("StepCounts", rows=rows)),
            products=shim.input(got),
            weights=shim.input(weights),
            residual=0 if r is None else shim.input(r),
            out=out,
            n=n,
            used=used,
        )
        shim.launch("expert_combine", (ceil_div(n, 256), rows + 3), 256, args)
        want = np.zeros((rows, n), np.float32) if r is None else r.copy()
        for slot in range(used):  # in this order, each step rounded
            want = want + weights[:, slot, None] * got.reshape(rows, used, n)[:, slot]
        assert np.array_equal(out.array, want)


def test_rows_do_not_depend_on_their_neighbours(shim: Shim) -> None:
    rows, used, experts, n, k = 40, 2, 3, 20, 256
    ids = choose(rows, used, experts)
    x = random_activations(rows, k)
    side = Side(Q.Q8_0, random_weights(Q.Q8_0, experts * n, k))
    whole = run_experts(shim, x, [side], ids, experts, Options()).reshape(rows, used, n)
    part = run_experts(shim, x[11:31], [side], ids[11:31], experts, Options(large=True)).reshape(-1, used, n)
    assert np.array_equal(whole[11:31].view(np.uint32), part.view(np.uint32))
