"""A double of the native library's mapping guards, so that these tests need no build and can stage a fault."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

import apu_engine


class NativeDouble(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("apu_engine._native")
        self.guarded: dict[int, tuple[int, str]] = {}
        self.fault: str | None = None

    def guard(self, address: int, nbytes: int, path: str) -> None:
        assert address not in self.guarded
        self.guarded[address] = (nbytes, path)

    def unguard(self, address: int) -> None:
        del self.guarded[address]

    def faulted(self) -> str | None:
        return self.fault


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> NativeDouble:
    double = NativeDouble()
    monkeypatch.setitem(sys.modules, "apu_engine._native", double)
    monkeypatch.setattr(apu_engine, "_native", double, raising=False)
    return double


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """3 MiB and 5 bytes of noise."""
    path = tmp_path / "weights.gguf"
    path.write_bytes(np.random.default_rng(1).bytes((3 << 20) + 5))
    return path
