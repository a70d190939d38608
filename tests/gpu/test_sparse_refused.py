"""Ops without GPU kernels are refused by name when a plan is made: those of compressed rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import running

from apu_engine._native import Device, UnsupportedError
from models import tiny_deepseek4_gguf


def test_deepseek4_is_refused(gpu: Device, tmp_path: Path) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=r"SHARED_STORE.*--device cpu"), running(tiny.path, gpu):
        pass
