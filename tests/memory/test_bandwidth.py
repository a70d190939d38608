"""`apu-engine bench bw` on the CPU: which figures there are, what is kept, and what is said to be absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apu_engine import catalog
from apu_engine._native import Device
from apu_engine.cli import bench_bw, main
from apu_engine.memory import bandwidth
from apu_engine.memory.bandwidth import Bandwidths, Rate, keep, titles
from apu_engine.memory.strategies import Job
from models import TinyModel

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little is measured, and kept in a folder of the test."""
    for name, value in {"MOST_BYTES": 4 * MIB, "LEAST_BYTES": 4 * MIB, "SLICE": 4 * MIB, "GATHERED": 2 * MIB}.items():
        monkeypatch.setattr(bandwidth, name, value)
    monkeypatch.setattr(bandwidth, "PIECES", (MIB, 4 * MIB))
    monkeypatch.setattr(bench_bw, "NOISE_BYTES", 6 * MIB)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "models_dir", lambda: tmp_path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["bench", "bw", "--device", "cpu", "-t", "2", *args]) == 0
    return capsys.readouterr().out


def test_figures_of_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = json.loads(run(capsys, "--json"))
    rates = report["rates"]
    assert [(rate["test"], rate["memory"], rate["threads"]) for rate in rates] == [
        *(("read", "memory", 1), ("read", "file pages", 1), ("copy", "memory", 1)),
        *(("read", "memory", 2), ("read", "file pages", 2), ("copy", "memory", 2)),
        ("gather", "file pages", 2),  # of parts of 4 MiB there is only one
    ]
    assert all(rate["gb_per_s"] > 0 and not rate["problem"] for rate in rates)
    assert rates[-1]["piece_bytes"] == MIB and rates[-1]["nbytes"] == 2 * MIB
    assert report["absent"] == ["GPU: as asked"] and report["kept"] == str(tmp_path / "cache/apu_engine/bandwidth.json")
    assert not Path(report["file"]).exists()


def test_a_table_of_a_model(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel) -> None:
    lines = run(capsys, str(tiny_llama.path)).splitlines()
    assert lines[0].startswith("cpu, ") and lines[0].endswith(f"; files on {tiny_llama.path.parent}")
    assert lines[1].split() == ["device", "test", "memory", "with", "bytes", "GB/s"]
    assert lines[2].split()[:4] == ["cpu", "read", "memory", "1"] and float(lines[2].split()[-1]) > 0
    assert lines[-2] == "absent: GPU: as asked" and lines[-1].startswith("kept in ")


def test_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    found = Bandwidths(
        1.5, str(file), [Rate("cpu", "read", "memory", 9.0, 1), Rate("cpu", "read", "memory", 8.0, 1, 4)]
    )
    with Device("cpu", threads=1) as device:
        job = Job(device, [file], [1], [])

        def kept(job: Job) -> Bandwidths | None:
            return bandwidth._kept().get(bandwidth._key(job))

        assert kept(job) is None and keep(job, found) is not None and kept(job) == found
        monkeypatch.setattr(bandwidth, "_VERSION", 2)
        assert kept(job) is None and keep(job, Bandwidths(2.0, "b")) is not None
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert kept(job) == found
        bandwidth._path().write_text("{")
        assert kept(job) is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(file))
        assert keep(job, found) is None
    assert found.find("cpu", "read", "memory", threads=4) == found.rates[1]
    assert found.find("cpu", "copy", "memory") is None


def test_rows_of_the_table() -> None:
    rows = titles(
        [
            Rate("cuda", "read", "file pages", 51.26, 256 * MIB, way="register"),
            Rate("cuda", "gather", "memory", 4000.0, 256 * MIB, piece_bytes=8 * MIB),
            Rate("cuda", "to device", "pinned memory", 0.0, MIB, problem="no memory"),
        ]
    )
    assert rows[0] == ("cuda", "read", "file pages, way D", "", "256 MiB", "51.3")
    assert rows[1][3] == "parts of 8 MiB" and rows[2][-1] == "no memory"


def test_parts_do_not_overlap() -> None:
    parts = bandwidth._parts(4096, 7 * MIB + 5, MIB)
    assert len(parts) == 2 and len(set(parts)) == 2 and all((part - 4096) % MIB == 0 for part in parts)
    assert bandwidth._parts(4096, 2 * MIB - 1, MIB) == []
    assert bandwidth._counts(6) == [1, 2, 4, 6] and bandwidth._counts(1) == [1] and bandwidth._counts(8) == [1, 2, 4, 8]


def test_a_model_file_named_bw_and_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", str(tmp_path / "bw")]) == 1 and "bw: does not exist" in capsys.readouterr().err
    assert main(["bench", "bw", str(tmp_path / "none.gguf"), "--device", "cpu"]) == 1
    assert "none.gguf: does not exist" in capsys.readouterr().err
    assert main(["bench", "bw", "--n-prompt", "3"]) == 2 and "apu-engine bench bw --help" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0 and "prefill and decode speed" in capsys.readouterr().out
