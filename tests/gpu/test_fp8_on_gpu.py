"""F8_E4M3 on a GPU, whose kernels do not read it yet: refused by name when a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import save, tiny
from fp8_folders import fp8_folder
from harness import running

from apu_engine._native import Device, UnsupportedError


def test_refused_by_name(gpu: Device, tmp_path: Path) -> None:
    folder, _ = fp8_folder(save(tiny("qwen3"), tmp_path / "plain"), tmp_path / "fp8", (16, 32))
    message = r'w1 "blk.0.attn_q.weight" is F8_E4M3, which no GPU kernel reads yet; use --device cpu'
    with pytest.raises(UnsupportedError, match=message), running(folder, gpu):
        pass
