"""The CPU shim itself: wave and block operations against numpy, and every kind of wrong kernel is caught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shim import Shim, ShimError

FILE = Path(__file__).with_name("shim_kernels.hip")


@pytest.fixture(params=[(32, False), (32, True), (64, False), (64, True)], ids=lambda p: f"w{p[0]}{'r' * p[1]}")
def shim(request: pytest.FixtureRequest) -> Shim:
    return Shim([FILE], wave=request.param[0], reverse=request.param[1])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_block_sum(shim: Shim, rng: np.random.Generator) -> None:
    x = rng.integers(-100, 100, (5, 256)).astype(np.float32)
    sums = shim.output(5, np.float32)
    shim.launch("shim_block_sum", 5, 256, shim.args("SumArgs", x=shim.input(x), sums=sums))
    assert np.array_equal(sums.array, x.sum(1))
    assert shim.threads("shim_block_sum") == 256


def test_wave_operations(shim: Shim, rng: np.random.Generator) -> None:
    v = rng.integers(0, 2**32, 128, dtype=np.uint32)
    out = [shim.output(128, dtype) for dtype in (np.uint32, np.uint32, np.uint64)]
    args = shim.args("WaveArgs", **{"in": shim.input(v)}, rotated=out[0], swapped=out[1], ballots=out[2], values=[1, 2])
    shim.launch("shim_wave", 1, 128, args)
    t = np.arange(128)
    wave = t // shim.wave * shim.wave
    assert np.array_equal(out[0].array, v[wave + (t + 1) % shim.wave])
    assert np.array_equal(out[1].array, v[t ^ 5])
    bits = [sum(int(v[w + i] % 3 == 0) << i for i in range(shim.wave)) for w in wave]
    assert out[2].array.tolist() == bits


def as_bytes(v: np.ndarray, dtype: type) -> np.ndarray:
    return v.view(dtype).reshape(-1, 4).astype(np.int64)


def half2(f: object, *values: np.ndarray) -> np.ndarray:
    exact = [v.view(np.float16).astype(np.longdouble) for v in values]  # 64 bits: sums of products almost always exact
    return f(*exact).astype(np.float16)  # type: ignore[operator]


def test_bit_operations(shim: Shim, rng: np.random.Generator) -> None:
    n = 4000
    a, b = (rng.integers(0, 2**32, n, dtype=np.uint32) for _ in range(2))
    out = shim.output((8, n), np.uint32)
    args = shim.args("BitsArgs", a=shim.input(a), b=shim.input(b), out=out, n=n)
    shim.launch("shim_bits", -(-n // 64), 64, args)
    got = out.array
    signed, unsigned, other = as_bytes(a, np.int8), as_bytes(a, np.uint8), as_bytes(b, np.int8)
    assert np.array_equal(got[0].view(np.int32), (signed * other).sum(1) + 7)
    assert np.array_equal(got[1].view(np.int32), (unsigned * other).sum(1) - 7)
    wide = b.astype(np.uint64) << np.uint64(32) | a
    assert np.array_equal(got[2], (wide >> (a % 32).astype(np.uint64)).astype(np.uint32))
    picked = np.take_along_axis(wide.view(np.uint8).reshape(-1, 8), as_bytes(b & 0x07070707, np.uint8), 1)
    assert np.array_equal(got[3], np.ascontiguousarray(picked).view(np.uint32)[:, 0])
    with np.errstate(all="ignore"):
        want = [half2(lambda x, y: x * y, a, b), half2(lambda x, y: x + y, a, b)]
        want.append(half2(lambda x, y, z: x * y + z, a, b, a ^ b))
        for row, expected in zip(got[4:7], want, strict=True):
            assert np.array_equal(row.view(np.float16), expected, equal_nan=True)
        halves = a.view(np.float32).astype(np.float16)
    assert np.array_equal((got[7] & 0xFFFF).astype(np.uint16).view(np.float16), halves, equal_nan=True)
    finite = np.isfinite(b.view(np.float32))
    rounded = (b.astype(np.uint64) + 0x7FFF + (b >> 16 & 1)) >> np.uint64(16)
    assert np.array_equal((got[7] >> 16)[finite], rounded[finite])


def test_every_half() -> None:
    shim = Shim([FILE])
    halves = np.arange(65536, dtype=np.uint16)
    floats = halves.view(np.float16).astype(np.float32)
    for nudge in (-1, 0, 1):  # and halfway cases, and their neighbours
        middle = (floats.view(np.uint32) ^ 0x1000).astype(np.int64) + nudge
        a = np.where(np.isfinite(floats), middle, floats.view(np.uint32)).astype(np.uint32)
        out = shim.output((8, len(a)), np.uint32)
        args = shim.args("BitsArgs", a=shim.input(a), b=shim.input(a), out=out, n=len(a))
        shim.launch("shim_bits", len(a) // 64, 64, args)
        with np.errstate(all="ignore"):
            want = a.view(np.float32).astype(np.float16)
        assert np.array_equal((out.array[7] & 0xFFFF).astype(np.uint16).view(np.float16), want, equal_nan=True)


@pytest.mark.parametrize(("wait", "sync"), [(1, 1), (0, 1), (1, 0)])
def test_copy_and_barrier(shim: Shim, rng: np.random.Generator, wait: int, sync: int) -> None:
    data = rng.integers(0, 255, 2048, dtype=np.uint8)  # never the poison
    to = shim.output(2048, np.uint8)
    args = shim.args("CopyArgs", **{"from": shim.input(data)}, to=to, wait=wait, sync=sync)
    shim.launch("shim_copy", 1, 128, args, lds=2048)
    # Without the wait, forward runs see copies that are still under way; without the barrier, both orders see waves
    # that have not copied yet.
    right = bool(wait and sync) or (bool(sync) and shim.reverse)
    assert np.array_equal(to.array, data) == right


def test_poisoned_lds_shows(shim: Shim) -> None:
    out = shim.output(64, np.uint32)
    shim.launch("shim_wrong", 1, 64, shim.args("WrongArgs", out=out, what=6))
    assert (out.array == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (0, "3 wait in wave_shuffle|diverge in a collective operation of the wave"),
        (1, "diverge in a collective operation of the wave: .*1 have ended"),
        (2, r"out of bounds.*\(shim_kernels.hip:(\d+|\?)"),
        (3, r"misaligned.*\(shim_kernels.hip:(\d+|\?)"),
        (4, r"fault at .* byte (256|-4) of a buffer of 256 bytes"),
        (8, "thread .*: load16 of LDS"),
        (5, r"byte -4 of a buffer of 256 bytes|4 bytes before a buffer of 256 were written"),
    ],
)
def test_wrong_kernels_are_errors(shim: Shim, what: int, message: str) -> None:
    out = shim.output(64, np.uint32)
    at = -1 if shim.reverse else 64  # on the side of the buffer that meets the end of its page
    with pytest.raises(ShimError, match=message) as error:
        shim.launch("shim_wrong", 1, 64, shim.args("WrongArgs", out=out, what=what, at=at))
    assert "kernel shim_wrong" in str(error.value)
    shim.launch("shim_wrong", 1, 64, shim.args("WrongArgs", out=shim.output(64, np.uint32), what=7))  # still works


def test_inputs_are_read_only_and_shapes_checked(shim: Shim) -> None:
    with pytest.raises(ShimError, match=r"fault at address .*: writes to byte"):
        shim.launch("shim_wrong", 1, 64, shim.args("WrongArgs", out=shim.input(np.zeros(64, np.uint32)), what=7))
    with pytest.raises(ShimError, match="has 64 threads and an argument of 16 bytes, not 32 and 4"):
        shim.launch("shim_wrong", 1, 32, b"1234")
    with pytest.raises(ShimError, match="no kernel nothing"):
        shim.launch("nothing", 1, 32, b"")
    with pytest.raises(TypeError, match="has no field whatever"):
        shim.args("WrongArgs", whatever=1)
