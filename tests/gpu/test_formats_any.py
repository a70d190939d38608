"""The matvec kernels of any quantised type: int8 activations ("any") and dequantised weights ("exact")."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from kernel_cases import QUANTIZED_TYPES, random_activations, random_weights, truth
from matvec_cases import SET, Floats, Options, Side, quantize, quantize_fine, run_matvec
from shim import Shim

FILES = ["matvec_any.hip"]
SHIMS = [(32, False), (32, True), (64, False), (64, True)]
MINIMUM = (Q.Q4_1, Q.Q5_1, Q.Q2_K, Q.Q4_K, Q.Q5_K)


CASES = [(dtype, shim) for i, dtype in enumerate(QUANTIZED_TYPES) for shim in (SHIMS[i % 2], SHIMS[3 - i % 2])]


def case_id(v: object) -> str:
    return v.name.lower() if isinstance(v, Q) else f"w{v[0]}{'r' * v[1]}"  # type: ignore[index]


def check(dtype: Q, weights: np.ndarray, values: np.ndarray, got: Floats) -> None:
    w = truth(dtype, weights).astype(np.float64)
    size = np.abs(w)
    if dtype in MINIMUM:  # product and minimum are summed apart
        size += size.max(1, keepdims=True)
    bound = 6e-7 * (np.abs(values) @ size.T) + 1e-30
    assert np.all(np.abs(got - values @ w.T) <= bound), float(np.max(np.abs(got - values @ w.T) / bound))


@pytest.mark.parametrize(("dtype", "shim"), CASES, ids=case_id)
def test_any(dtype: Q, shim: tuple[int, bool]) -> None:
    """Odd addresses and strides, every split, several steps; 8 rows have the bits of single rows."""
    kernels = Shim(FILES, *shim)
    block = GGML_QUANT_SIZES[dtype][0]
    k, n, rows = 2048 + block, 3, 3
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k), align=3, cuts=(2,))
    side.stride = side.weights.shape[1] + 5
    a = quantize(x)
    got = run_matvec(kernels, "matvec_any", a, k, [side], Options(r=8, splits=2, bucket=8))[0]
    check(dtype, side.weights, a.values(k), got)
    single = run_matvec(kernels, "matvec_any", a, k, [side], Options(r=1, splits=4, steps=3))[0]
    assert np.array_equal(single.view(np.uint32), got.view(np.uint32))


@pytest.mark.parametrize(("dtype", "shim"), CASES, ids=case_id)
def test_exact(dtype: Q, shim: tuple[int, bool]) -> None:
    kernels = Shim(FILES, *shim)
    block = GGML_QUANT_SIZES[dtype][0]
    k, n, rows = 2048 + block, 3, 3
    x = random_activations(rows, k)
    side = Side(dtype, random_weights(dtype, n, k), align=1)
    a = quantize(x)
    got = run_matvec(kernels, "matvec_exact", a, k, [side], Options(r=4, splits=2, set=SET), x)[0]
    check(dtype, side.weights, x.astype(np.float64), got)
    single = run_matvec(kernels, "matvec_exact", a, k, [side], Options(r=2, steps=2, set=SET), x)[0]
    assert np.array_equal(single.view(np.uint32), got.view(np.uint32))


def test_pair_of_two_types_and_two_terms() -> None:
    shim = Shim(FILES, *SHIMS[1])
    k, n, rows = 512, 6, 2
    x = random_activations(rows, k)
    sides = [Side(t, random_weights(t, n, k)) for t in (Q.IQ3_S, Q.TQ1_0)]
    a = quantize(x)
    both = run_matvec(shim, "matvec_any", a, k, sides, Options(r=2, activation=1, pair=True))[0]
    gate, up = (run_matvec(shim, "matvec_any", a, k, [side], Options(r=2))[0] for side in sides)
    assert np.allclose(both, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)
    fine = quantize_fine(x)
    values = fine.values(k).reshape(rows, 2, k).sum(1)
    got = run_matvec(shim, "matvec_any", fine, k, [sides[0]], Options(r=4, terms=2))[0]
    check(sides[0].dtype, sides[0].weights, values, got)
