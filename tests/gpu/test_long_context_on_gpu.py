"""The long-context smoke script on the GPU that the CPU plays, with sizes to match."""

from __future__ import annotations

from pathlib import Path

import long_context_smoke as smoke
import pytest
from hip_double import HipDouble

from models import TinyModel


def test_all_of_it(
    hip: HipDouble,
    hip_kernels: Path,
    tiny_llama: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    for name, value in {"STORED": 300, "ROWS": 2, "VOCABULARY": 4096, "LARGEST": 100, "DECODED": 1}.items():
        monkeypatch.setattr(smoke, name, value)
    assert smoke.main([str(tiny_llama.path), "--device", "hip", "--ctx", "192", "--chunk", "64", "--no-questions"]) == 0
    out = capsys.readouterr().out
    assert out.count("ok    ") == 4 and "hip, gfx1151" in out
