"""`apu-engine bench bw` on the stand-in: every way in place, copies and gathers; what fails is said, nothing stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hip_double import HipDouble

from apu_engine import catalog
from apu_engine._native import Device, InvalidError, Region
from apu_engine.cli import bench_bw, main
from apu_engine.memory import bandwidth

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"MOST_BYTES": 2 * MIB, "LEAST_BYTES": 2 * MIB, "SLICE": 2 * MIB, "GATHERED": MIB}.items():
        monkeypatch.setattr(bandwidth, name, value)
    monkeypatch.setattr(bandwidth, "PIECES", (MIB // 8,))
    monkeypatch.setattr(bandwidth, "PASSES", 1)
    monkeypatch.setattr(bench_bw, "NOISE_BYTES", 2 * MIB)
    monkeypatch.setattr(catalog, "models_dir", lambda: tmp_path)


def run(capsys: pytest.CaptureFixture[str], kernels: Path) -> dict[str, Any]:
    assert main(["bench", "bw", "--device", "hip", "--kernels", str(kernels), "-t", "1", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_figures(hip: HipDouble, hip_kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain reads of device memory and by each way are the figures that the stand-in's clock gives."""
    hip.set(rate_device=100_000, rate_coarse=95_000)
    report = run(capsys, hip_kernels)
    rates = [rate for rate in report["rates"] if rate["device"] == "hip"]
    assert [(rate["test"], rate["memory"], rate["way"]) for rate in rates] == [
        *(("read", "memory", ""), ("copy", "memory", ""), ("gather", "memory", ""), ("to device", "pinned memory", "")),
        *(("read", "file pages", way) for way in ("svm", "advise", "lock", "register")),
        ("gather", "file pages", rates[-1]["way"]),
    ]
    assert all(rate["gb_per_s"] > 0 and not rate["problem"] for rate in rates)
    assert round(rates[0]["gb_per_s"]) == 100 and round(rates[4]["gb_per_s"]) == 95
    assert report["device"].startswith("hip, gfx1151") and report["rates"][0]["device"] == "cpu"
    assert report["absent"] == ["direct: the runtime of " + report["device"].split(", ", 2)[2] + " does not have it"]
    assert hip.totals()["pageable_bytes"] < MIB


def test_what_fails_is_a_line(hip: HipDouble, hip_kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hip.set(refuse="svm,advise,lock,register", oom_at=1)
    rates = [rate for rate in run(capsys, hip_kernels)["rates"] if rate["device"] == "hip"]
    assert "OutOfMemory" in rates[0]["problem"] and rates[0]["gb_per_s"] == 0
    assert [rate["way"] for rate in rates if rate["memory"] == "file pages"] == ["svm", "advise", "lock", "register"]
    assert all(rate["problem"] for rate in rates)


def test_gather_reads_the_parts_and_nothing_else(hip_device: Device) -> None:
    """Behind a region lies a guard page; parts may begin anywhere."""
    region = Region.alloc(hip_device, 3 * 4096)
    try:
        base, end = region.address, region.address + 3 * 4096
        assert hip_device.gather_rate([base + 3, end - 4099, base + 16], 4099) > 0
        for parts, nbytes in (([], 64), ([base], 0), ([base], 30), ([base, 0], 64), ([base] * 65536, 64)):
            with pytest.raises(InvalidError, match="apu_kernel_gather"):
                hip_device.gather_rate(parts, nbytes)
    finally:
        region.free()
