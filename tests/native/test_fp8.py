"""F8_E4M3 matrices with a scale plane: every op that takes them against numpy on the dequantised weights, the same bits
at every instruction-set level and row count, blocks and segments of all shapes, odd addresses, NaN codes, and refusals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from kernel_cases import LEVELS
from numpy.typing import NDArray
from rig import NONE, Rig, Step

from apu_engine._native import Device, InvalidError, NativeError, UnsupportedError, lib

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
E4M3, F32, F16, BF16 = lib.APU_F8_E4M3, lib.APU_F32, lib.APU_F16, lib.APU_BF16
ROWS = (1, 2, 3, 4, 5, 16, 40)


def codes(*shape: int, seed: int = 0) -> Bytes:
    """Any code but NaN, at an odd address."""
    raw = np.random.default_rng(seed).integers(0, 254, int(np.prod(shape)) + 1, np.uint8)
    raw[raw >= 127] += 1
    room = np.empty(raw.size + 1, np.uint8)
    out = room[1 + room.ctypes.data % 2 :][: raw.size - 1]
    out[...] = raw[:-1]
    return out.reshape(shape)


def values(raw: Bytes) -> Floats:
    found: Floats = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn).float().numpy()
    return found


def scales_like(*shape: int, dtype: int = F32) -> tuple[NDArray[np.generic], Floats]:
    """(as stored, as float32)"""
    drawn = np.exp2(np.random.default_rng(5).uniform(-9, -5, shape)).astype(np.float32)
    if dtype == F16:
        return drawn.astype(np.float16), drawn.astype(np.float16).astype(np.float32)
    if dtype == BF16:
        stored = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    return drawn, drawn


def spread(scales: Floats, block: tuple[int, int], n: int, k: int) -> Floats:
    """(.., blocks, blocks) to (.., N, K)"""
    out: Floats = scales.repeat(block[0], -2).repeat(block[1], -1)[..., :n, :k]
    return out


def at_every_level(
    make: Callable[[Rig], int], vocabulary: int, expected: NDArray[np.float64], *, one_order: bool = True
) -> None:
    """Runs the rig of `make`, which returns its result, on 1 to 40 rows; levels agree where they sum in `one_order`."""
    inner = expected.shape[1]
    first: Floats | None = None
    for isa in levels():
        rig = Rig(rows=40, vocabulary=vocabulary)
        out = make(rig)
        with Device("cpu", threads=3, isa=isa) as device, rig.build(device) as plan:
            plan.run(Step().sequence(range(40)))
            bits = plan.read(out, 40).reshape(40, inner)
            for rows in ROWS:
                plan.run(Step().sequence(range(rows)))
                assert np.array_equal(plan.read(out, rows).reshape(rows, inner), bits[:rows]), (isa, rows)
        if first is not None and one_order:
            assert np.array_equal(bits, first), isa
        first = bits
        assert np.abs(bits - expected[:40]).max() <= 3e-6 * np.abs(expected).max()


def levels() -> list[str]:
    found = []
    for isa in LEVELS:
        try:
            Device("cpu", threads=1, isa=isa).close()
        except NativeError:
            continue
        found.append(isa)
    return found


def inputs(k: int, count: int = 48) -> Floats:
    return np.random.default_rng(3).standard_normal((count, k)).astype(np.float32)


@pytest.mark.parametrize(
    ("n", "k", "block", "dtype"),
    [
        (150, 200, (128, 128), F32),
        (256, 384, (128, 128), BF16),
        (40, 77, (16, 32), F32),
        (40, 77, (16, 24), F16),  # blocks that are no whole registers
        (33, 64, (1, 64), BF16),  # a scale for each row
        (33, 65, (33, 65), F32),  # one for all
        (5, 3, (128, 128), F32),
    ],
)
def test_matmul(n: int, k: int, block: tuple[int, int], dtype: int) -> None:
    raw, x = codes(n, k), inputs(k)
    stored, scales = scales_like(-(-n // block[0]), -(-k // block[1]), dtype=dtype)
    weights = values(raw) * spread(scales, block, n, k)

    def make(rig: Rig) -> int:
        source = rig.input(x)
        matrix = rig.weight("matrix", raw, dtype=E4M3, cuts=min(n, 3))
        rig.scales(stored, block, [n], dtype=dtype)
        out = rig.scratch("out", n)
        rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, matrix))
        return out

    at_every_level(make, len(x), x.astype(np.float64) @ weights.T.astype(np.float64))


def test_gated_pair_with_other_segments() -> None:
    """Scales in segments that begin within blocks and between the weights' own."""
    n, k, block = 96, 160, (16, 32)
    raw, up_raw, x = codes(n, k), codes(n, k, seed=1), inputs(k)
    stored, scales = scales_like(-(-n // 16), -(-k // 32))
    up_stored = np.ascontiguousarray(stored[::-1])
    # The view begins at row 5 of a block: 11 rows are its rest, then whole blocks.
    cut = np.ascontiguousarray(np.concatenate([stored[:1], stored]))
    rows = np.concatenate([np.zeros(11, int), np.arange(n - 11) // 16])
    gate, up = values(raw) * scales[rows].repeat(32, 1), values(up_raw) * spread(up_stored, block, n, k)

    def make(rig: Rig) -> int:
        source = rig.input(x)
        first = rig.weight("gate", raw, dtype=E4M3, cuts=5)
        rig.scales(np.ascontiguousarray(cut[:7]), block, [11, 85])
        second = rig.weight("up", up_raw, dtype=E4M3, cuts=1)
        rig.scales(up_stored, block, [32, 64])
        out = rig.scratch("out", n)
        ints = (lib.APU_ACT_SILU, lib.APU_PRECISION_DEFAULT)
        rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, first, second), ints=ints)
        return out

    x64 = x.astype(np.float64)
    g, u = x64 @ gate.T.astype(np.float64), x64 @ up.T.astype(np.float64)
    expected = g / (1 + np.exp(-g)) * u
    bits = [result(make, isa, 40, n) for isa in levels()]
    assert np.abs(bits[0] - expected[:40]).max() <= 1e-5 * np.abs(expected).max()


def result(make: Callable[[Rig], int], isa: str, rows: int, inner: int) -> Floats:
    rig = Rig(rows=40, vocabulary=48)
    out = make(rig)
    with Device("cpu", threads=2, isa=isa) as device, rig.build(device) as plan:
        plan.run(Step().sequence(range(rows)))
        found: Floats = plan.read(out, rows).reshape(rows, inner)
        return found


@pytest.mark.parametrize("across", [False, True])
def test_head_matmul(across: bool) -> None:
    """Heads of 24 rows whose scale blocks of 16 are cut, in a segment each."""
    heads, n, k, block = 3, 24, 40, (16, 16)
    raw = codes(heads, *((k, n) if across else (n, k)))
    rows, columns = raw.shape[1:]
    stored, scales = scales_like(heads, -(-rows // 16), -(-columns // 16))
    weights = (values(raw) * spread(scales, block, rows, columns)).astype(np.float64)
    x = inputs(heads * k)

    def make(rig: Rig) -> int:
        source = rig.input(x)
        matrix = rig.weight("matrix", raw, dtype=E4M3)
        rig.scales(stored.reshape(-1, stored.shape[-1]), block, [rows] * heads)
        out = rig.scratch("out", heads * n)
        rig.op(lib.APU_OP_HEAD_MATMUL, ins=(source,), outs=(out,), weights=(matrix,), ints=(int(across), 0, 0))
        return out

    by_head = x.astype(np.float64).reshape(-1, heads, k)
    expected = np.einsum("thk,hkn->thn" if across else "thk,hnk->thn", by_head, weights)
    at_every_level(make, len(x), expected.reshape(-1, heads * n), one_order=not across)


def test_nan_codes() -> None:
    raw, x = codes(64, 96), inputs(96)
    raw[7, 50], raw[40, 95] = 0x7F, 0xFF
    stored, _ = scales_like(4, 3)

    def make(rig: Rig) -> int:
        source = rig.input(x)
        matrix = rig.weight("matrix", raw, dtype=E4M3)
        rig.scales(stored, (16, 32), [64])
        out = rig.scratch("out", 64)
        rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, matrix))
        return out

    for isa in levels():
        for rows in (1, 40):
            bad = np.isnan(result(make, isa, rows, 64))
            assert bad[:, [7, 40]].all() and bad.sum() == 2 * rows, isa


def test_every_code(device: Device) -> None:
    """A row of one element gives the code itself, -0 and the smallest denormal included."""
    raw = np.arange(256, dtype=np.uint8).reshape(256, 1)

    def make(rig: Rig) -> int:
        source = rig.input(np.ones((48, 1), np.float32))
        out = rig.scratch("out", 256)
        rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, rig.weight("m", raw, dtype=E4M3)))
        return out

    for isa in levels():
        for rows in (1, 40):
            found = result(make, isa, rows, 256)
            assert np.array_equal(found, np.broadcast_to(values(raw)[:, 0], found.shape), equal_nan=True)


def _small(rig: Rig) -> Sequence[int]:
    source = rig.input(inputs(32))
    matrix = rig.weight("matrix", codes(16, 32), dtype=E4M3)
    rig.scales(np.ones((2, 1), np.float32), (8, 32), [16])
    out = rig.scratch("out", 16)
    rig.op(lib.APU_OP_MATMUL, ins=(source,), outs=(out,), weights=(NONE, matrix))
    return source, matrix, out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.planes[-1].update(block_rows=0), "scales of blocks of 0 x 32, expected at least 1 x 1"),
        (lambda r: r.planes[-1].update(block_columns=0), "scales of blocks of 8 x 0, expected at least 1 x 1"),
        (lambda r: r.planes[-1].update(dtype=lib.APU_I32), "scales of dtype I32 (26), expected F32, F16 or BF16"),
        (lambda r: r.planes[-1].update(kind=lib.APU_PLANE_GLOBAL_SCALE), "second plane of kind 2, expected scales"),
        (lambda r: r.planes[-1].update(segment_count=0), "its segments hold 0 rows, expected 16"),
        (lambda r: r.segments[-1].update(row_count=15), "its segments hold 15 rows, expected 16"),
        (lambda r: r.segments[-1].update(row_begin=1), "segment 0 begins at row 1, expected 0"),
        (lambda r: r.segments[-1].update(address=0), "segment 0 has address 0"),
        (lambda r: r.segments[-1].update(row_stride=3), "segment 0 has rows of 4 bytes at a stride of 3"),
        (lambda r: r.segments[-1].update(row_stride=(1 << 64) - 8), "wraps around the address space"),
        (lambda r: r.tensors[-2].update(plane_count=3), "3 planes, expected 1 or 2"),
        (lambda r: r.tensors[-2].update(plane_begin=2), "plane 3, but there are 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(device: Device, change: Callable[[Rig], None], message: str) -> None:
    rig = Rig(vocabulary=48)
    _small(rig)
    change(rig)
    with pytest.raises((InvalidError, UnsupportedError), match=re.escape(message)):
        rig.build(device)


def test_refuses_scales_elsewhere(device: Device) -> None:
    rig = Rig(vocabulary=48)
    table = rig.weight("table", codes(48, 32), dtype=E4M3)
    rig.scales(np.ones((6, 1), np.float32), (8, 32), [48])
    rig.op(lib.APU_OP_EMBED, outs=(rig.scratch("x", 32),), weights=(table,), floats=(1.0,))
    with pytest.raises(InvalidError, match='w0 "table": has a scale plane, which only the matrices of MATMUL'):
        rig.build(device)
    rig = Rig(vocabulary=48)
    rig.input(inputs(32))
    rig.weight("matrix", np.ones((4, 32), np.float32))
    rig.scales(np.ones((1, 1), np.float32), (4, 32), [4])
    with pytest.raises(UnsupportedError, match='"matrix": F32 takes no scale plane'):
        rig.build(device)
