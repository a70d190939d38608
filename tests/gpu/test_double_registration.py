"""The stand-in's own account of host memory that is read in place: what each misbehaviour does, called directly.

What the engine makes of it is in test_misbehaviour.py. Each way (facts of drivers in tests/gpu/double/registration.cpp)
is one function here, which returns the device's address or raises.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble, counted, library
from probe import Probe, ProbeError

from apu_engine._native import Device, Region
from apu_engine.memory.verify import checksum

PAGE = mmap.PAGESIZE
PAGES = 16
FINE, COARSE, MIXED = 0, 1, 2
MAPPED, READ_ONLY = 0x2, 0x8
SET_COARSE, ACCESSED_BY = 100, 5
GPU = 0x6761


class Refused(Exception):
    pass


class Runtime:
    """HIP's and HSA's calls by ctypes."""

    def __init__(self, double: HipDouble) -> None:
        self.library = ctypes.CDLL(str(double.path))
        self._call("hipInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise Refused(f"{name} {status}")

    def svm(self, host: int, nbytes: int) -> int:
        pairs = (ctypes.c_uint64 * 6)(0, 1, 1, 1, 0x201, GPU)  # coarse-grained, read-only, accessible in place
        address, size = ctypes.c_void_p(host), ctypes.c_size_t(nbytes)
        self._call("hsa_amd_svm_attributes_set", address, size, pairs, ctypes.c_size_t(3))
        return host

    def advise(self, host: int, nbytes: int, advice: int = SET_COARSE) -> None:
        self._call("hipMemAdvise", ctypes.c_void_p(host), ctypes.c_size_t(nbytes), advice, 0)

    def advised(self, host: int, nbytes: int) -> int:
        self.advise(host, nbytes)
        self.advise(host, nbytes, ACCESSED_BY)
        return host

    def lock(self, host: int, nbytes: int) -> int:
        agents, out = (ctypes.c_uint64 * 1)(GPU), ctypes.c_void_p()
        address, size = ctypes.c_void_p(host), ctypes.c_size_t(nbytes)
        self._call("hsa_amd_memory_lock", address, size, agents, 1, ctypes.byref(out))
        return out.value or 0

    def unlock(self, host: int) -> None:
        self._call("hsa_amd_memory_unlock", ctypes.c_void_p(host))

    def register(self, host: int, nbytes: int, flags: int = MAPPED | READ_ONLY) -> int:
        self._call("hipHostRegister", ctypes.c_void_p(host), ctypes.c_size_t(nbytes), flags)
        return self.pointer(host)

    def pointer(self, host: int) -> int:
        out = ctypes.c_void_p()
        self._call("hipHostGetDevicePointer", ctypes.byref(out), ctypes.c_void_p(host), 0)
        return out.value or 0

    def unregister(self, host: int) -> None:
        self._call("hipHostUnregister", ctypes.c_void_p(host))

    def grain(self, host: int, nbytes: int) -> int:
        out = ctypes.c_uint32()
        address, size = ctypes.c_void_p(host), ctypes.c_size_t(nbytes)
        self._call("hipMemRangeGetAttribute", ctypes.byref(out), ctypes.c_size_t(4), 100, address, size)
        return out.value


WAYS = {"svm": Runtime.svm, "advise": Runtime.advised, "lock": Runtime.lock, "register": Runtime.register}


class File:
    """PAGES pages of a file, mapped; `again` unmaps and maps them."""

    def __init__(self, path: Path, writable: bool = False) -> None:
        self._file = path.open("r+b")
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.nbytes = PAGES * PAGE
        self.again()

    def again(self) -> None:
        self.close()
        self._map = mmap.mmap(self._file.fileno(), self.nbytes, access=self._access)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.__array_interface__["data"][0]

    def close(self) -> None:
        if hasattr(self, "_map"):
            del self.bytes
            self._map.close()


@pytest.fixture
def runtime(hip: HipDouble) -> Runtime:
    return Runtime(hip)


@pytest.fixture
def probe(hip: HipDouble) -> Probe:
    return Probe()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(1).bytes(PAGES * PAGE))
    return path


@pytest.fixture
def file(hip: HipDouble, path: Path) -> Iterator[File]:
    made = File(path)
    yield made
    made.close()


def reachable(hip: HipDouble) -> int:
    return hip.live()["range_bytes"]


def anonymous() -> int:
    """kB of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@pytest.mark.parametrize("way", WAYS)
def test_a_way(hip: HipDouble, runtime: Runtime, file: File, way: str) -> None:
    """In place, coarse-grained, and charged until the pages are unmapped, whatever is called before."""
    assert WAYS[way](runtime, file.address, file.nbytes) == file.address
    assert runtime.grain(file.address, file.nbytes) == COARSE
    registered = int(way in ("lock", "register"))
    assert hip.live()["registrations"] == registered and reachable(hip) == file.nbytes
    if way == "lock":
        runtime.unlock(file.address)
    if way == "register":
        runtime.unregister(file.address)
        with pytest.raises(Refused, match="hipHostUnregister 713"):
            runtime.unregister(file.address)
    assert hip.live()["registrations"] == 0 and reachable(hip) == file.nbytes
    file.again()
    assert reachable(hip) == 0
    assert runtime.grain(file.address, file.nbytes) == FINE


def test_parts_of_a_mapping(hip: HipDouble, runtime: Runtime, file: File) -> None:
    half = file.nbytes // 2
    runtime.svm(file.address + half, half)
    assert runtime.grain(file.address, file.nbytes) == MIXED
    assert runtime.grain(file.address, half) == FINE
    runtime.svm(file.address, half)
    assert runtime.grain(file.address, file.nbytes) == COARSE
    assert reachable(hip) == file.nbytes


def test_read_only_refused(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(read_only="refused")
    with pytest.raises(Refused, match=r"hipHostRegister 1$"):
        runtime.register(file.address, file.nbytes)
    assert runtime.register(file.address, file.nbytes, MAPPED) == file.address


@pytest.mark.parametrize("fault", ["register_limit", "kfd_limit"])
@pytest.mark.parametrize("way", WAYS)
def test_limits(hip: HipDouble, runtime: Runtime, file: File, way: str, fault: str) -> None:
    """Of one call, and of all together."""
    hip.set(**{fault: file.nbytes // 2})
    with pytest.raises(Refused):
        WAYS[way](runtime, file.address, file.nbytes)
    assert reachable(hip) == hip.live()["registrations"] == 0
    half = file.nbytes // 2
    WAYS[way](runtime, file.address, half)
    if fault == "register_limit":
        WAYS[way](runtime, file.address + half, half)
    else:
        with pytest.raises(Refused):
            WAYS[way](runtime, file.address + half, half)


def test_fine_grained_until_advised(hip: HipDouble, runtime: Runtime, file: File) -> None:
    """ROCm before mid-2026, in both orders."""
    hip.set(fine=1)
    runtime.register(file.address, file.nbytes)
    assert runtime.grain(file.address, file.nbytes) == FINE
    runtime.advise(file.address, file.nbytes)
    assert runtime.grain(file.address, file.nbytes) == COARSE
    file.again()
    runtime.advise(file.address, file.nbytes)
    assert runtime.grain(file.address, file.nbytes) == COARSE
    runtime.register(file.address, file.nbytes)
    assert runtime.grain(file.address, file.nbytes) == FINE


@pytest.mark.parametrize("way", WAYS)
def test_without_svm(hip: HipDouble, runtime: Runtime, file: File, path: Path, way: str) -> None:
    """A mapping that may not be written is refused; of another, each call gives an address of its own."""
    hip.set(svm="absent")
    with pytest.raises(Refused):
        WAYS[way](runtime, file.address, file.nbytes)
    if way not in ("lock", "register"):
        return
    writable, half = File(path, writable=True), file.nbytes // 2
    low = WAYS[way](runtime, writable.address, half)
    high = WAYS[way](runtime, writable.address + half, half)
    assert len({low, high, writable.address}) == 3 and high != low + half
    assert at(low, half) + at(high, half) == path.read_bytes()
    (runtime.unlock if way == "lock" else runtime.unregister)(writable.address)
    assert reachable(hip) == half
    writable.close()
    assert hip.live()["registrations"] == reachable(hip) == 0


def test_scattered_addresses(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(scattered=1)
    half = file.nbytes // 2
    low, high = (runtime.register(file.address + offset, half) for offset in (0, half))
    assert len({low, high, file.address}) == 3 and high != low + half
    assert at(low, half) + at(high, half) == bytes(file.bytes)
    assert runtime.pointer(file.address + half + 5) == high + 5


def test_unregistering_that_does_nothing(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(unregister="nothing")
    runtime.register(file.address, file.nbytes)
    runtime.unregister(file.address)
    assert hip.live()["registrations"] == 1 and runtime.pointer(file.address) == file.address
    file.again()
    assert hip.live()["registrations"] == reachable(hip) == 0


def test_what_a_failed_way_leaves(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(stale="refused")
    runtime.advise(file.address, PAGE)
    with pytest.raises(Refused):
        runtime.register(file.address, file.nbytes)
    file.again()
    runtime.register(file.address, file.nbytes)


def test_coarse_grain_that_is_refused_or_ignored(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(coarse="invalid")
    with pytest.raises(Refused, match=r"hipMemAdvise 1$"):
        runtime.advise(file.address, file.nbytes)
    assert runtime.svm(file.address, file.nbytes) and runtime.grain(file.address, file.nbytes) == COARSE
    file.again()
    hip.set(coarse="ignored")
    for way in ("svm", "advise", "lock"):
        WAYS[way](runtime, file.address, file.nbytes)
        assert runtime.grain(file.address, file.nbytes) == FINE


def test_one_way_alone(hip: HipDouble, runtime: Runtime, file: File) -> None:
    for way in WAYS:
        hip.set(refuse=",".join(other for other in WAYS if other != way))
        for other in WAYS:
            file.again()
            if other == way:
                WAYS[way](runtime, file.address, file.nbytes)
                continue
            with pytest.raises(Refused):
                WAYS[other](runtime, file.address, file.nbytes)


def test_memory_that_registering_costs(hip: HipDouble, runtime: Runtime, file: File) -> None:
    hip.set(copied=256)  # times as much: more than the test's own noise
    before = anonymous()
    runtime.svm(file.address, file.nbytes)
    assert anonymous() - before > 8 << 10
    file.again()
    hip.live()
    assert anonymous() - before < 8 << 10


def test_figures_of_memory(hip: HipDouble, runtime: Runtime) -> None:
    hip.set(mem_free=120 << 30, mem_total=62 << 30)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert runtime.library.hipMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    assert (free.value, total.value) == (120 << 30, 62 << 30)


def test_a_private_writable_mapping_is_copied(hip: HipDouble, runtime: Runtime, path: Path) -> None:
    stream = path.open("r+b")
    private = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE)
    view = np.frombuffer(private, np.uint8)
    before = anonymous()
    runtime.svm(view.__array_interface__["data"][0], len(view))
    assert anonymous() - before >= PAGES * PAGE >> 10
    del view
    private.close()
    stream.close()


def test_rates_of_plain_reads(hip: HipDouble, hip_device: Device, runtime: Runtime, file: File) -> None:
    """By the device's clock: a figure of the kind of memory, whatever the machine does meanwhile."""
    region = Region.alloc(hip_device, file.nbytes)

    def rate(address: int) -> float:
        return round(hip_device.read_rate(address, file.nbytes) / 1e9)

    assert rate(region.address) == 210
    runtime.svm(file.address, file.nbytes)
    assert rate(file.address) == 205
    file.again()
    hip.set(fine=1, scattered=1)
    assert rate(runtime.register(file.address, file.nbytes)) == 21
    runtime.advise(file.address, file.nbytes)
    hip.set(rate_coarse=95_000, rate_device=100_000)
    assert rate(runtime.pointer(file.address)) == 95 and rate(region.address) == 100
    region.free()


def test_copies_that_hang(hip: HipDouble, probe: Probe) -> None:
    """The k-th to the device; the bytes arrive once the device is released."""
    hip.set(copy_hang=2)
    data = np.arange(64, dtype=np.uint8)
    with probe.using("stream") as stream, probe.using("alloc", 64) as memory, probe.using("event", 0) as event:
        for _ in range(2):
            probe.to_device(memory, data, stream)
            probe.call("event_record", event, stream)
        assert [probe.ended(event) for _ in range(100)] == [False] * 100
        assert hip.totals()["copied_bytes"] == hip.totals()["pageable_bytes"] == 128
        hip.set()
        probe.call("event_wait", event)


def test_pinned_memory_that_ends(hip: HipDouble, probe: Probe) -> None:
    hip.set(pinned_oom_at=2, pinned_memory=250)
    first, _ = probe.host_alloc(100)
    with pytest.raises(ProbeError, match="hipErrorOutOfMemory"):
        probe.host_alloc(100)
    second, _ = probe.host_alloc(100)
    with pytest.raises(ProbeError, match="hipErrorOutOfMemory"):
        probe.host_alloc(100)
    assert hip.totals()["most_pinned_bytes"] == 200
    for host in (first, second):
        probe.call("host_free", host)


def test_counts_outlive_a_process(tmp_path: Path) -> None:
    """Killed, it leaves what it held in the file; ended, what it forgot to give back."""
    path = tmp_path / "counts"
    code = "import ctypes, os, signal, sys\nd = ctypes.CDLL(sys.argv[1])\nd.hipInit(0)\np = ctypes.c_void_p()\n"
    code += "d.hipMalloc(ctypes.byref(p), ctypes.c_size_t(100))\nexec(sys.argv[2])"
    for end in ("os.kill(os.getpid(), signal.SIGKILL)", "d.hipFree(p)", ""):
        command = [sys.executable, "-c", code, str(library()), end]
        subprocess.run(command, env={**os.environ, "APU_HIP_DOUBLE_COUNTS": str(path)})
        held = counted(path)
        assert held["allocations"] == (end != "d.hipFree(p)") and held["most_device_bytes"] == 100
        path.unlink()


def test_what_an_address_belongs_to(hip: HipDouble, runtime: Runtime, file: File, probe: Probe) -> None:
    def info(address: int) -> tuple[int, int, int, int]:
        """Type, owner, base and grain flag."""
        out = (ctypes.c_uint64 * 7)(56)
        assert runtime.library.hsa_amd_pointer_info(ctypes.c_void_p(address), out, None, None, None) == 0
        return out[0] >> 32, out[5], out[1], out[6] & 0xFFFFFFFF

    with probe.using("alloc", 100) as memory:
        assert info(memory + 50) == (1, GPU, memory, 4)
    assert info(file.address) == (0, 0, 0, 0)
    hip.set(scattered=1, fine=1)
    device = runtime.register(file.address, file.nbytes)
    assert info(device + 7)[0] == 2 and info(device + 7)[2:] == (device, 2)
    runtime.advise(file.address, file.nbytes)
    assert info(device + 7)[3] == 4


def test_kernels_read_what_the_device_reaches(
    hip: HipDouble, hip_device: Device, runtime: Runtime, file: File, path: Path
) -> None:
    """And by the device's address, not the host's where that is another; else the device is lost."""
    hip.set(scattered=1)
    assert hip_device.checksum(runtime.register(file.address, file.nbytes), file.nbytes) == checksum(file.bytes)
    code = """
    import sys
    from pathlib import Path
    from hip_double import HipDouble
    from test_double_registration import File, Runtime
    from apu_engine._native import Device, DeviceError
    double = HipDouble(Path(sys.argv[1]))
    runtime, file, device = Runtime(double), File(Path(sys.argv[2])), Device("hip")
    double.set(scattered=1)
    address = file.address
    for step in sys.argv[3].split():
        address = runtime.register(file.address, file.nbytes) if step == "register" else address
        address = file.address if step == "host" else address
        if step == "unregister":
            runtime.unregister(file.address)
    try:
        device.checksum(address, file.nbytes)
    except DeviceError as error:
        print(double.error(), "|", error)
    """
    for steps, text in (
        ("", "checksum reads memory that is not the device's"),
        ("register host", "checksum is given the host's address of what the device sees elsewhere"),
        ("register unregister", "checksum reads memory that is not the device's"),
    ):
        command = [sys.executable, "-c", textwrap.dedent(code), str(hip.path), str(path), steps]
        folders = os.pathsep.join(sys.path)
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders})
        assert run.stdout.startswith(f"{text} | device hip: hipErrorIllegalAddress (700)"), run.stderr
