"""A file of noise, and a double in the native library's place."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from native_double import NativeDouble

import apu_engine


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
