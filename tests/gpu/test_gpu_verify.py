"""scripts/gpu_verify.py on the GPU that the CPU plays, with a tiny model and few tokens."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import gpu_verify
import numpy as np
import pytest
from hip_double import HipDouble

from models import TinyModel


def test_a_tiny_model(
    hip: HipDouble,
    hip_kernels: Path,
    tiny_llama: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    monkeypatch.setattr(gpu_verify, "QUICK", (12, 4))
    path = tmp_path / "report.json"
    arguments = ["--device", "hip", "--model", str(tiny_llama.path), "--quick", "--no-tests", "--no-bench"]
    assert gpu_verify.main([*arguments, "--report", str(path)]) == 0, capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [check["ok"] for check in report["checks"]] == [True] * 6
    assert report["models"][tiny_llama.path.name]["greedy_equal"] == 4
    text = path.read_text()
    assert socket.gethostname() not in text and str(tmp_path) not in text
    assert "/" not in text.replace("GB/s", "") and f"/{getpass.getuser()}" not in text
    assert capsys.readouterr().out.count("ok ") == 6


def test_a_model_that_cannot_be_read_is_a_failure(
    hip: HipDouble, hip_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    model, report = tmp_path / "broken.gguf", tmp_path / "report.json"
    model.write_bytes(b"GGUF")
    arguments = ["--device", "hip", "--model", str(model), "--no-tests", "--no-bench", "--report", str(report)]
    assert gpu_verify.main(arguments) == 1
    assert "broken.gguf" in report.read_text() and str(tmp_path) not in report.read_text()


def test_the_tests_it_runs_exist() -> None:
    assert all((gpu_verify.ROOT / "tests" / "gpu" / name).is_file() for name in gpu_verify.TESTS)


def test_measures() -> None:
    z = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    assert gpu_verify.mean_kl(z, z) == 0
    assert 0 < gpu_verify.mean_kl(z, z * np.float32(1.01)) < 1e-3
    assert gpu_verify.first_difference([1, 2, 3], [1, 2, 4]) == 2 and gpu_verify.first_difference([1], [1]) == 1
    assert gpu_verify.scrub("model at /home/somebody/models/x.gguf: bad, see ~/a/b") == "model at x.gguf: bad, see b"
