"""The smoke script end to end, with both real models: it passes, and it fails when a copy is forced."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthesize
from synthesis.architectures import ARCHITECTURES

from apu_engine.catalog import fetch

SCRIPT = Path(__file__).parents[2] / "scripts" / "memory_footprint.py"


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, JSON report)."""
    command = [sys.executable, str(SCRIPT), "--json", "--threads", "2", "--tokens", "8", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_weights_exist_once(name: str) -> None:
    status, report = run(str(fetch(name)))
    assert status == 0 and report["ok"], report["findings"]
    alone, beside, second = report["processes"]
    for process in (beside, second):
        (file,) = process["files"]
        assert file["private_clean"] == file["private_dirty"] == 0
        assert file["pss"] < 0.6 * alone["files"][0]["rss"]


def test_experts_of_a_v4_flash_exist_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its types and kinds of layers at reduced sizes, 190 MB: anonymous memory of the whole run is told and small."""
    presets = ARCHITECTURES["deepseek4"].presets
    letters = {"L": 6, "D": 1024, "H": 16, "d": 128, "dr": 64, "Rq": 512, "Ro": 256, "G": 4, "dg": 512, "F": 512}
    letters |= {"Hi": 8, "di": 64, "ki": 32, "S": 4, "E": 64, "k": 6, "hashed": 2, "V": 8192}
    reduced = replace(presets["v4-flash-q2"], letters=letters)
    monkeypatch.setitem(ARCHITECTURES, "deepseek4", replace(ARCHITECTURES["deepseek4"], presets={"reduced": reduced}))
    path = tmp_path / "reduced.gguf"
    assert synthesize.main(["--arch", "deepseek4", "--preset", "reduced", "--out", str(path)]) == 0
    assert path.stat().st_size > 180e6
    status, report = run(str(path), "--ctx", "256")
    assert status == 0 and report["ok"], report["findings"]
    growth = next(f["text"] for f in report["findings"] if "anonymous memory grew by" in f["text"])
    grown = re.search(r"grew by ([\d.]+) (K|M)iB", growth)
    assert grown is not None, growth
    assert float(grown[1]) * {"K": 1 << 10, "M": 1 << 20}[grown[2]] < 0.2 * path.stat().st_size, growth


def test_a_forced_copy_is_noticed_and_named() -> None:
    path = fetch("smollm2-135m-instruct")
    status, report = run(str(path), "--copy-weights")
    assert status == 1 and not report["ok"]
    (fault,) = [finding["text"] for finding in report["findings"] if not finding["ok"]]
    assert "anonymous memory grew by" in fault and "most of it in 0x" in fault


def test_a_context_that_could_hide_a_copy_is_refused() -> None:
    status, report = run(str(fetch("smollm2-135m-instruct")), "--ctx", "8192")
    assert status == 1
    assert "could hide a copy of the weights" in next(f["text"] for f in report["findings"] if not f["ok"])


@pytest.fixture(params=[False, True])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """(process that serves the model, whether it holds a copy)."""
    code = (
        "import sys\nfrom apu_engine import LLM\n"
        "with LLM(sys.argv[1], device='cpu', ctx=256, threads=1, copy_weights=sys.argv[2] == 'True'):\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(fetch("smollm2-135m-instruct")), str(request.param)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid, request.param
        process.stdin.close()


def test_a_running_process(server: tuple[int, bool]) -> None:
    pid, copied = server
    status, report = run("--pid", str(pid))
    assert status == int(copied), report["findings"]
    assert report["processes"][0]["files"][0]["permissions"] == ["r--s"]


def test_errors_are_one_line() -> None:
    start = time.monotonic()
    for arguments, words in (
        (["--pid", "99999999"], "there is no process"),
        (["--pid", "0"], "there is no process"),
        (["/no/model"], "does not exist"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert time.monotonic() - start < 30
