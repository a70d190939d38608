"""A level runs only where the processor has every extension that its files are compiled with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_flags_are_what_dispatch_asks_the_processor_for() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    dispatch = (ROOT / "native" / "cpu" / "dispatch.cpp").read_text()
    flags = {
        level: set(re.findall(r"-m(\w+)", text))
        for level, text in re.findall(r'APU_(AVX\w+)_SOURCES\} PROPERTIES COMPILE_OPTIONS\s+"([^"]+)"', cmake)
    }
    asked = {
        level.upper(): set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', body))
        | {bit.lower() for bit in re.findall(r"\bbit_(\w+)", body)}
        for level, body in re.findall(r"bool has_(avx\w+)\(\) \{(.*?)\n\}", dispatch, re.S)
    }
    assert set(flags) == {"AVX2", "AVX512"} and flags["AVX2"] == asked["AVX2"]
    assert flags["AVX512"] <= asked["AVX512"] | asked["AVX2"]  # has_avx512() asks has_avx2() first
    assert asked["AVX512"] <= flags["AVX512"]
