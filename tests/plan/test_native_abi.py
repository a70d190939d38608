"""The generated declarations against the header and the library: nothing lost, nothing misread, stale ones refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apu_engine import _native
from apu_engine._native import ffi, generate, lib
from apu_engine._native.library import check_abi
from apu_engine.errors import ApuError, ConfigError

HEADER = Path(__file__).parents[2] / "native" / "include" / "apu.h"


def test_every_function_of_the_header_can_be_called() -> None:
    text = HEADER.read_text(encoding="utf-8")
    names = {part.split("(")[0].split()[-1].lstrip("*") for part in text.split("APU_API ")[1:] if "(" in part}
    names = {name for name in names if name.startswith("apu_")}
    assert len(names) > 25
    for name in names:
        assert getattr(lib, name)


def test_constants_come_from_the_header() -> None:
    assert (lib.APU_NONE, lib.APU_NO_PAGE, lib.APU_Q6_K) == (-1, 0xFFFFFFFF, 14)
    assert lib.apu_abi_version() == lib.APU_ABI_VERSION


def test_generated_text_has_no_preprocessor_but_constants() -> None:
    text = generate.declarations(HEADER.read_text(encoding="utf-8"))
    directives = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert directives and all(line.startswith("#define APU_") for line in directives)
    assert 'extern "C"' not in text and "__attribute__" not in text


class _Library:
    """The real library with another layout text or version."""

    def __init__(self, version: int, layout: str) -> None:
        self.APU_ABI_VERSION = lib.APU_ABI_VERSION
        self._version = version
        self._layout = ffi.new("char[]", layout.encode())

    def apu_abi_version(self) -> int:
        return self._version

    def apu_abi_layout(self) -> Any:
        return self._layout


def test_a_stale_library_is_refused() -> None:
    layout = ffi.string(lib.apu_abi_layout()).decode()
    path = Path("libapu.so")
    check_abi(ffi, _Library(lib.APU_ABI_VERSION, layout), path)
    with pytest.raises(ApuError, match="ABI version 1, found 2"):
        check_abi(ffi, _Library(2, layout), path)
    with pytest.raises(ApuError, match="struct apu_op "):
        check_abi(ffi, _Library(1, layout.replace("apu_op 160", "apu_op 168")), path)
    with pytest.raises(ApuError, match="struct apu_row "):
        check_abi(ffi, _Library(1, layout.replace("apu_row 16 0 4", "apu_row 16 4 0")), path)
    with pytest.raises(ApuError, match="struct apu_new "):
        check_abi(ffi, _Library(1, layout + "apu_new 8 0\n"), path)


def test_errors_carry_the_librarys_message() -> None:
    with pytest.raises(_native.NativeError, match="abacus") as error:
        _native.Device("abacus")
    assert error.value.status in (lib.APU_E_INVALID, lib.APU_E_UNSUPPORTED)
    with pytest.raises(ConfigError, match="isa"):
        _native.Device("cpu", isa="mmx")


def test_device_properties(device: _native.Device) -> None:
    assert device.props.kind == "cpu"
    assert device.props.threads == 2
    assert device.props.isa in _native.ISA
    assert device.props.memory_bytes > 1 << 20


def test_regions(device: _native.Device) -> None:
    region = _native.Region.alloc(device, 10_000)
    (chunk,) = region.chunks()
    assert chunk.nbytes >= 10_000 and region.address == chunk.device
    assert bytes(ffi.buffer(ffi.cast("char *", chunk.host or chunk.device), 10_000)) == bytes(10_000)
    region.free()
    region.free()
    host = bytearray(b"x" * 8192)
    address = int(ffi.cast("uintptr_t", ffi.from_buffer(host)))
    region = _native.Region.register(device, address, 8192)
    (chunk,) = region.chunks()
    assert (chunk.host, chunk.nbytes) == (address, 8192)
    region.free()
