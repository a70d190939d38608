"""Kernels over rows (rows.hip) on the shim: embedding of every type, norms, and what lies outside of the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from kernel_cases import FLOAT_TYPES, QUANTIZED_TYPES, random_weights, truth
from rig import OUTPUT, STEP, rms_norm
from shim import Buffer, Shim, every_shim

EMBED, NORM = 256, 512  # threads
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def shims() -> list[Shim]:
    return list(every_shim(["rows.hip"]))


def counts(shim: Shim, rows: int, outputs: int = 0) -> Buffer:
    return shim.input(shim.args("StepCounts", rows=rows, sequences=1, outputs=outputs))


def embed(
    shim: Shim,
    dtype: Q,
    table: Array,
    k: int,
    rows: list[tuple[int, int]],
    *,
    cuts: int = 1,
    scale: float = 1,
    gap: int = 0,
    copies: int = 1,
) -> Array:
    """Of rows (token, previous) after a step that sampled tokens 3, -1, 1; one block more than there are rows."""
    n, row_bytes = table.shape
    begins = [n * i // cuts for i in range(cuts)]
    segments = []
    for begin, end in zip(begins, [*begins[1:], n], strict=True):
        part = np.pad(table[begin:end], ((0, 0), (0, gap))).reshape(-1)[: (end - begin) * (row_bytes + gap) - gap]
        data = shim.input(part, align=1, padding=16)
        segments.append(
            shim.args(
                "Segment", address=data.address, row_begin=begin, row_count=end - begin, row_stride=row_bytes + gap
            )
        )
    matrix = shim.args(
        "Matrix",
        data=segments[0].address,
        row_stride=row_bytes + gap,
        segments=shim.input(segments),
        segment_count=cuts,
        rows=n,
        k=k,
        type=int(dtype),
    )
    items = [shim.args("Row", token=token, previous=previous) for token, previous in rows]
    out = shim.output((len(rows) + 1, copies * k), np.float32)
    args = shim.args(
        "EmbedArgs",
        table=matrix,
        counts=counts(shim, len(rows)),
        rows=shim.input(items),
        sampled=shim.input(np.array([3, -1, 1], np.int32)),
        out=out,
        scale=scale,
        copies=copies,
    )
    shim.launch("embed", len(rows) + 1, EMBED, args)
    shim.clear()
    assert np.isnan(out.array[-1]).all()
    return out.array[:-1]


@pytest.mark.parametrize("dtype", FLOAT_TYPES + QUANTIZED_TYPES, ids=lambda dtype: dtype.name)
def test_embed_every_type(shims: list[Shim], dtype: Q) -> None:
    k = 96 if dtype in FLOAT_TYPES else 512
    table = random_weights(dtype, 7, k)
    want = truth(dtype, table)
    for shim in shims:
        out = embed(shim, dtype, table, k, [(6, 0), (0, 0), (-1, 2)])
        assert np.array_equal(out, want[[6, 0, 1]])


@pytest.mark.parametrize("k", [1, 18, 577, 4097])
def test_embed_of_odd_sizes_in_segments(shims: list[Shim], k: int) -> None:
    table = random_weights(Q.F16, 9, k)
    want = truth(Q.F16, table) * np.float32(2.5)
    for shim in shims:
        out = embed(shim, Q.F16, table, k, [(t, 0) for t in range(9)], cuts=4, scale=2.5, gap=3)
        assert np.array_equal(out, want)


def test_embed_without_a_token_is_nan(shims: list[Shim]) -> None:
    table = random_weights(Q.F32, 4, 300)
    for shim in shims:
        out = embed(shim, Q.F32, table, 300, [(-1, 1), (-1, 0)])
        assert np.isnan(out[0]).all() and np.array_equal(out[1], truth(Q.F32, table)[3])


@pytest.mark.parametrize("k", [64, 513])
def test_embed_of_several_copies(shims: list[Shim], k: int) -> None:
    table = random_weights(Q.F16, 5, k)
    for shim in shims:
        out = embed(shim, Q.F16, table, k, [(4, 0), (2, 0), (-1, 1)], copies=4)
        assert np.array_equal(out[:2], np.tile(truth(Q.F16, table)[[4, 2]], 4)) and np.isnan(out[2]).all()


@pytest.mark.parametrize("d", [1, 100, 288, 2051, 7168, 8196])
@pytest.mark.parametrize("variant", ["plain", "weight", "residual", "in place"])
def test_rms_norm(shims: list[Shim], d: int, variant: str) -> None:
    rng = np.random.default_rng(d)
    x = rng.standard_normal((5, d)).astype(np.float32)
    weight = None if variant == "plain" else rng.standard_normal(d).astype(np.float32)
    residual = rng.standard_normal((5, d)).astype(np.float32) if variant in ("residual", "in place") else None
    want = rms_norm(x, weight, 1e-5) + (0 if residual is None else residual)
    for shim in shims:
        for kind, count in ((STEP, 4), (OUTPUT, 3), (0, 5)):
            out = shim.output((6, d), np.float32)
            if variant == "in place" and residual is not None:
                out.array[:5] = residual
            args = shim.args(
                "NormArgs",
                count=shim.args("RowCount", counts=counts(shim, 4, 3), kind=kind, fixed=5),
                weight=0 if weight is None else shim.input(weight),
                residual=0 if residual is None else out if variant == "in place" else shim.input(residual),
                d=d,
                eps=1e-5,
                out=out,
                **{"in": shim.input(x)},
            )
            shim.launch("rms_norm", 6, NORM, args)
            shim.clear()
            np.testing.assert_allclose(out.array[:count], want[:count], rtol=2e-6, atol=2e-6)
            rest = out.array[count:]
            untouched = residual[count:] if variant == "in place" and residual is not None else rest[:0]
            assert np.array_equal(rest[: len(untouched)], untouched) and np.isnan(rest[len(untouched) :]).all()


def test_a_rows_bits_do_not_depend_on_its_place(shims: list[Shim]) -> None:
    x = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    for shim in shims:
        outs = []
        for order in ([0, 1, 2], [2, 1, 0]):
            out = shim.output((3, 1000), np.float32)
            args = shim.args("NormArgs", count={"fixed": 3}, d=1000, out=out, **{"in": shim.input(x[order])})
            shim.launch("rms_norm", 3, NORM, args)
            outs.append(out.array[order])
        shim.clear()
        assert np.array_equal(outs[0], outs[1])


def test_gather_norm(shims: list[Shim]) -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((6, 200)).astype(np.float32), rng.standard_normal(200).astype(np.float32)
    picked = [5, 0, 3, 3]
    for shim in shims:
        out = shim.output((5, 200), np.float32)
        args = shim.args(
            "GatherArgs",
            counts=counts(shim, 6, 4),
            outputs=shim.input([shim.args("Output", row=r) for r in picked]),
            weight=shim.input(weight),
            out=out,
            d=200,
            eps=1e-6,
            **{"in": shim.input(x)},
        )
        shim.launch("gather_norm", 5, NORM, args)
        shim.clear()
        np.testing.assert_allclose(out.array[:4], rms_norm(x[picked], weight, 1e-6), rtol=2e-6, atol=2e-6)
        assert np.isnan(out.array[4]).all()
