"""The comparison with a peer: pairs, ratios, the noise guard, and every way in which the peer can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from models import TinyModel

SCRIPT = Path(__file__).parents[2] / "scripts" / "peer_bench.py"
FAKE = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
def of(flag, default=0):
    return int(args[args.index(flag) + 1]) if flag in args else default
log = pathlib.Path(__file__).with_suffix(".log")
calls = log.read_text().splitlines() if log.exists() else []
log.write_text("\\n".join([*calls, json.dumps(args)]))
row = {{"n_prompt": of("-p"), "n_gen": of("-n"), "n_depth": of("-d"), "avg_ts": {rate}, "model_type": "fake"}}
row.update({more})
{body}
print(json.dumps([row]))
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def fake(path: Path, rate: str = "100.0", more: str = "{}", body: str = "") -> Path:
    path.write_text(FAKE.format(python=sys.executable, rate=rate, more=more, body=body))
    path.chmod(0o755)
    return path


def calls(program: Path) -> list[list[str]]:
    return [json.loads(line) for line in program.with_suffix(".log").read_text().splitlines()]


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    status = script.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def ours(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake of our own, 200 and 220 t/s in turn."""
    more = '{"decode_bytes": 50_000_000, "read_limit_gb_s": 20.0, "share_of_limit": 0.5}'
    program = fake(tmp_path / "ours", "200.0 + 20.0 * (len(calls) % 2)", more)
    monkeypatch.setattr(script, "OURS", (str(program),))
    return program


def test_pairs_and_ratios(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, ours: Path, tiny_llama: TinyModel
) -> None:
    peer = fake(tmp_path / "peer")
    saved = tmp_path / "results.json"
    args = ["--peer", peer, "--peer-args", "-fa 1", "-m", tiny_llama.path, "-p", "16", "-n", "8", "-d", "0,64"]
    args += ["--pairs", "3", "-t", "2", "-q", "--noise", "100", "--save", saved]
    status, out, err = run(script, capsys, *args, "-o", "json")
    assert status == 0 and err == ""
    report = json.loads(out)
    assert report == json.loads(saved.read_text())
    assert [row["test"] for row in report["tests"]] == ["pp16", "pp16 @ d64", "tg8", "tg8 @ d64"]
    first = report["tests"][0]
    assert first["peer_ts"] == [100, 100, 100] and first["our_ts"] == [200, 220, 200]
    assert first["ratios"] == [2.0, 2.2, 2.0] and first["median_ratio"] == 2.0
    assert "decode_bytes" not in first and first["discarded"] == {"llama.cpp": 0, "apu_engine": 0}
    generation = report["tests"][2]
    assert generation["our_share_of_limit"] == 0.5
    assert generation["peer_share_of_limit"] == 0.25  # 100/s of 50 MB at 20 GB/s
    assert report["depths"][0]["peer_kept"] == 1.0
    for program, count in ((peer, 12), (ours, 12)):
        assert len(calls(program)) == count
    expected = ["-m", str(tiny_llama.path), "-p", "16", "-n", "0", "-r", "1", "-t", "2", "-o", "json", "-fa", "1"]
    assert calls(peer)[0] == expected
    assert calls(ours)[0] == ["bench", *expected[:-2]]
    assert calls(peer)[-1][6:10] == ["-r", "1", "-d", "64"]
    status, out, _ = run(script, capsys, *args)
    lines = out.splitlines()
    assert lines[2].split("|")[5].strip() == "2.00 2.20 2.00"
    assert "**2.00**" in lines[2] and "| 25% | 50% |" in lines[4]
    assert any("keeps of depth 0: llama.cpp 100%, apu_engine 110%" in line for line in lines)


def test_who_begins_alternates(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, ours: Path, tiny_llama: TinyModel
) -> None:
    args = ["--peer", fake(tmp_path / "peer"), "-m", tiny_llama.path, "-p", "0", "-n", "8", "--pairs", "3"]
    _, _, err = run(script, capsys, *args, "--noise", "100", "--peer-name", "peer")
    order = [line.split(", ")[1].split(":")[0] for line in err.splitlines() if line.endswith("t/s")]
    assert order == ["peer", "apu_engine", "apu_engine", "peer", "peer", "apu_engine"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sys.exit('cannot load the model')", "failed with status 1: cannot load the model"),
        ("import os; os.abort()", "was killed by signal 6"),
        ("print('| a table |'); sys.exit()", "printed no JSON results; it begins with '| a table |'"),
        ("sys.exit()", "printed no JSON results; it begins with ''"),
        ("print('[]'); sys.exit()", "printed no JSON results"),
        ("print('[1, 2]'); sys.exit()", "printed no JSON results"),
        ("row['n_gen'] = 7", "printed no result for n_prompt 0, n_gen 8, n_depth 0, but 1 others"),
        ("row['avg_ts'] = 'fast'", "avg_ts: expected a positive number, found 'fast'"),
        ("row['avg_ts'] = 0", "avg_ts: expected a positive number, found 0"),
        ("row['avg_ts'] = float('nan')", "avg_ts: expected a positive number, found nan"),
        ("row['avg_ts'] = float('inf')", "avg_ts: expected a positive number, found inf"),
        ("row['avg_ts'] = True", "avg_ts: expected a positive number, found True"),
        ("print('[' * 200_000); sys.exit()", "printed no JSON results; it begins with '[[[["),
        ("import time; time.sleep(60)", "was still running after 0.5 s (--timeout)"),
    ],
)
def test_a_peer_that_fails(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, ours: Path, tiny_llama: TinyModel,
    body: str, words: str,
) -> None:  # fmt: skip
    args = ["--peer", fake(tmp_path / "peer", body=body), "-m", tiny_llama.path, "-p", "0", "-n", "8", "--pairs", "1"]
    status, out, err = run(script, capsys, *args, "--timeout", "0.5" if "sleep" in body else "60", "--noise", "100")
    assert (status, out) == (1, "")
    assert words in err and err.startswith("peer_bench: `") and err.count("\n") == 1


def test_a_late_peer_ends_with_its_children(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_llama: TinyModel
) -> None:
    """A wrapper script's child would else compute beside all runs that follow. It holds a pipe's last open end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    peer = tmp_path / "peer"
    peer.write_text(f"#!/bin/sh\nsleep 60 >{fifo} &\nsleep 60\n")
    peer.chmod(0o755)
    status, _, err = run(script, capsys, "--peer", peer, "-m", tiny_llama.path, "--pairs", "1", "--timeout", "0.5")
    assert status == 1 and "was still running after 0.5 s" in err
    assert select.select([reader], [], [], 10)[0] and os.read(reader, 1) == b""  # no writer is left
    os.close(reader)


def test_what_cannot_start(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_llama: TinyModel
) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for peer in (tmp_path / "absent", plain, tmp_path):
        status, _, err = run(script, capsys, "--peer", peer, "-m", tiny_llama.path)
        assert status == 2 and f"found {peer}" in err
    plain.chmod(0o755)  # executable, but no program
    status, _, err = run(script, capsys, "--peer", plain, "-m", tiny_llama.path, "--pairs", "1")
    assert status == 2 and "cannot be started" in err
    peer = fake(tmp_path / "peer")
    status, _, err = run(script, capsys, "--peer", peer, "-m", tmp_path / "missing.gguf")
    assert status == 1 and "missing.gguf" in err
    status, _, err = run(script, capsys, "--peer", peer, "-m", tiny_llama.path, "--pairs", "0")
    assert status == 2 and "--pairs: expected at least 1, found 0" in err
    status, _, err = run(script, capsys, "--peer", peer, "-m", tiny_llama.path, "-p", "0", "-n", "0")
    assert status == 2 and "nothing to measure" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout", "-1"], "--timeout: expected seconds above 0, found -1"),
        (["--timeout", "nan"], "--timeout: expected seconds above 0, found nan"),
        (["--timeout", "inf"], "--timeout: expected seconds above 0, found inf"),
        (["--noise", "nan"], "--noise: expected at least 0, found nan"),
        (["--peer-args", '"open'], "--peer-args: cannot be split into options: No closing quotation"),
        (["--our-args", "it's"], "--our-args: cannot be split into options: No closing quotation"),
        (["--peer-name", "apu_engine"], "--peer-name: apu_engine is our own name"),
        (["--save", "/"], "--save: /: is a folder; name a file"),
        (["--save", "/absent/x.json"], "--save: /absent/x.json: the folder /absent does not exist"),
    ],
)
def test_options_are_checked_before_anything_runs(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_llama: TinyModel,
    options: list[str], words: str,
) -> None:  # fmt: skip
    peer = fake(tmp_path / "peer")
    status, out, err = run(script, capsys, "--peer", peer, "-m", tiny_llama.path, *options)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1
    assert not peer.with_suffix(".log").exists()


def test_a_full_disk_costs_no_results(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, ours: Path, tiny_llama: TinyModel
) -> None:
    args = ["--peer", fake(tmp_path / "peer"), "-m", tiny_llama.path, "-p", "0", "-n", "8", "--pairs", "1", "-q"]
    status, out, err = run(script, capsys, *args, "--noise", "100", "--save", "/dev/full")
    assert status == 1 and "tg8" in out
    assert err == "peer_bench: --save: /dev/full cannot be written: No space left on device\n"


# ---- the noise guard


def test_noise_is_what_neither_we_nor_the_child_used(script: ModuleType) -> None:
    times = script.CpuTimes
    before, after = times(100.0, 5.0), times(104.0, 5.0)
    assert script.noise(before, after, 4.0, 2.0, 2) == 0
    assert script.noise(before, after, 3.97, 2.0, 2) == 0  # within what ticks may be wrong by
    assert script.noise(before, after, 3.0, 2.0, 2) == pytest.approx(25, abs=1)
    assert script.noise(before, times(104.0, 6.0), 4.0, 2.0, 2) == pytest.approx(25, abs=1)  # steal
    assert script.noise(before, after, 5.0, 2.0, 2) == 0
    assert script.noise(None, after, 0.0, 2.0, 2) == script.noise(before, None, 0.0, 2.0, 2) == 0


def test_cpu_times_of_the_kernel(script: ModuleType, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 50 6 7 80 9 10\ncpu0 1 2 3\n")
    found = script.CpuTimes.now(str(stat))
    assert found.busy == pytest.approx(1.63) and found.steal == pytest.approx(0.8)
    for text in ("", "cpu 1 2", "intr 1 2 3 4 5 6 7 8 9", "cpu a b c d e f g h"):
        stat.write_text(text)
        assert script.CpuTimes.now(str(stat)) is None
    assert script.CpuTimes.now(str(tmp_path / "absent")) is None
    assert script.CpuTimes.now() is not None


def test_the_childs_own_time_is_no_noise(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real accounting: all that the machine did meanwhile is taken to be the child's, but for a stranger's second."""
    seen: dict[str, float] = {}

    def record(before: Any, after: Any, own: float, seconds: float, cores: int) -> float:
        seen.update(own=own, seconds=seconds)
        return 0.0

    monkeypatch.setattr(script, "noise", record)
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    script.execute([sys.executable, "-c", busy], 60)
    assert 0.3 <= seen["own"] < 2 and seen["seconds"] >= 0.3


def test_disturbed_runs_are_repeated_and_counted(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([40.0, 3.0, 40.0, 20.0, 30.0])
    monkeypatch.setattr(script, "execute", lambda *_: script.Output("", "", next(shares)))
    notes: list[str] = []
    guard = script.Guard(5.0, 2, notes.append)
    assert guard.run("x", [], 1).noise == 3.0
    assert (guard.discarded, guard.kept_noisy) == (1, 0)
    assert guard.run("x", [], 1).noise == 20.0  # the least of three
    assert (guard.discarded, guard.kept_noisy) == (3, 1)
    assert notes[0] == "x: others took 40.0% of the CPU time" and len(notes) == 4


def test_noisy_figures_say_so(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, ours: Path, tiny_llama: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(script, "noise", lambda *_: 50.0)
    args = ["--peer", fake(tmp_path / "peer"), "-m", tiny_llama.path, "-p", "0", "-n", "8", "--pairs", "2"]
    status, out, _ = run(script, capsys, *args, "--retries", "1")
    assert status == 0
    assert "| 4, 4 noisy kept |" in out and "not to be quoted" in out
    assert len(calls(ours)) == 4


# ---- with our own program


def test_ours_for_real(tmp_path: Path, tiny_llama: TinyModel) -> None:
    command = [sys.executable, SCRIPT, "--peer", fake(tmp_path / "peer"), "-m", tiny_llama.path, "-p", "0", "-n", "4"]
    command += ["--pairs", "1", "--starts", "1", "--noise", "100", "-t", "1", "-o", "json", "-q"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    (row,) = report["tests"]
    assert row["our_ts"][0] > 0 and row["decode_bytes"] > 0 and row["our_share_of_limit"] > 0
    assert report["starts"][0]["milliseconds"][0] > 0
