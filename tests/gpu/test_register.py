"""Host memory that the device reads in place, by each way, on the stand-in for libamdhip64 and the HSA runtime.

What a region says of itself, that the device reads the file's bytes there, what is refused before the runtime sees it,
and the runtime's own errors. How the engine chooses among the ways is tested in tests/memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble, library, shared_object

from apu_engine import _native
from apu_engine._native import Device, Region, check, lib

PAGE = mmap.PAGESIZE
PAGES = 5
WAYS = ("svm", "advise", "lock", "register")
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapped:
    """PAGES pages of a file."""

    def __init__(self, path: Path, prot: int = PROT_READ, flags: int = mmap.MAP_SHARED) -> None:
        self.path, self.nbytes = path, PAGES * PAGE
        fd = os.open(path, os.O_RDWR)
        self.address = libc.mmap(None, self.nbytes, prot, flags, fd, 0)
        os.close(fd)
        assert self.address not in (None, 2**64 - 1)

    def close(self) -> None:
        libc.munmap(self.address, self.nbytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some weights.gguf"
    path.write_bytes(np.random.default_rng(5).bytes(PAGES * PAGE))
    return path


@pytest.fixture
def file(hip: HipDouble, path: Path) -> Iterator[Mapped]:
    mapped = Mapped(path)
    yield mapped
    mapped.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Device]:
    with Device("cpu", threads=1) as device:
        yield device


def register(device: Device, file: Mapped, way: str) -> Region:
    return Region.register(device, file.address, file.nbytes, "registered", way)


def copy_out(device: Device, address: int, nbytes: int) -> bytes:
    out = np.zeros(nbytes, np.uint8)
    check(lib.apu_memory_copy(device.handle, out.ctypes.data, address, nbytes, 1, 0))
    return out.tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_in_place(hip: HipDouble, hip_device: Device, host: Device, file: Mapped, way: str) -> None:
    """The file's bytes at the file's addresses, coarse-grained, no memory of the device's own, and all of it undone."""
    assert hip_device.props.ways == WAYS
    before = hip.live()
    region = register(hip_device, file, way)
    (chunk,) = region.chunks()
    assert (chunk.host, chunk.device, chunk.nbytes) == (file.address, file.address, file.nbytes)
    info = region.info()
    assert (info.strategy, info.way, info.grain) == ("registered", way, "coarse")
    assert (info.device_bytes, info.pinned_bytes) == (0, file.nbytes)
    live = hip.live()
    assert live["allocations"] == before["allocations"] and live["range_bytes"] == file.nbytes
    assert hip_device.checksum(chunk.device, file.nbytes) == host.checksum(file.address, file.nbytes)
    assert copy_out(hip_device, chunk.device, file.nbytes) == file.path.read_bytes()
    region.free()
    region.free()
    file.close()
    assert hip.live() == before


@pytest.mark.parametrize("way", ["lock", "register"])
def test_at_an_address_of_the_devices_own(
    hip: HipDouble, hip_device: Device, host: Device, file: Mapped, way: str
) -> None:
    hip.set(scattered=1)
    region = register(hip_device, file, way)
    (chunk,) = region.chunks()
    assert chunk.host == file.address and chunk.device != file.address
    assert region.info().grain == "coarse"
    assert hip_device.checksum(chunk.device, file.nbytes) == host.checksum(file.address, file.nbytes)
    region.free()


def test_a_part_of_a_mapping(hip: HipDouble, hip_device: Device, host: Device, file: Mapped) -> None:
    """Exactly the pages that were named."""
    start, nbytes = file.address + PAGE, 2 * PAGE
    region = Region.register(hip_device, start, nbytes, "registered", "svm")
    assert hip.live()["range_bytes"] == nbytes
    assert hip_device.checksum(region.address, nbytes) == host.checksum(start, nbytes)
    region.free()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("svm", r"HSA_STATUS_ERROR \(0x1000\) setting the attributes of 20480 bytes at 0x"),
        ("advise", r"hipErrorInvalidValue \(1\) advising that the device accesses 20480 bytes at 0x"),
        ("lock", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES \(0x1008\) locking 20480 bytes at 0x"),
        ("register", r"hipErrorInvalidValue \(1\) registering 20480 bytes at 0x"),
    ],
)
def test_a_way_that_is_refused(hip: HipDouble, hip_device: Device, file: Mapped, way: str, message: str) -> None:
    before = hip.live()
    hip.set(refuse=way)
    with pytest.raises(_native.DeviceError, match=f"device hip: {message}"):
        register(hip_device, file, way)
    assert hip.live() == before


def test_a_limit_in_bytes(hip: HipDouble, hip_device: Device, file: Mapped) -> None:
    hip.set(register_limit=2 * PAGE)
    for way in WAYS:
        with pytest.raises(_native.DeviceError):
            register(hip_device, file, way)
        region = Region.register(hip_device, file.address, 2 * PAGE, "registered", way)
        region.free()


def test_a_runtime_without_read_only_registration(hip: HipDouble, hip_device: Device, file: Mapped) -> None:
    """Tried again without the flag where nobody can write the pages, and only there."""
    hip.set(read_only="refused")
    region = register(hip_device, file, "register")
    assert region.info().grain == "coarse"  # by the advice behind it
    region.free()
    writable = Mapped(file.path, PROT_READ | PROT_WRITE)
    with pytest.raises(_native.DeviceError, match="hipErrorInvalidValue"):
        register(hip_device, writable, "register")
    writable.close()


@pytest.mark.parametrize(
    ("faults", "way", "grain"),
    [
        ({"fine": 1}, "register", "coarse"),  # old releases: the advice comes behind the registration that undoes it
        ({"fine": 1, "coarse": "invalid"}, "register", "fine"),
        ({"fine": 1, "coarse": "ignored"}, "register", "fine"),
        ({"coarse": "invalid"}, "advise", "fine"),
        ({"coarse": "ignored"}, "advise", "fine"),
        ({"coarse": "ignored"}, "svm", "fine"),
        ({"coarse": "ignored"}, "lock", "fine"),
        ({"coarse": "ignored", "scattered": 1}, "lock", "fine"),
    ],
)
def test_the_grain_is_what_the_runtime_says(
    hip: HipDouble, hip_device: Device, file: Mapped, faults: dict[str, object], way: str, grain: str
) -> None:
    hip.set(**faults)
    region = register(hip_device, file, way)
    assert region.info().grain == grain
    region.free()


def test_a_kernel_without_svm(hip: HipDouble, hip_device: Device, host: Device, file: Mapped) -> None:
    """Read-only pages are refused, whatever the way; writable shared ones get an address of their own."""
    hip.set(svm="absent")
    for way in WAYS:
        with pytest.raises(_native.DeviceError):
            register(hip_device, file, way)
    writable = Mapped(file.path, PROT_READ | PROT_WRITE)
    for way in ("lock", "register"):
        region = register(hip_device, writable, way)
        assert region.address != writable.address and region.info().grain == "coarse"
        assert hip_device.checksum(region.address, file.nbytes) == host.checksum(file.address, file.nbytes)
        region.free()
    writable.close()


def test_a_private_writable_mapping(hip: HipDouble, hip_device: Device, path: Path) -> None:
    """Refused by name, the runtime is not asked; read-only and private is in place."""
    private = Mapped(path, PROT_READ | PROT_WRITE, mmap.MAP_PRIVATE)
    before = hip.live()
    for way in WAYS:
        message = r"some weights\.gguf: its mapping at 0x[0-9a-f]+ is private and writable \(rw-p\).*map it read-only"
        with pytest.raises(_native.InvalidError, match=message):
            register(hip_device, private, way)
    assert hip.live() == before
    libc.mprotect(private.address, (PAGES - 1) * PAGE, PROT_READ)
    with pytest.raises(_native.InvalidError, match="private and writable"):  # its last page
        register(hip_device, private, "svm")
    libc.mprotect(private.address, PAGES * PAGE, PROT_READ)
    register(hip_device, private, "svm").free()
    private.close()
    anonymous = np.ones(3 * PAGE, np.uint8)
    start = (anonymous.ctypes.data + PAGE - 1) & -PAGE
    with pytest.raises(_native.InvalidError, match="is private and writable"):
        Region.register(hip_device, start, PAGE, "registered", "register")


def test_pages_that_are_not_there(hip_device: Device, file: Mapped) -> None:
    libc.mprotect(file.address + PAGE, PAGE, PROT_NONE)
    with pytest.raises(_native.InvalidError, match=r"some weights\.gguf: .* is not readable \(---s\)"):
        register(hip_device, file, "svm")
    libc.munmap(file.address + PAGE, PAGE)
    with pytest.raises(_native.InvalidError, match="nothing is mapped at 0x"):
        register(hip_device, file, "svm")
    with pytest.raises(_native.InvalidError, match="not whole pages"):
        Region.register(hip_device, file.address + 16, PAGE, "registered", "svm")


def test_direct(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch, file: Mapped) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    with Device("hip") as device:
        assert not device.props.pageable
        with pytest.raises(_native.UnsupportedError, match="does not read host memory through the host's page tables"):
            Region.register(device, file.address + 3, 100, "direct")
    hip.set(pageable=1)
    with Device("hip") as device:
        assert device.props.pageable
        region = Region.register(device, file.address + 3, 100, "direct")
        (chunk,) = region.chunks()
        assert (chunk.host, chunk.device, chunk.nbytes) == (file.address + 3, file.address + 3, 100)
        info = region.info()
        assert (info.strategy, info.way, info.device_bytes, info.pinned_bytes) == ("direct", "auto", 0, 0)
        region.free()


def test_what_other_regions_say(hip_device: Device, host: Device, file: Mapped) -> None:
    staged = Region.register(hip_device, file.address, file.nbytes)
    assert staged.info().strategy == "staged" and staged.info().device_bytes >= file.nbytes
    staged.free()
    own = Region.alloc(hip_device, 1000)
    assert (own.info().strategy, own.info().device_bytes) == ("auto", 1000)
    own.free()
    in_place = Region.register(host, file.address, file.nbytes)
    assert (in_place.info().strategy, in_place.info().device_bytes) == ("direct", 0)
    in_place.free()


HSA = ("hsa_status_string", "hsa_iterate_agents", "hsa_agent_get_info", "hsa_amd_pointer_info")
LOCK = ("hsa_amd_memory_lock", "hsa_amd_memory_unlock")
SVM = ("hsa_amd_svm_attributes_set", "hsa_amd_svm_attributes_get")


@pytest.mark.parametrize(
    ("hidden", "ways"),
    [
        (SVM, ("advise", "lock", "register")),
        (HSA + LOCK + SVM, ("advise", "register")),
        (("hipMemAdvise", "hipMemRangeGetAttribute"), ("svm", "lock", "register")),
        (("hipHostUnregister",), ("svm", "advise", "lock")),
        (("hsa_amd_pointer_info",), ("advise", "register")),
    ],
)
def test_functions_that_a_runtime_lacks(
    monkeypatch: pytest.MonkeyPatch, hip_kernels: Path, path: Path, hidden: tuple[str, ...], ways: tuple[str, ...]
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    double = library(hide=hidden)
    monkeypatch.setenv("APU_HIP_LIBRARY", str(double))
    file = Mapped(path)
    with Device("hip") as device:
        assert device.props.ways == ways
        for way in WAYS:
            if way in ways:
                region = register(device, file, way)
                assert device.checksum(region.address, file.nbytes)
                region.free()
                continue
            with pytest.raises(_native.UnsupportedError, match=f"lacks the functions of way {way}$"):
                register(device, file, way)
    file.close()


def test_the_hsa_runtime_beside_it(tmp_path: Path, hip_kernels: Path) -> None:
    """Of a libamdhip64 that opens it at run time, which ROCm 7's does, instead of being linked with it."""
    source = tmp_path / "hsa.cpp"
    source.write_text("".join(f'extern "C" int {name}() {{ return 0x1000; }}\n' for name in (*HSA, *LOCK, *SVM)))
    flags = ["-fvisibility=default", "-Wl,-soname,libhsa-runtime64.so.1"]
    shutil.copy(shared_object("hsa-stub", [source], [], flags), tmp_path / "libhsa-runtime64.so.1")
    shutil.copy(library(hide=HSA + LOCK + SVM), tmp_path / "libamdhip64.so.7")
    environment = {**os.environ, "APU_HIP_LIBRARY": str(tmp_path / "libamdhip64.so.7"), "APU_KERNELS": str(hip_kernels)}
    code = "from apu_engine._native import Device; print(*Device('hip').props.ways)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.stdout, run.returncode) == ("svm advise lock register\n", 0), run.stderr


@pytest.mark.parametrize("way", WAYS)
def test_the_second_of_two_devices(
    hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch, file: Mapped, way: str
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    hip.set(devices=2)
    with Device("hip", 1) as device:
        region = register(device, file, way)
        assert copy_out(device, region.address, file.nbytes) == file.path.read_bytes()
        region.free()
