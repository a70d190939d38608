"""The native library as Python sees it: `ffi`, `lib`, status checks, devices, memory, mapping guards.

Importing opens libapu.so and compares its ABI with the declarations generated from native/include/apu.h.
Nothing here knows about models. Handles are closed explicitly; closing twice is harmless. Calls release the
interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from apu_engine._native.library import kernels_folder, open_library
from apu_engine.config import kernels_wanted
from apu_engine.errors import ApuError, ConfigError, MappingError

ffi: Any
lib: Any
ffi, lib, LIBRARY_PATH = open_library()

NONE: int = lib.APU_NONE
NO_PAGE: int = lib.APU_NO_PAGE
PAGE_TOKENS = 128

ISA = {
    "auto": lib.APU_ISA_AUTO,
    "portable": lib.APU_ISA_PORTABLE,
    "avx2": lib.APU_ISA_AVX2,
    "avx2vnni": lib.APU_ISA_AVX2_VNNI,
    "avx512": lib.APU_ISA_AVX512,
}
STRATEGIES = {
    "auto": lib.APU_MEMORY_AUTO,
    "registered": lib.APU_MEMORY_REGISTERED,
    "direct": lib.APU_MEMORY_DIRECT,
    "staged": lib.APU_MEMORY_STAGED,
}
WAYS = {
    "auto": lib.APU_WAY_AUTO,
    "svm": lib.APU_WAY_SVM,
    "advise": lib.APU_WAY_ADVISE,
    "lock": lib.APU_WAY_LOCK,
    "register": lib.APU_WAY_REGISTER,
}
GRAINS = {"unknown": lib.APU_GRAIN_UNKNOWN, "fine": lib.APU_GRAIN_FINE, "coarse": lib.APU_GRAIN_COARSE}


class NativeError(ApuError):
    """A native call failed; `status` is its APU_E_* code. The message is the library's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InvalidError(NativeError):
    """An argument, shape, dtype or index is wrong: a bug in the caller or a lying model file."""


class OutOfMemoryError(NativeError):
    """An allocation failed."""


class UnsupportedError(NativeError):
    """Valid, but this device or build cannot do it."""


class DeviceError(NativeError):
    """The device or its runtime failed."""


class CancelledError(NativeError):
    """Plan.cancel() stopped the submission."""


class WaitTimeout(NativeError):
    """The submission is still running; its event stays valid."""


_OK: int = lib.APU_OK
_E_MAPPING: int = lib.APU_E_MAPPING
_ERRORS: dict[int, type[NativeError]] = {
    lib.APU_E_INVALID: InvalidError,
    lib.APU_E_MEMORY: OutOfMemoryError,
    lib.APU_E_UNSUPPORTED: UnsupportedError,
    lib.APU_E_DEVICE: DeviceError,
    lib.APU_E_CANCELLED: CancelledError,
    lib.APU_E_TIMEOUT: WaitTimeout,
}


def check(status: int) -> None:
    """Returns when `status` is APU_OK.

    Else raises the NativeError subclass (or MappingError) it stands for.
    """
    if status == _OK:
        return
    message = os.fsdecode(ffi.string(lib.apu_last_error())) or f"native call failed with status {status}"
    if status == _E_MAPPING:
        path = faulted() or ""
        raise MappingError(path, message.removeprefix(path).lstrip(": "))
    raise _ERRORS.get(status, NativeError)(status, message)


def guard(address: int, nbytes: int, path: str) -> None:
    """A page fault in [address, address + nbytes) becomes MappingError naming `path`, instead of SIGBUS."""
    check(lib.apu_mapping_guard(ffi.cast("void *", address), nbytes, os.fsencode(path)))


def unguard(address: int) -> None:
    """Ends the guard that began at `address`; call it before unmapping."""
    check(lib.apu_mapping_release(ffi.cast("void *", address)))


def faulted() -> str | None:
    """Path of the first guarded mapping that was found truncated or unreadable, None when all are well."""
    path = lib.apu_mapping_fault()
    return None if path == ffi.NULL else os.fsdecode(ffi.string(path))


@dataclass(frozen=True, slots=True)
class DeviceProps:
    """What apu_device_get_props reports; `memory_bytes` is what the device can address as its own.

    `pageable`: it reads pageable host memory through the host's page tables. `ways`: of WAYS, those whose functions the
    runtime has.
    """

    kind: str
    name: str
    arch: str
    integrated: bool
    threads: int
    isa: str
    wave_size: int
    pageable: bool
    ways: tuple[str, ...]
    memory_bytes: int
    driver_version: int


class Device:
    """A compute device: "cpu", "hip" or "cuda". Close it after its plans and regions.

    Raises UnsupportedError, with the reason, where the machine or the build lacks it. `threads`, `isa`, `pin` and
    `spin_us` are the cpu's; 0 means the physical cores that affinity and cgroup allow, and the library's default.
    `kernels` names the folder of a GPU's code objects, `runtime` the file of libamdhip64 (apu_engine.runtime chooses).
    """

    def __init__(
        self,
        kind: str = "cpu",
        index: int = 0,
        *,
        threads: int = 0,
        isa: str = "auto",
        pin: bool = False,
        spin_us: int = 0,
        kernels: str | None = None,
        runtime: str | os.PathLike[str] | None = None,
    ) -> None:
        self.handle: Any = None
        self.index = index
        if isa not in ISA:
            raise ConfigError(f"isa: expected one of {', '.join(ISA)}, found {isa!r}", "isa")
        folder = ffi.new("char[]", os.fsencode(kernels or kernels_wanted() or kernels_folder()))
        options = ffi.new(
            "apu_device_options *",
            {"threads": threads, "isa": ISA[isa], "pin": pin, "spin_us": spin_us, "kernels": folder},
        )
        library = ffi.new("char[]", os.fsencode(runtime)) if runtime is not None else ffi.NULL
        options.runtime = library
        out = ffi.new("apu_device **")
        check(lib.apu_device_open(kind.encode(), index, options, out))
        self.handle = out[0]
        props = ffi.new("apu_device_props *")
        check(lib.apu_device_get_props(self.handle, props))
        self.props = DeviceProps(
            kind=ffi.string(props.kind).decode(),
            name=ffi.string(props.name).decode(errors="replace"),
            arch=ffi.string(props.arch).decode(),
            integrated=bool(props.integrated),
            threads=props.threads,
            isa=next((name for name, level in ISA.items() if level == props.isa), str(props.isa)),
            wave_size=props.wave_size,
            pageable=bool(props.pageable),
            ways=tuple(name for name, way in WAYS.items() if way and props.ways >> way & 1),
            memory_bytes=props.memory_bytes,
            driver_version=props.driver_version,
        )

    def free_memory(self) -> int:
        """Bytes of the device's own memory that are free now."""
        free, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        check(lib.apu_device_memory(self.handle, free, total))
        return int(free[0])

    def read_rate(self, address: int, nbytes: int, passes: int = 1) -> float:
        """Bytes per second of plain reads of a range, by all workers or a whole GPU: the best of `passes`.

        What bounds a product with weights that lie there. `address` is the device's. Raises InvalidError for an
        empty range.
        """
        rate = ffi.new("double *")
        check(lib.apu_kernel_read(self.handle, ffi.cast("void *", address), nbytes, passes, rate))
        return float(rate[0]) * 1e9

    def gather_rate(self, addresses: Sequence[int], nbytes: int, passes: int = 1) -> float:
        """Bytes per second of plain reads of parts of `nbytes` each at device addresses, all of them in each of
        `passes`. Raises InvalidError for no parts, empty ones or more than 65535.
        """
        rate = ffi.new("double *")
        parts = ffi.new("uint64_t[]", list(addresses))
        check(lib.apu_kernel_gather(self.handle, parts, len(addresses), nbytes, passes, rate))
        return float(rate[0]) * 1e9

    def copy(self, to: int, source: int, nbytes: int, *, to_host: bool = False, from_host: bool = False) -> None:
        """Copies bytes between addresses of the device's and of the host's memory; returns when they are there."""
        check(lib.apu_memory_copy(self.handle, to, source, nbytes, to_host, from_host))

    def checksum(self, address: int, nbytes: int) -> int:
        """The 64-bit sum of apu_kernel_checksum over what the device reads at its address `address`."""
        out = ffi.new("uint64_t *")
        check(lib.apu_kernel_checksum(self.handle, address, nbytes, out))
        return int(out[0])

    def matmul_time(
        self, dtype: int, weights: Any, x: Any, *, copies: int, passes: int, precision: int = lib.APU_PRECISION_DEFAULT
    ) -> float:
        """Seconds of one product of x (T, K) float32 with weights (N, row bytes) uint8, on a GPU.

        A graph holds products with `copies` of the weights; the median of `passes` runs of it.
        """
        (n, stride), (rows, k) = weights.shape, x.shape
        found = ffi.new("double *")
        data, floats = ffi.cast("void *", weights.ctypes.data), ffi.cast("float *", x.ctypes.data)
        check(
            lib.apu_kernel_time(self.handle, dtype, precision, data, stride, floats, rows, n, k, copies, passes, found)
        )
        return float(found[0]) * 1e-9

    def read_time(self, data: Any, *, copies: int, passes: int) -> float:
        """Seconds of one plain read of data (N, 4 K) uint8, launched and measured as products are."""
        n, stride = data.shape
        found, address = ffi.new("double *"), ffi.cast("void *", data.ctypes.data)
        none, dtype = ffi.cast("float *", 0), lib.APU_F32
        check(
            lib.apu_kernel_time(self.handle, dtype, 0, address, stride, none, 1, n, stride // 4, copies, passes, found)
        )
        return float(found[0]) * 1e-9

    def close(self) -> None:
        if self.handle is not None:
            lib.apu_device_close(self.handle)
            self.handle = None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Host bytes [host, host + nbytes) are at `device` on the device."""

    host: int
    device: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """How a region came to be: its strategy, of WAYS and of GRAINS, bytes of the device's own and registered ones."""

    strategy: str
    way: str
    grain: str
    device_bytes: int
    pinned_bytes: int


class Region:
    """Memory that a device can read: a registered host range, or an allocation of the device's own."""

    def __init__(self, handle: Any, nbytes: int) -> None:
        self._handle = handle
        self.nbytes = nbytes

    @classmethod
    def register(cls, device: Device, address: int, nbytes: int, strategy: str = "auto", way: str = "auto") -> Region:
        """Makes host memory readable by the device: see apu_memory_register. The range must outlive the region.

        Raises UnsupportedError where the runtime lacks the strategy or the way, DeviceError where it refuses,
        InvalidError for a private writable mapping.
        """
        out = ffi.new("apu_region **")
        host = ffi.cast("void *", address)
        check(lib.apu_memory_register(device.handle, host, nbytes, STRATEGIES[strategy], WAYS[way], out))
        return cls(out[0], nbytes)

    @classmethod
    def alloc(cls, device: Device, nbytes: int) -> Region:
        """Zeroed device memory, committed when first touched where the system allows it."""
        out = ffi.new("apu_region **")
        check(lib.apu_memory_alloc(device.handle, nbytes, out))
        return cls(out[0], nbytes)

    def chunks(self) -> tuple[Chunk, ...]:
        """The region's parts, in host order."""
        capacity = 64
        while True:
            count = ffi.new("uint32_t *", capacity)
            chunks = ffi.new("apu_chunk[]", capacity)
            status = lib.apu_region_chunks(self._handle, chunks, count)
            if count[0] <= capacity:
                check(status)
                return tuple(Chunk(chunks[i].host, chunks[i].device, chunks[i].bytes) for i in range(count[0]))
            capacity = count[0]

    def info(self) -> RegionInfo:
        """Strategy, way, grain as the runtime says, and bytes."""
        found = ffi.new("apu_region_info *")
        check(lib.apu_region_get_info(self._handle, found))

        def name(names: dict[str, int], number: int) -> str:
            return next(name for name, value in names.items() if value == number)

        return RegionInfo(
            strategy=name(STRATEGIES, found.strategy),
            way=name(WAYS, found.way),
            grain=name(GRAINS, found.grain),
            device_bytes=found.device_bytes,
            pinned_bytes=found.pinned_bytes,
        )

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self.chunks()[0].device

    def free(self) -> None:
        if self._handle is not None:
            lib.apu_region_free(self._handle)
            self._handle = None


@dataclass(frozen=True, slots=True)
class StagerInfo:
    """Bytes read so far with direct I/O and through the page cache, and the ring's pinned bytes."""

    direct_bytes: int
    plain_bytes: int
    pinned_bytes: int


class Stager:
    """Copies bytes of files into device memory through at most `ring_bytes` of pinned memory, with direct I/O.

    One thread at a time; close it before its device. Raises UnsupportedError on the cpu.
    """

    def __init__(self, device: Device, ring_bytes: int) -> None:
        self._handle: Any = None
        out = ffi.new("apu_stager **")
        check(lib.apu_stager_open(device.handle, ring_bytes, out))
        self._handle = out[0]

    def read(self, fd: int, path: str, offset: int, nbytes: int, to: int) -> None:
        """Bytes [offset, offset + nbytes) of the open file to device address `to`, at any alignment.

        Returns when all is read and the copies are queued. Raises MappingError, with `path`, where the file is shorter
        or cannot be read.
        """
        status = lib.apu_stager_read(self._handle, fd, os.fsencode(path), offset, nbytes, to)
        if status == _E_MAPPING:
            message = os.fsdecode(ffi.string(lib.apu_last_error()))
            raise MappingError(path, message.removeprefix(path).lstrip(": "))
        check(status)

    def wait(self) -> None:
        """Returns when everything read so far is in device memory."""
        check(lib.apu_stager_wait(self._handle))

    def info(self) -> StagerInfo:
        """Counters of this stager."""
        found = ffi.new("apu_stager_info *")
        check(lib.apu_stager_bytes(self._handle, found))
        return StagerInfo(found.direct_bytes, found.plain_bytes, found.pinned_bytes)

    def close(self) -> None:
        if self._handle is not None:
            lib.apu_stager_close(self._handle)
            self._handle = None

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
