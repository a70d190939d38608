"""The checksum kernel and the CPU's, against the formula of apu.h: every alignment, and nothing read outside."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from apu_engine._native import Device, Region, check, lib

FACTOR = 0x9E3779B97F4A7C15


def expected(data: NDArray[np.uint8]) -> int:
    padded = np.zeros((data.size + 3) // 4 * 4, np.uint8)
    padded[: data.size] = data
    words = padded.view("<u4").astype(np.uint64)
    places = np.arange(words.size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    with np.errstate(over="ignore"):
        return int(((words + np.uint64(1)) * (places * np.uint64(FACTOR))).sum(dtype=np.uint64))


def content(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


SIZES = [1, 3, 4, 15, 16, 17, 4096, 65_537, 300_003]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 4, 7, 16])
def test_gpu(hip_device: Device, offset: int, nbytes: int) -> None:
    """The range ends where the allocation does, so that a read behind it would be a fault."""
    room = (offset + nbytes + 255) // 256 * 256
    data = content(room)
    region = Region.alloc(hip_device, room)
    check(lib.apu_memory_copy(hip_device.handle, region.address, data.ctypes.data, room, 0, 1))
    for start in (offset, room - nbytes):
        assert hip_device.checksum(region.address + start, nbytes) == expected(data[start : start + nbytes])
    assert hip_device.checksum(region.address, 0) == 0
    region.free()


@pytest.mark.parametrize("nbytes", [*SIZES, 5 << 20])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_cpu(offset: int, nbytes: int) -> None:
    data = content(offset + nbytes)
    with Device("cpu", threads=2) as device:
        assert device.checksum(data.ctypes.data + offset, nbytes) == expected(data[offset:])


def test_places_count(hip_device: Device) -> None:
    """Words that change places, and one that is another, change the sum."""
    data = content(64)
    swapped = data.reshape(16, 4)[::-1].reshape(-1).copy()
    other = data.copy()
    other[63] ^= 1
    with Device("cpu", threads=1) as device:
        sums = {device.checksum(x.ctypes.data, 64) for x in (data, swapped, other)}
    assert len(sums) == 3
