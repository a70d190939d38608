"""A level runs only where the processor has every extension that its files are compiled with."""

from __future__ import annotations

import re
from pathlib import Path

from apu_engine._native import LIBRARY_PATH, Device, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


def test_flags_are_what_dispatch_asks_the_processor_for() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    dispatch = (ROOT / "native" / "cpu" / "dispatch.cpp").read_text()
    flags = {
        level: set(re.findall(r"-m(\w+)", text))
        for level, text in re.findall(r"set\(APU_(AVX\w+)_FLAGS\s+([^)]+)\)", cmake)
    }
    asked = {
        level.upper(): set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', body))
        | {bit.lower() for bit in re.findall(r"& bit_(\w+)", body)}
        for level, body in re.findall(r"bool has_(avx\w+)\(\) \{(.*?)\n\}", dispatch, re.S)
    }
    assert set(flags) == {"AVX2", "AVX2_VEX", "AVX2_EVEX", "AVX512"}
    assert flags["AVX512"] <= asked["AVX512"] | asked["AVX2"]  # has_avx512() asks has_avx2() first
    assert asked["AVX512"] <= flags["AVX512"]
    for level in ("AVX2", "AVX2_VEX", "AVX2_EVEX"):
        assert flags[level] == asked[level], level


def bytes_where(mask: int, value: int) -> bytes:
    """A pattern for one byte whose bits under `mask` are `value`."""
    return b"[" + b"".join(re.escape(bytes([b])) for b in range(256) if b & mask == value) + b"]"


def test_the_vnni_variants_have_the_instruction_in_their_own_encoding() -> None:
    """vpdpbusd on 256 bits is 66.0F38.W0 50: processors with AVX-VNNI alone know its VEX form only."""
    code = LIBRARY_PATH.read_bytes()
    prefix = bytes_where(0x87, 0x05)  # W0, prefix 66; with VEX also the length
    vex = re.findall(rb"\xc4" + bytes_where(0x1F, 0x02) + prefix + rb"\x50", code)
    evex = re.findall(rb"\x62" + bytes_where(0x0F, 0x02) + prefix + bytes_where(0x60, 0x20) + rb"\x50", code)
    assert len(vex) > 100 and len(evex) > 100


def test_the_best_level_is_chosen() -> None:
    for name in ("avx512", "avx2vnni", "avx2", "portable"):
        try:
            with Device(isa=name, threads=1):
                break
        except UnsupportedError:
            continue
    with Device(threads=1) as device:
        assert device.props.isa == name
