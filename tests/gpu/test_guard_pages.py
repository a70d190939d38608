"""Weights that begin and end where their pages do: what a registered range of a file is, on the stand-in.

A weight's first byte lies at the beginning of a page or its last at the end of one, with pages around that nobody may
touch: a kernel that reads outside faults. Kernels may read whatever is inside of the pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import rig as rigs
from numpy.typing import NDArray
from rig import NONE, Rig, Step
from test_experts import Mixture

from apu_engine._native import Device, Region, lib

PAGE = mmap.PAGESIZE
KINDS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0"),
]
ROWS = (1, 2, 4, 8, 9, 40)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PROT_READ, NO_ACCESS = 1, 0


@dataclass
class Pages:
    """Puts the arrays of a rig into files that are mapped between guard pages."""

    device: Device
    at_end: bool
    maps: list[tuple[int, int]] = field(default_factory=list)

    def place(self, array: NDArray[Any]) -> tuple[Region, int]:
        size = -(-array.nbytes // PAGE) * PAGE
        before = size - array.nbytes if self.at_end else 0
        fd = os.memfd_create("weights")
        os.write(fd, bytes(before) + array.tobytes() + bytes(size - array.nbytes - before))
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(None, size + 2 * PAGE, NO_ACCESS, private, -1, 0)
        host = libc.mmap(base + PAGE, size, PROT_READ, mmap.MAP_SHARED | 0x10, fd, 0)  # MAP_FIXED
        assert host == base + PAGE
        os.close(fd)
        self.maps.append((base, size + 2 * PAGE))
        region = Region.register(self.device, host, size, "registered", "svm")
        return region, region.address + before


@pytest.fixture(params=["first", "last"])
def pages(request: pytest.FixtureRequest, hip_device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    made = Pages(hip_device, request.param == "last")
    copied = rigs.Plan._place

    def place(plan: rigs.Plan, array: NDArray[Any]) -> None:
        if any(state["data"] is array for state in plan.rig.states):
            return copied(plan, array)
        region, address = made.place(array)
        plan._regions.append(region)
        plan._placed.append((array.ctypes.data, array.nbytes, address))
        return None

    monkeypatch.setattr(rigs.Plan, "_place", place)
    yield made
    for address, nbytes in made.maps:
        libc.munmap(address, nbytes)


def random(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(name: str, n: int, k: int) -> tuple[NDArray[np.uint8], int]:
    """Any bytes will do: values are not looked at."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return np.random.default_rng(n).integers(0, 255, (n, k // block * size), dtype=np.uint8), int(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_products(pages: Pages, kind: str) -> None:
    r = Rig(rows=40)
    x = r.input(random(64, 512))
    data, number = quantized(kind, 35, 512)
    matrix = r.weight("w", data, dtype=number, shape=(35, 512))
    for precision in (lib.APU_PRECISION_DEFAULT, lib.APU_PRECISION_EXACT):
        out = r.scratch(f"out{precision}", 35)
        r.op(lib.APU_OP_MATMUL, ins=(x,), outs=(out,), weights=(NONE, matrix), ints=(0, precision))
    with r.build(pages.device) as plan:
        for rows in ROWS:
            plan.run(Step().sequence(range(rows)))


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(pages: Pages, kind: str) -> None:
    r = Rig(rows=40)
    data, number = quantized(kind, 64, 256)
    table = r.weight("table", data, dtype=number, shape=(64, 256))
    r.op(lib.APU_OP_EMBED, outs=(r.scratch("x", 256),), weights=(table,), floats=(1.0,))
    with r.build(pages.device) as plan:
        plan.run(Step().sequence([0, 63, 5]))


@pytest.mark.parametrize("kinds", ["fff", "qqq", "hqf"])
def test_experts(pages: Pages, kinds: str) -> None:
    """Router, norm, and stacks of experts in several segments."""
    options: dict[str, Any] = {"norm": random(64, seed=3), "kinds": kinds, "cuts": (2, 1, 3, 2), "residual": "apart"}
    mixture = Mixture(random(64, 64) * np.float32(0.5), random(8, 64, seed=2), 3, 96, **options)
    with mixture.rig.build(pages.device) as plan:
        for rows in ROWS:
            plan.run(Step().sequence(range(rows)))


def test_vectors(pages: Pages) -> None:
    """Norm weights and biases in both of their types."""
    r = Rig(rows=40)
    x = r.input(random(64, 64))
    norms = [r.weight("norm", random(64)), r.weight("half norm", random(64).astype(np.float16))]
    biases = [r.weight("bias", random(33)), r.weight("half bias", random(33).astype(np.float16))]
    for i, (norm, bias) in enumerate(zip(norms, biases, strict=True)):
        weights = (norm, r.weight(f"w{i}", random(33, 64)), NONE, NONE, NONE, bias)
        r.op(lib.APU_OP_MATMUL, ins=(x,), outs=(r.scratch(f"out{i}", 33),), weights=weights, floats=(1e-5,))
    r.op(lib.APU_OP_RMS_NORM, ins=(x,), outs=(x,), weights=(norms[0],), floats=(1e-5,))
    with r.build(pages.device) as plan:
        for rows in ROWS:
            plan.run(Step().sequence(range(rows)))
