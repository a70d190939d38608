"""A file's bytes on a GPU by every strategy that it has: the stand-in, or the machine's own (scripts/gpu_verify.sh).

The sum that the GPU computes over what it reads is the CPU's, in place nothing becomes anonymous memory, and plain
reads of a registered range work as those of device memory do.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from apu_engine._native import Device, InvalidError, Region, Stager
from apu_engine.memory.mapping import Mapping
from apu_engine.memory.verify import anonymous_bytes, checksum

MIB = 1 << 20
NBYTES = 512 * MIB if "APU_TEST_DEVICE" in os.environ else 4 * MIB
GROWTH = 64 * MIB  # that a runtime may take for its own books


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("file") / "weights"
    np.random.default_rng(9).integers(0, 2**32, NBYTES // 4, dtype=np.uint32).tofile(path)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[Mapping]:
    with Mapping.open(path) as mapping:
        mapping.populate(0, NBYTES)
        yield mapping


def test_registered(gpu: Device, file: Mapping) -> None:
    assert gpu.props.ways
    expected = checksum(file.array())
    for way in gpu.props.ways:
        before = anonymous_bytes()
        region = Region.register(gpu, file.address, NBYTES, "registered", way)
        assert gpu.checksum(region.address, NBYTES) == expected
        assert gpu.checksum(region.address + 4099, 70_001) == checksum(file.array(4099, 70_001))
        assert gpu.read_rate(region.address, NBYTES, 2) > 0
        assert anonymous_bytes() - before < GROWTH
        assert region.info().pinned_bytes == NBYTES and region.info().device_bytes == 0
        region.free()


def test_a_private_writable_mapping(gpu: Device, path: Path) -> None:
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), NBYTES, access=mmap.ACCESS_COPY) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        for way in gpu.props.ways:
            with pytest.raises(InvalidError, match=r"weights: its mapping at 0x[0-9a-f]+ is private and writable"):
                Region.register(gpu, view.ctypes.data, NBYTES, "registered", way)
        del view


def test_direct(gpu: Device, file: Mapping) -> None:
    """Where the device uses the host's page tables."""
    if gpu.props.pageable:
        region = Region.register(gpu, file.address, NBYTES, "direct")
        assert gpu.checksum(region.address, NBYTES) == checksum(file.array())
        region.free()


def test_staged(gpu: Device, path: Path, file: Mapping) -> None:
    region = Region.alloc(gpu, NBYTES + 256)
    to = region.address + 32
    fd = os.open(path, os.O_RDONLY)
    with Stager(gpu, min(NBYTES // 2, 64 * MIB)) as stager:
        stager.read(fd, str(path), 0, 12_345, to)
        stager.read(fd, str(path), 12_345, NBYTES - 12_345, to + 12_345)
        stager.wait()
        info = stager.info()
    os.close(fd)
    assert info.direct_bytes + info.plain_bytes == NBYTES and info.pinned_bytes <= 64 * MIB
    assert gpu.checksum(to, NBYTES) == checksum(file.array())
    region.free()
