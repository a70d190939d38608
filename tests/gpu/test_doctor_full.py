"""doctor --full on the stand-in: what is measured; a device that fails is a finding, and nothing is left behind."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hip_double import HipDouble

from apu_engine._native import Device, Stager
from apu_engine.doctor import full, strategies
from apu_engine.doctor.context import Context, Request
from apu_engine.doctor.report import TITLES, Check
from apu_engine.memory import bandwidth, probe
from apu_engine.memory.machine import Machine
from apu_engine.memory.probe import Cache
from apu_engine.memory.strategies import Refused
from models import TinyModel


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the models are. The stand-in reads slowly, so little is read."""
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(strategies, "NOISE_BYTES", 2 << 20)
    monkeypatch.setattr(strategies, "STAGED_BYTES", 2 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = tmp_path / "models"
    found.mkdir()
    return found


def measured(
    device: str, kernels: Path | None = None, folder: Path = Path("/"), model: Path | None = None
) -> dict[str, Check]:
    request = Request(model, folder=folder, device=device, kernels=kernels, full=True)
    return {item.id: item for item in full.measure(Context(Machine(Path("/")), request))}


def test_all(hip: HipDouble, hip_kernels: Path, folder: Path) -> None:
    found = measured("hip", hip_kernels, folder)
    assert list(found) == list(TITLES)[24:]
    assert found["cpu_bandwidth"].verdict == "ok" and found["cpu_bandwidth"].data["gb_per_s"] > 0
    assert found["runtime"].data["arch"] == "gfx1151" and re.match(r"HIP \d+\.\d+\.\d+: ", found["runtime"].value)
    assert found["graph"].verdict == "ok" and found["graph"].value == "bit for bit, 8 steps"
    assert found["gpu_bandwidth"].data["gb_per_s"] > 0  # the fixture asserts that nothing is left
    assert list(folder.iterdir()) == []


def test_strategies(hip: HipDouble, hip_kernels: Path, folder: Path, tiny_llama: TinyModel) -> None:
    """On noise and on a model: each way is told, and what auto takes; what was kept before is replaced."""
    for model in (None, tiny_llama.path):
        check = measured("hip", hip_kernels, folder, model)["strategies"]
        assert check.verdict == "ok" and check.value.startswith("auto takes ") and "staged " in check.value
        assert [way["name"] for way in check.data["ways"]][:4] == ["svm", "advise", "lock", "register"]
        assert [way["problem"] for way in check.data["ways"]] == [""] * len(check.data["ways"])
        assert all(way["gb_per_s"] > 0 for way in check.data["ways"])
        assert check.data["staged_gib_per_s"] > 0 and not check.data["staged_problem"]
        assert "way A" in check.value


def test_a_way_that_was_lost_is_tried_again(
    hip: HipDouble, hip_kernels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "lost", lambda self: {"svm": "long ago"} if self.path.exists() else {})
    measured("hip", hip_kernels, folder)
    forgotten: list[str] = []
    monkeypatch.setattr(Cache, "forget", lambda self: forgotten.append(self.key) or self.path.unlink())
    ways = measured("hip", hip_kernels, folder)["strategies"].data["ways"]
    assert forgotten and ways[0]["name"] == "svm" and not ways[0]["problem"]


def test_staging_that_gives_other_bytes(
    hip: HipDouble, hip_kernels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Stager.read

    def read(self: Stager, fd: int, path: str, offset: int, nbytes: int, to: int) -> None:
        real(self, fd, path, offset, nbytes - 4096, to)

    monkeypatch.setattr(Stager, "read", read)
    check = measured("hip", hip_kernels, folder)["strategies"]
    assert check.verdict == "warn" and "staged: the device has other bytes than the file" in check.value


def test_no_way_in_place(hip: HipDouble, hip_kernels: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measure", refuse)
    check = measured("hip", hip_kernels, folder)["strategies"]
    assert check.verdict == "warn" and check.value.startswith("auto takes staged: no way of reading in place works")
    assert "ttm.pages_limit" in check.remedy[0]


def refuse(*_: object) -> None:
    raise Refused("not today")


def test_a_slow_gpu_is_a_warning(hip_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(Machine(Path("/")), Request(folder=Path("/")))
    monkeypatch.setattr(Device, "read_rate", lambda *_: 100e9)
    found = full.gpu_bandwidth(context, hip_device)
    assert found.verdict == "warn" and found.value == "100.0 GB/s of 1 MiB; about 204 GB/s is usual for gfx1151"
    monkeypatch.setattr(Device, "read_rate", lambda *_: 190e9)
    assert full.gpu_bandwidth(context, hip_device).verdict == "ok"


def test_results_that_differ_are_bad(hip_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = full._decode
    runs: list[int] = []

    def decode(plan: object) -> np.ndarray:
        found = real(plan)  # type: ignore[arg-type]
        runs.append(1)
        if len(runs) == 2:
            found[3, 7] = np.nextafter(found[3, 7], np.float32(9))
        return found

    monkeypatch.setattr(full, "_decode", decode)
    found = full.graph(hip_device)
    assert found.verdict == "bad" and found.value == "1 of 2048 results differ between graph and single launches"
    assert found.remedy[0] == "run with --no-graph"


def test_the_tiny_model_computes(device: Device) -> None:
    """Its results depend on the prompt and are the same again."""
    with full._tiny_plan(device, graph=True) as run:
        first = run()
    with full._tiny_plan(device, graph=True) as run:
        assert run().tobytes() == first.tobytes()
    assert np.isfinite(first).all() and len(np.unique(first.argmax(1))) > 1 and first.std() > 0.1


def test_failures_are_findings(hip: HipDouble, hip_kernels: Path) -> None:
    hip.set(graph_launch=1)
    found = measured("hip", hip_kernels)
    assert found["graph"].verdict == "bad" and found["graph"].value.startswith("failed: ")
    assert "LaunchFailure" in found["graph"].value
    assert found["gpu_bandwidth"].verdict != "bad"


def test_no_kernels_and_no_gpu(hip: HipDouble, tmp_path: Path) -> None:
    found = measured("hip", tmp_path)
    assert found["runtime"].verdict == "bad" and "no kernels for gfx1151" in found["runtime"].value
    assert found["graph"].verdict == found["gpu_bandwidth"].verdict == "absent"
    found = measured("cpu")
    assert found["cpu_bandwidth"].verdict == "ok" and found["runtime"].verdict == "absent"
