"""Expert matvec kernels through the shim against numpy, and EXPERTS of few rows on the stand-in's GPU."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import test_experts as native_experts
from gguf import GGMLQuantizationType as Q
from kernel_cases import QUANTIZED_TYPES, random_activations, random_weights, truth
from matvec_cases import (
    ACT_GELU_TANH,
    ACT_NONE,
    ACT_SILU,
    EXTRA,
    FLOAT_ITEM,
    FLOAT_SET,
    ITEM,
    SET,
    WAVES,
    Side,
    make_activations,
    make_matrix,
    quantize,
)
from numpy.typing import NDArray
from rig import Step, rms_norm
from shim import Shim

from apu_engine._native import Device, lib

FILES = ["expert_matvec.hip"]
SHIMS = [(32, False), (32, True), (64, False), (64, True)]
TUNED = [
    Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K,
    Q.IQ4_NL, Q.IQ4_XS, Q.MXFP4, Q.IQ2_XXS,
]  # fmt: skip
FLOATS = [Q.F32, Q.F16, Q.BF16]
KINDS = [(t.name.lower(), t) for t in FLOATS + TUNED] + [("any", t) for t in QUANTIZED_TYPES if t not in TUNED]
KINDS += [("exact", t) for t in (Q.Q8_0, Q.Q2_K, Q.IQ3_S)]
CASES = [(kind, SHIMS[(i + j) % 4]) for i, kind in enumerate(KINDS) for j in (0, 3)]


def launch(
    shim: Shim, name: str, x: NDArray[np.float32], sides: list[Side], ids: NDArray[np.int32], n: int, **fields: Any
) -> NDArray[np.float32]:
    """(T, k, N), or (T, N) of the second half; `fields` are further ones of ExpertMatvecArgs."""
    shim.clear()
    k, (rows, used), second = x.shape[1], ids.shape, int(fields.pop("second", 0))
    splits, steps = fields.pop("splits", 1), fields.pop("steps", 1)
    floats = name in ("f32", "f16", "bf16", "exact")
    columns = shim.wave * (FLOAT_ITEM if floats and name != "exact" else ITEM)
    slices, pair = -(-k // columns), len(sides) == 2
    set_rows = (FLOAT_SET if floats and name != "exact" else SET) * steps * WAVES // splits
    lds = 4 * slices * (used if second else 1) * set_rows
    if not floats and name != "any":
        elements, size = gguf.GGML_QUANT_SIZES[sides[0].dtype]
        lds += WAVES * SET * (columns // elements * size + EXTRA)
    for name_, array in list(fields.items()):
        fields[name_] = shim.input(array) if isinstance(array, np.ndarray) else array
    bucket = rows + 1
    units = bucket if second else bucket * used
    out = shim.output((rows, n) if second else (rows, used, n), np.float32)
    matrices = [{**make_matrix(shim, side, k), "rows": n} for side in sides]
    padded = np.concatenate([ids, np.full((1, used), 1 << 30, np.int32)])  # rows that the step does not have
    args = shim.args(
        "ExpertMatvecArgs",
        counts=shim.input(shim.args("StepCounts", rows=rows)),
        **{"in": make_activations(shim, quantize(x), k, x)},
        w=matrices + [{}] * (2 - len(matrices)),
        ids=shim.input(padded),
        out=out,
        experts=len(sides[0].weights) // n,
        used=used,
        second=second,
        pair=int(pair),
        units=units,
        slices=slices,
        splits=splits,
        steps=steps,
        **fields,
    )
    blocks = -(-n // (set_rows // 2 if pair else set_rows))
    shim.launch(f"expert_matvec_{name}", blocks * units, WAVES * shim.wave, args, lds)
    return np.array(out.array)


def products(
    dtype: Q, name: str, side: Side, x: NDArray[np.float32], experts: NDArray[np.int32], n: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(P, N) of rows x (P, K) with the experts' matrices, and the error that float32 sums of them may have."""
    k = x.shape[1]
    values = x.astype(np.float64) if name in ("f32", "f16", "bf16", "exact") else quantize(x).values(k)
    w = truth(dtype, side.weights).astype(np.float64).reshape(-1, n, k)[experts]
    size = np.abs(w)
    size += size.max(2, keepdims=True)  # minimums are summed apart
    return np.einsum("pnk,pk->pn", w, values), 6e-7 * np.einsum("pnk,pk->pn", size, np.abs(values)) + 1e-30


def case_id(v: Any) -> str:
    return f"{v[0]}-{v[1].name.lower()}" if isinstance(v[1], Q) else f"w{v[0]}{'r' * v[1]}"


@pytest.mark.parametrize(("kind", "wave"), CASES, ids=case_id)
def test_both_halves(kind: tuple[str, Q], wave: tuple[int, bool]) -> None:
    """Experts that rows share, slices that end early, any alignment; a row's bits do not depend on the others."""
    (name, dtype), shim = kind, Shim(FILES, *wave)
    block = max(gguf.GGML_QUANT_SIZES[dtype][0], 32)
    k, n, E, rows, used = 2048 + block, 5, 4, 3, 2
    ids = np.array([[0, 3], [1, 3], [0, 3]], np.int32)
    rng = np.random.default_rng(1)

    gate, up = (Side(dtype, random_weights(dtype, E * n, k, seed=s), align=1 + s, cuts=(n, 2 * n)) for s in range(2))
    x = random_activations(rows, k)
    got = launch(shim, name, x, [gate, up], ids, n, activation=ACT_SILU, steps=2)
    tokens = np.repeat(np.arange(rows), used)
    (g, dg), (u, du) = (products(dtype, name, s, x[tokens], ids.reshape(-1), n) for s in (gate, up))
    act = 0.5 * g * (1 + np.tanh(0.5 * g))
    bound = 1.2 * np.abs(u) * dg + np.abs(act) * du + dg * du + 2e-6 * np.abs(act * u)
    assert np.all(np.abs(got.reshape(-1, n) - act * u) <= bound)
    alone = launch(shim, name, x[2:], [gate, up], ids[2:], n, activation=ACT_SILU, splits=2)
    assert np.array_equal(alone[0].view(np.uint32), got[2].view(np.uint32))
    half = launch(shim, name, x, [up], ids, n, activation=ACT_NONE)
    apart = launch(shim, name, x, [gate], ids, n, activation=ACT_SILU, up=half)
    assert np.array_equal(apart.view(np.uint32), got.view(np.uint32))

    h = random_activations(rows * used, k, seed=2)
    weights = rng.standard_normal((rows, used)).astype(np.float32)
    residual = rng.standard_normal((rows, n)).astype(np.float32)
    got = launch(shim, name, h, [up], ids, n, second=1, weights=weights, residual=residual, splits=4)
    y, dy = (v.reshape(rows, used, n) for v in products(dtype, name, up, h, ids.reshape(-1), n))
    scaled = np.abs(weights[..., None]) * (dy + 2e-7 * np.abs(y))
    assert np.all(np.abs(got - (residual + (weights[..., None] * y).sum(1))) <= scaled.sum(1) + 3e-7 * np.abs(residual))
    alone = launch(
        shim, name, h[2:4], [up], ids[1:2], n, second=1, weights=weights[1:2], residual=residual[1:2], steps=3
    )
    assert np.array_equal(alone[0].view(np.uint32), got[1].view(np.uint32))


@pytest.mark.parametrize("wave", SHIMS, ids=case_id)
def test_ids_of_no_expert_read_the_last_one(wave: tuple[int, bool]) -> None:
    """A slice of a plan that runs before its ROUTE finds anything in the ids."""
    shim, n, k = Shim(FILES, *wave), 3, 64
    side = Side(Q.Q8_0, random_weights(Q.Q8_0, 2 * n, k))
    x = random_activations(2, k)
    wild = launch(
        shim, "q8_0", x, [side, side], np.array([[-1, 5], [2, 1 << 30]], np.int32), n, activation=ACT_GELU_TANH
    )
    last = launch(shim, "q8_0", x, [side, side], np.ones((2, 2), np.int32), n, activation=ACT_GELU_TANH)
    assert np.array_equal(wild.view(np.uint32), last.view(np.uint32))


@pytest.fixture
def eight_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of so few rows that no other kernel computes experts."""
    monkeypatch.setattr(native_experts, "ROWS", 8)


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("kinds", ["fff", "qqq", "fqh"])
@pytest.mark.parametrize("shape", ["usual", "single", "wide"])
def test_experts_of_few_rows(device: Device, gpu: Device, shape: str, kinds: str) -> None:
    """ROUTE and both halves as ops: up to 8 rows equal the rows one by one, and the CPU within the order of sums."""
    E, k, F = native_experts.SHAPES[shape]
    rng = np.random.default_rng(3)
    x, router, norm = (rng.standard_normal(s).astype(np.float32) for s in ((64, 160), (E, 160), (160,)))
    cuts = (1, E, 2, min(7, E))
    outs = []
    for which in (device, gpu):
        mixture = native_experts.Mixture(x, router / np.float32(8), k, F, norm=norm, kinds=kinds, cuts=cuts)
        with mixture.rig.build(which) as plan:
            single = []
            for token in range(8):
                plan.run(Step().sequence([token]))
                single.append(plan.read(mixture.out, 1)[0])
            for rows in (2, 3, 8):
                plan.run(Step().sequence(range(rows)))
                assert np.array_equal(plan.read(mixture.out, rows), single[:rows]), rows
            ids, weights = plan.read(mixture.ids, 8), plan.read(mixture.weights, 8)
        outs.append(np.array(single))
    expected = x[:8] + mixture.expected(rms_norm(x[:8], norm, native_experts.EPS), ids, weights)
    assert np.abs(outs[1] - expected).max() <= (0.02 if "q" in kinds else 1e-4) * np.abs(expected).max()
    # A float that rounds to another int8 of the second half's input moves a result by a step of its scale.
    assert np.abs(outs[1] - outs[0]).max() <= (5e-3 if "q" in kinds else 2e-5) * np.abs(expected).max()


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("kinds", ["fff", "qqq", "fqh"])
def test_biases(device: Device, gpu: Device, kinds: str) -> None:
    """Of the router and the experts, with the activation that goes with them, as the CPU has them."""
    E, k, F = native_experts.SHAPES["usual"]
    rng = np.random.default_rng(3)
    x, router = (rng.standard_normal(s).astype(np.float32) for s in ((64, 160), (E, 160)))
    outs = []
    for which in (device, gpu):
        mixture = native_experts.Mixture(x, router / np.float32(8), k, F, kinds=kinds, biased=True)
        with mixture.rig.build(which) as plan:
            plan.run(Step().sequence(range(8)))
            outs.append([plan.read(at, 8) for at in (mixture.ids, mixture.weights, mixture.out)])
    assert np.array_equal(outs[0][0], outs[1][0])
    np.testing.assert_allclose(outs[1][1], outs[0][1], rtol=1e-5)
    assert np.abs(outs[1][2] - outs[0][2]).max() <= (5e-3 if "q" in kinds else 2e-5) * np.abs(outs[0][2]).max()


@pytest.mark.usefixtures("eight_rows")
@pytest.mark.parametrize("residual", ["in place", "apart", "none"])
def test_residual_and_exact_precision(gpu: Device, residual: str) -> None:
    rng = np.random.default_rng(4)
    x, router = (rng.standard_normal(s).astype(np.float32) for s in ((64, 96), (8, 96)))
    options = {"kinds": "qqq", "precision": lib.APU_PRECISION_EXACT, "residual": residual}
    mixture = native_experts.Mixture(x, router / np.float32(8), 3, 64, **options)
    with mixture.rig.build(gpu) as plan:
        plan.run(Step().sequence(range(5)))
        ids, weights = plan.read(mixture.ids, 5), plan.read(mixture.weights, 5)
        expected = mixture.expected(x[:5], ids, weights) + (0 if residual == "none" else x[:5])
        np.testing.assert_allclose(plan.read(mixture.out, 5), expected, atol=1e-4)
