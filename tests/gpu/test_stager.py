"""Bytes of files into device memory: every alignment, plain reads where direct ones are refused, files that shrink.

On the stand-in for libamdhip64, which keeps a copy asynchronous from pinned memory as the real one does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble
from numpy.typing import NDArray

from apu_engine import _native
from apu_engine._native import Device, Region, Stager, check, lib
from apu_engine.errors import MappingError

RING = 64 << 10  # four slots of less than 16 KiB


def copy_out(device: Device, address: int, nbytes: int) -> NDArray[np.uint8]:
    out = np.zeros(nbytes, np.uint8)
    check(lib.apu_memory_copy(device.handle, out.ctypes.data, address, nbytes, 1, 0))
    return out


@contextmanager
def opened(path: Path, content: NDArray[np.uint8]) -> Iterator[int]:
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def content(nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 255, nbytes, dtype=np.uint8)


def has_direct_reads(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "trial", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        assert error.errno == errno.EINVAL
        return False
    return True


RANGES = [(0, 1), (0, 4096), (4096, 8192), (4095, 2), (1, 100_000), (12_345, 67_890), (299_000, 1003), (0, 300_003)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("shift", [0, 13])
def test_any_range(hip_device: Device, tmp_path: Path, offset: int, nbytes: int, shift: int) -> None:
    """Exactly these bytes; their neighbours on the device stay."""
    data = content(300_003)  # the last block is no whole one
    region = Region.alloc(hip_device, nbytes + 64)
    with opened(tmp_path / "weights", data) as fd, Stager(hip_device, RING) as stager:
        stager.read(fd, "weights", offset, nbytes, region.address + shift)
        stager.wait()
        got = copy_out(hip_device, region.address, nbytes + 64)
        assert np.array_equal(got[shift : shift + nbytes], data[offset : offset + nbytes])
        assert not got[:shift].any() and not got[shift + nbytes :].any()
        info = stager.info()
        counted = (nbytes, 0) if has_direct_reads(tmp_path) else (0, nbytes)
        assert (info.direct_bytes, info.plain_bytes) == counted
        assert info.pinned_bytes <= RING
    region.free()


def test_many_reads_of_several_files(hip_device: Device, tmp_path: Path) -> None:
    """One ring for all of them, in any order, closed without a wait."""
    first, second = content(100_000), content(50_001)
    region = Region.alloc(hip_device, 150_001)
    with opened(tmp_path / "a", first) as a, opened(tmp_path / "b", second) as b:
        stager = Stager(hip_device, RING)
        for at in range(0, 100_000, 10_000):
            stager.read(a, "a", at, 10_000, region.address + at)
            stager.read(b, "b", at // 2, 5000, region.address + 100_000 + at // 2)
        stager.read(b, "b", 50_000, 1, region.address + 150_000)
        stager.close()
        stager.close()
    assert np.array_equal(copy_out(hip_device, region.address, 150_001), np.concatenate([first, second]))
    region.free()


def test_a_file_that_was_replaced_by_name(hip_device: Device, tmp_path: Path) -> None:
    """The open file is read, not what has its name now."""
    data = content(10_000)
    region = Region.alloc(hip_device, 10_000)
    with opened(tmp_path / "weights", data) as fd, Stager(hip_device, RING) as stager:
        (tmp_path / "other").write_bytes(bytes(10_000))
        (tmp_path / "other").replace(tmp_path / "weights")
        stager.read(fd, "weights", 0, 10_000, region.address)
        stager.wait()
    assert np.array_equal(copy_out(hip_device, region.address, 10_000), data)
    region.free()


def test_plain_reads_where_the_file_system_refuses(hip_device: Device) -> None:
    """A file of memfd_create is on a file system that until Linux 6.6 had no direct I/O; later ones count as direct."""
    data = content(100_000)
    fd = os.memfd_create("weights")
    os.write(fd, data.tobytes())
    region = Region.alloc(hip_device, 100_000)
    with Stager(hip_device, RING) as stager:
        stager.read(fd, "weights", 77, 90_000, region.address)
        stager.wait()
        info = stager.info()
        assert info.direct_bytes + info.plain_bytes == 90_000
    assert np.array_equal(copy_out(hip_device, region.address, 90_000), data[77:90_077])
    region.free()
    os.close(fd)


def test_a_short_file(hip: HipDouble, hip_device: Device, tmp_path: Path) -> None:
    """Both where it ends inside of the range and where it ends before."""
    data = content(10_000)
    before = hip.live()
    region = Region.alloc(hip_device, 20_000)
    with opened(tmp_path / "weights", data) as fd, Stager(hip_device, RING) as stager:
        for offset, nbytes, end in ((0, 10_001, 10_000), (9_000, 5000, 10_000), (20_000, 1, 20_000)):
            with pytest.raises(MappingError, match=rf"^some/weights: ends at byte {end}, expected \d+ bytes from") as e:
                stager.read(fd, "some/weights", offset, nbytes, region.address)
            assert e.value.file == "some/weights"
        stager.read(fd, "some/weights", 0, 10_000, region.address)  # it goes on
        stager.wait()
        assert np.array_equal(copy_out(hip_device, region.address, 10_000), data)
    region.free()
    assert hip.live() == before


def test_what_cannot_be_read(hip_device: Device, tmp_path: Path) -> None:
    region = Region.alloc(hip_device, 100)
    with Stager(hip_device, RING) as stager:
        with pytest.raises(MappingError, match=r"^weights: cannot be read while it is staged: Bad file descriptor"):
            stager.read(987_654, "weights", 0, 10, region.address)
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(MappingError, match=r"^weights: cannot be read at byte 0: Is a directory"):
            stager.read(folder, "weights", 0, 10, region.address)
        os.close(folder)
        with pytest.raises(_native.InvalidError, match="are no range"):
            stager.read(0, "weights", 2**63 - 1, 10, region.address)
        with pytest.raises(_native.InvalidError, match="to 0 are no range"):
            stager.read(0, "weights", 0, 10, 0)
    region.free()


def test_rings(hip: HipDouble, hip_device: Device) -> None:
    before = hip.live()
    with pytest.raises(_native.InvalidError, match="a ring of 65535 bytes, expected at least 65536"):
        Stager(hip_device, RING - 1)
    hip.set(pinned_memory=RING - 1)
    with pytest.raises(_native.OutOfMemoryError, match="allocating 65536 bytes of pinned memory"):
        Stager(hip_device, RING)
    assert hip.live() == before
    with Device("cpu", threads=1) as cpu, pytest.raises(_native.UnsupportedError, match="host pages in place"):
        Stager(cpu, RING)


def test_a_copy_that_is_refused(hip: HipDouble, hip_device: Device, tmp_path: Path) -> None:
    """An address that is no allocation: the runtime's error, and nothing is left behind."""
    region = Region.alloc(hip_device, 4096)
    before = hip.live()
    with opened(tmp_path / "weights", content(5000)) as fd:
        stager = Stager(hip_device, RING)
        with pytest.raises(_native.DeviceError, match="hipErrorInvalidValue"):
            stager.read(fd, "weights", 0, 5000, region.address)
        stager.close()
    assert hip.live() == before
    region.free()
