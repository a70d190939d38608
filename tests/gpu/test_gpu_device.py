"""Device "hip" on the stand-in: which kernels it loads, its memory, and that failures leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble
from probe import Probe, ProbeError

from apu_engine import _native
from apu_engine._native import Device, Region, check, lib
from apu_engine.errors import MappingError
from apu_engine.memory.mapping import Mapping

PIECE = 64 << 20  # of a staged copy


@pytest.mark.parametrize(
    ("kind", "arch", "files", "chosen"),
    [
        ("hip", "gfx1151", ["gfx1151.co", "gfx11-generic.co"], "gfx1151.co"),
        ("hip", "gfx1151", ["gfx1150.co", "gfx11-generic.co"], "gfx11-generic.co"),
        ("hip", "gfx1201", ["gfx11-generic.co", "gfx12-generic.co"], "gfx12-generic.co"),
        ("hip", "gfx1151", ["gfx1150.co", "gfx12-generic.co", "gfx1151.cubin"], None),
        ("hip", "gfx90a", ["gfx9-generic.co"], None),  # which gfx90a does not run
        ("cuda", "sm_90", ["sm_90.cubin", "sm_100.cubin"], "sm_90.cubin"),
        ("cuda", "sm_89", ["sm_80.cubin", "sm_86.cubin", "sm_90.cubin"], "sm_86.cubin"),
        ("cuda", "sm_121", ["sm_120.cubin", "sm_120a.cubin"], "sm_120.cubin"),
        ("cuda", "sm_86", ["sm_89.cubin", "sm_75.cubin", "sm_90a.cubin"], None),
    ],
)
def test_which_code_object(
    hip: HipDouble, tmp_path: Path, kind: str, arch: str, files: list[str], chosen: str | None
) -> None:
    for file in files:
        (tmp_path / file).touch()
    if chosen:
        assert Probe().find_module(kind, arch, tmp_path) == chosen
        return
    advice = rf"device {kind}: no kernels for {arch} in {tmp_path}; build them with ./build.sh --targets {arch}"
    with pytest.raises(ProbeError, match=advice):
        Probe().find_module(kind, arch, tmp_path)


def test_kernels_that_are_missing_or_wrong(hip: HipDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(tmp_path))
    with pytest.raises(_native.UnsupportedError, match=rf"no kernels for gfx1151 in {tmp_path}; build them with"):
        Device("hip")
    (tmp_path / "gfx1151.co").touch()
    with pytest.raises(_native.UnsupportedError, match=r"gfx1151\.co: is empty"):
        Device("hip")
    (tmp_path / "gfx1151.co").write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(_native.DeviceError, match=r"gfx1151\.co for gfx1151: .*hipErrorInvalidImage \(200\) loading"):
        Device("hip")


def test_devices_that_do_not_exist(hip: HipDouble) -> None:
    with pytest.raises(_native.UnsupportedError, match=r"device hip:1 does not exist: the runtime shows 1 device$"):
        Device("hip", 1)
    with pytest.raises(_native.InvalidError, match="index is -1"):
        Device("hip", -1)


def test_properties(hip_device: Device) -> None:
    props = hip_device.props
    assert (props.kind, props.arch, props.wave_size, props.integrated) == ("hip", "gfx1151", 32, True)
    assert (props.name, props.memory_bytes, props.threads) == ("HIP double 0", 64 << 30, 0)


def copy_out(device: Device, address: int, nbytes: int) -> np.ndarray:
    out = np.zeros(nbytes, np.uint8)
    check(lib.apu_memory_copy(device.handle, out.ctypes.data, address, nbytes, 1, 0))
    return out


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4096), (13, 1), (200, 100_000), (32, PIECE * 2 + 77)])
def test_staged_weights(hip_device: Device, offset: int, nbytes: int) -> None:
    """The bytes, at addresses aligned as they were, with zeros around them."""
    data = np.random.default_rng(nbytes).integers(1, 255, offset + nbytes, dtype=np.uint8)
    host = data.ctypes.data + offset
    region = Region.register(hip_device, host, nbytes)
    (chunk,) = region.chunks()
    assert (chunk.host, chunk.nbytes) == (host, nbytes)
    assert chunk.device % 256 == host % 256
    got = copy_out(hip_device, chunk.device - 16, nbytes + 32)
    assert not got[:16].any() and not got[-16:].any()
    assert np.array_equal(got[16:-16], data[offset:])
    region.free()


def test_memory_is_zeroed_and_copied(hip_device: Device) -> None:
    first, second = Region.alloc(hip_device, 1000), Region.alloc(hip_device, 1000)
    assert first.chunks()[0].host == 0
    assert not copy_out(hip_device, first.address, 1000).any()
    data = np.arange(1000, dtype=np.uint8)
    copy = lib.apu_memory_copy
    check(copy(hip_device.handle, first.address, data.ctypes.data, 1000, 0, 1))
    check(copy(hip_device.handle, second.address, first.address, 1000, 0, 0))
    assert np.array_equal(copy_out(hip_device, second.address, 1000), data)
    other = np.zeros(1000, np.uint8)
    check(copy(hip_device.handle, other.ctypes.data, data.ctypes.data, 1000, 1, 1))
    assert np.array_equal(other, data)
    with pytest.raises(_native.DeviceError, match=r"hipErrorInvalidValue \(1\) copying 1001 bytes from the device"):
        copy_out(hip_device, second.address, 1001)
    first.free()
    second.free()


def test_weights_that_do_not_fit(hip: HipDouble, hip_device: Device) -> None:
    data = np.zeros(1 << 20, np.uint8)
    before = hip.live()
    for faults, text in (
        ({"memory": 1000}, r"hipErrorOutOfMemory \(2\) allocating 1049\d\d\d bytes of device memory"),
        ({"pinned_memory": 1000}, r"hipErrorOutOfMemory \(2\) allocating 1048576 bytes of pinned memory"),
    ):
        hip.set(**faults)
        with pytest.raises(_native.OutOfMemoryError, match=text):
            Region.register(hip_device, data.ctypes.data, data.nbytes)
        assert hip.live() == before
    hip.set(memory=1000)
    with pytest.raises(_native.OutOfMemoryError, match=r"allocating 1048576 bytes of device memory"):
        Region.alloc(hip_device, 1 << 20)
    assert hip.live() == before


def test_a_file_that_shrinks_while_it_is_staged(hip: HipDouble, hip_device: Device, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (1 << 20))
    mapping = Mapping.open(path)
    os.truncate(path, 4096)
    before = hip.live()
    with pytest.raises(MappingError, match="weights"):
        Region.register(hip_device, mapping.address, mapping.nbytes)
    assert hip.live() == before
    mapping.close()


def test_a_device_that_has_faulted_can_be_closed(hip: HipDouble, hip_device: Device) -> None:
    """Freeing fails as everything does; nothing hangs or crashes."""
    region = Region.alloc(hip_device, 64)
    data = np.zeros(64, np.uint8)
    hip.fail("hipErrorIllegalAddress")
    with pytest.raises(_native.DeviceError, match="hipErrorIllegalAddress"):
        copy_out(hip_device, region.address, 64)
    with pytest.raises(_native.DeviceError, match="hipErrorIllegalAddress"):
        Region.register(hip_device, data.ctypes.data, 64)
    hip.set()
    region.free()
