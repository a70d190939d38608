"""gpu::Driver as Python calls it: tests/gpu/driver_probe.cpp compiled with the driver's own sources."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hip_double import shared_object
from numpy.typing import NDArray
from shim import ROOT

HERE = Path(__file__).parent
PROPS = ("integrated", "wave_size", "compute_units", "lds_bytes", "lds_of_unit", "threads_of_unit", "memory", "l2")
INVALID, MEMORY, UNSUPPORTED, DEVICE = 1, 2, 3, 4


class ProbeError(Exception):
    """A call's status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Probe:
    """One driver of the process. Addresses and handles are numbers."""

    def __init__(self, kind: str = "hip") -> None:
        native = ROOT / "native"
        sources = [HERE / "driver_probe.cpp", *native.glob("gpu/driver*.cpp"), native / "gpu/module.cpp"]
        sources.append(native / "plan/abi.cpp")
        headers = [*native.glob("gpu/*.h"), native / "common.h", native / "include/apu.h"]
        flags = [f"-I{native}", f"-I{native / 'include'}"]
        self._library = ctypes.CDLL(str(shared_object("driver-probe", sources, headers, flags)))
        self._library.apu_last_error.restype = ctypes.c_char_p
        self.call("open", kind.encode())

    def call(self, name: str, *arguments: Any) -> None:
        """Numbers are passed as 64 bits. Raises ProbeError."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        status = getattr(self._library, f"probe_{name}")(*passed)
        if status:
            raise ProbeError(status, self._library.apu_last_error().decode())

    def made(self, name: str, *arguments: Any) -> int:
        """The handle or address that the call writes to its last argument."""
        out = ctypes.c_uint64()
        self.call(name, *arguments, ctypes.byref(out))
        return out.value

    def props(self, index: int = 0) -> dict[str, Any]:
        arch, numbers = ctypes.create_string_buffer(64), (ctypes.c_uint64 * len(PROPS))()
        self.call("props", index, arch, numbers)
        return {"arch": arch.value.decode(), **dict(zip(PROPS, numbers, strict=True))}

    def find_module(self, kind: str, arch: str, folder: Path) -> str:
        """Name of the file that is chosen."""
        path = ctypes.create_string_buffer(1024)
        self.call("find_module", kind.encode(), arch.encode(), str(folder).encode(), path)
        return Path(path.value.decode()).name

    def host_alloc(self, nbytes: int) -> tuple[int, int]:
        host, device = ctypes.c_uint64(), ctypes.c_uint64()
        self.call("host_alloc", nbytes, ctypes.byref(host), ctypes.byref(device))
        return host.value, device.value

    def ended(self, event: int) -> bool:
        ended = ctypes.c_uint32()
        self.call("event_query", event, ctypes.byref(ended))
        return bool(ended.value)

    def to_device(self, address: int, data: NDArray[Any], stream: int) -> None:
        self.call("to_device", address, data.ctypes.data, data.nbytes, stream)

    def to_host(self, data: NDArray[Any], address: int, stream: int) -> None:
        self.call("to_host", data.ctypes.data, address, data.nbytes, stream)

    @contextmanager
    def using(self, kind: str, *arguments: Any) -> Iterator[int]:
        """A stream, event or module, or "alloc" memory, until the end of the block."""
        handle = self.made(kind, *arguments)
        try:
            yield handle
        finally:
            end = {"alloc": "free", "module": "module_unload"}.get(kind, f"{kind}_destroy")
            self.call(end, handle)


class Sums:
    """Eight sums of 256 floats by the kernel shim_block_sum of shim_kernels.hip, on a stream of its own."""

    def __init__(self, probe: Probe, module: int, stream: int) -> None:
        self.probe, self.stream = probe, stream
        self.x = np.arange(8 * 256, dtype=np.float32).reshape(8, 256)
        self.function = probe.made("function", module, b"shim_block_sum")
        self.input = probe.made("alloc", self.x.nbytes)
        self.output = probe.made("alloc", 32)
        probe.to_device(self.input, self.x, stream)

    def launch(self, grid: tuple[int, int, int] = (8, 1, 1), threads: int = 256, x: int | None = None) -> None:
        argument = np.array([self.input if x is None else x, self.output], np.uint64)
        self.probe.call("launch", self.function, *grid, threads, 0, self.stream, argument.ctypes.data, argument.nbytes)
        argument[:] = 0  # it was copied

    def result(self) -> NDArray[np.float32]:
        out = np.zeros(8, np.float32)
        self.probe.to_host(out, self.output, self.stream)
        self.probe.call("stream_wait", self.stream)
        return out

    def close(self) -> None:
        self.probe.call("free", self.input)
        self.probe.call("free", self.output)
