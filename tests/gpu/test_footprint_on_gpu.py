"""scripts/memory_footprint.py and `apu-engine footprint` on a GPU with memory of its own, which the stand-in plays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hip_double import library

from models import TinyModel, tiny_llama_gguf

SCRIPT = Path(__file__).parents[2] / "scripts" / "memory_footprint.py"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A llama of some 90 MB, more than a runtime may take besides."""
    return tiny_llama_gguf(tmp_path_factory.mktemp("large") / "large.gguf", layers=1, D=1024, H=16, K=16, F=6144)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(hip_kernels: Path, tmp_path: Path) -> Run:
    """Python with the stand-in as its GPU."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    names = {"APU_HIP_LIBRARY": str(library()), "APU_KERNELS": str(hip_kernels), "APU_HIP_DOUBLE": "apart"}
    environment = {**os.environ, **names, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, *command)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        assert list(temporary.iterdir()) == []
        return done

    return run


def script(run: Run, model: TinyModel, *options: str) -> tuple[int, dict[str, Any]]:
    command = [str(SCRIPT), str(model.path), "--device", "hip", "--tokens", "1", "--ctx", "128", "--json", *options]
    done = run(*command)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_in_place_the_file_is_the_weights(run: Run, large: TinyModel) -> None:
    status, report = script(run, large, "--memory", "registered")
    assert status == 0, report["findings"]
    memory, held = report["memory"], report["memory"]["kv"] + report["memory"]["scratch"]
    assert memory["strategy"] == "registered" and memory["way"] and memory["copied"] == 0
    assert memory["registered"] >= memory["weights"] and memory["device"] == held
    alone, beside, second = report["processes"]
    assert alone["files"][0]["rss"] >= 0.9 * memory["weights"]
    assert beside["files"][0]["pss"] + second["files"][0]["pss"] < 1.02 * alone["files"][0]["rss"]


def test_staged_is_one_copy(run: Run, large: TinyModel) -> None:
    status, report = script(run, large, "--memory", "staged")
    assert status == 0, report["findings"]
    memory = report["memory"]
    assert memory["registered"] == 0 and memory["copied"] == pytest.approx(memory["weights"], rel=0.01)
    (alone,) = report["processes"]
    assert alone["files"][0]["mapped"] == 0
    assert any("one copy of the weights is in device memory" in found["text"] for found in report["findings"])


def test_copies_are_noticed(run: Run, large: TinyModel) -> None:
    status, report = script(run, large, "--memory", "staged", "--copy-weights")
    faults = [found["text"] for found in report["findings"] if not found["ok"]]
    assert status == 1 and any("anonymous memory grew by" in text for text in faults)
    assert any("expected no mapping beside a copy" in text for text in faults)


def test_a_model_that_the_runtime_could_hide_is_refused(run: Run, tiny_llama: TinyModel) -> None:
    status, report = script(run, tiny_llama, "--memory", "registered")
    assert status == 1
    assert "could hide a copy of the weights; use a larger model" in next(
        found["text"] for found in report["findings"] if not found["ok"]
    )


def test_the_verb_tells_registered_and_device_bytes(run: Run, tiny_llama: TinyModel) -> None:
    command = ["-m", "apu_engine", "footprint", str(tiny_llama.path), "--device", "hip", "--memory", "registered"]
    done = run(*command, "--memory-way", "register", "--json")
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["engine"]
    assert engine["strategy"] == "registered" and engine["way"] == "register"
    assert engine["registered"] >= engine["weights"] and engine["device"] == engine["kv"] + engine["scratch"]
    done = run(*command, "--memory-way", "register")
    assert done.stdout.splitlines()[-1].startswith("engine: weights ") and "(registered, way register)" in done.stdout
