"""The kernel benchmark end to end on the GPU that the CPU plays, with sizes to match."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_bench
import gpu_bench_latent
import gpu_bench_sparse
import gpu_bench_streams
import pytest

from apu_engine._native import Device


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GIB": 1 << 16,
        "ROTATED": 1 << 14,
        "SHAPES": ((32, 256), (16, 512)),
        "GEMM": (16, 32, 256),
        "CONTEXTS": (256,),
        "SEQUENCES": 2,
        "HEADS": 4,
        "KV_HEADS": 2,
        "HEAD_SIZE": 64,
    }.items():
        monkeypatch.setattr(gpu_bench, name, value)
    monkeypatch.setattr(gpu_bench_streams, "LAYERS", 4)
    monkeypatch.setattr(gpu_bench_streams, "SHAPE", {"D": 64, "S": 4, "E": 8, "k": 2, "V": 1})
    monkeypatch.setattr(gpu_bench_sparse, "LAYERS", 2)
    monkeypatch.setattr(
        gpu_bench_sparse, "SHAPE", {"D": 256, "H": 2, "K": 1, "d": 128, "Hi": 2, "di": 128, "ki": 8, "V": 1}
    )
    monkeypatch.setattr(gpu_bench, "SPARSE_CONTEXTS", (256,))
    monkeypatch.setattr(gpu_bench_latent, "LAYERS", 2)
    shapes = ((gpu_bench_latent.Attention(2, 256, "F16"),), (gpu_bench_latent.Heads(2, 32, 64, "Q8_0", rest=4),))
    monkeypatch.setattr(gpu_bench_latent, "QUICK", shapes)


def test_quick(
    hip_device: Device, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_bench, "open_gpu", lambda name: hip_device)
    path = tmp_path / "report.json"
    assert gpu_bench.main(["--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    kinds = [figure["kernel"] for figure in report["figures"]]
    single = ["attention", "open", "close+open", "route", "index", "store"]
    assert kinds == ["matvec"] * 6 + ["gemm"] * 2 + single + ["compress"] * 3 + ["attend"] * 2 + ["latent", "heads"]
    assert all(
        figure["microseconds"] > 0 and figure["rate"] > 0
        for figure in report["figures"]
        if figure["kernel"] in ("matvec", "gemm")  # the others are differences
    )
    printed = capsys.readouterr().out
    assert "plain read" in printed and printed.count("\n") == 2 + len(kinds)


def test_no_gpu_is_said_for_each_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("APU_HIP_LIBRARY", "/nowhere/libamdhip64.so")
    assert gpu_bench.main([]) == 2
    said = capsys.readouterr().err
    assert "hip" in said and "cuda" in said


def test_unknown_type() -> None:
    with pytest.raises(gpu_bench.ApuError, match="type 'Q9': expected one of F16, BF16"):
        gpu_bench.type_number("Q9")
