"""The command and the line of every start: output, exit status, time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clinic import CONTAINER, POINT, STOCK, kernels

from apu_engine.cli import main
from apu_engine.config import EngineConfig
from apu_engine.doctor import verdict_line
from apu_engine.doctor.report import TITLES
from apu_engine.memory.machine import Machine
from models import TinyModel


def test_a_table_and_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(POINT))
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["doctor", "--kernels", str(kernels(tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "  MES firmware     bad     0x83: hangs" in out
    assert out.index("To repair") < out.index("To improve") < out.index("Possible")
    assert "    sudo pacman -Syu linux-firmware-amdgpu\n    sudo mkinitcpio -P\n    sudo reboot\n" in out
    assert out.splitlines()[-1].startswith("doctor: 2 bad (MES firmware 0x83, GTT 9 GiB without an owner), ")


@pytest.mark.parametrize("extra", [[], ["--full"]])
def test_a_device_that_is_none(capsys: pytest.CaptureFixture[str], extra: list[str]) -> None:
    assert main(["doctor", "--device", "hip:x", *extra]) == 2
    assert capsys.readouterr().err == "apu-engine: --device hip:x: expected auto, cpu, hip[:N] or cuda[:N]\n"


def test_equal_remedies_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(CONTAINER))
    assert main(["doctor", "--kernels", str(kernels(tmp_path))]) == 1
    out = capsys.readouterr().out
    assert "  container, /dev/kfd, render node\n    start the container with --device /dev/kfd" in out


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(STOCK))
    status = main(["doctor", "--json", "--kernels", str(kernels(tmp_path))])
    found = json.loads(capsys.readouterr().out)
    assert status == int(found["verdict"] == "bad")
    assert [item["id"] for item in found["checks"]] == list(TITLES)[:24]


def test_a_model_here(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    """On the machine that runs the tests, whatever it is."""
    begin = time.monotonic()
    main(["doctor", "--json", "--device", "cpu", str(tiny_llama.path)])
    assert time.monotonic() - begin < 10
    found = {item["id"]: item for item in json.loads(capsys.readouterr().out)["checks"]}
    size = tiny_llama.path.stat().st_size
    assert found["model"]["data"] == {"files": [str(tiny_llama.path)], "bytes": size}
    assert found["budget"]["verdict"] == "ok" and found["budget"]["data"]["fits"] == ["direct"]
    assert found["page_cache"]["data"]["bytes"] == size
    assert found["disk"]["data"]["free"] > 0


def test_a_model_that_does_not_fit_here_but_in_place(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(STOCK))
    main(["doctor", "--json", "--kernels", str(kernels(tmp_path)), str(tiny_llama.path)])
    found = {item["id"]: item for item in json.loads(capsys.readouterr().out)["checks"]}
    assert found["budget"]["data"]["fits"] == ["registered", "staged"]


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--bogus"]) == 2
    assert "No such option: --bogus" in capsys.readouterr().err
    main(["doctor", "--json", "missing.gguf"])
    found = {item["id"]: item for item in json.loads(capsys.readouterr().out)["checks"]}
    assert found["model"]["verdict"] == "bad" and "missing.gguf" in found["model"]["value"]


def test_the_line_is_cheap(tmp_path: Path) -> None:
    """A start imports nothing large for it."""
    config = EngineConfig(model=str(tmp_path / "m.gguf"), kernels=str(kernels(tmp_path)))
    for root in (STOCK, POINT, CONTAINER):
        line = verdict_line(config, Machine(root))
        assert line.startswith("doctor: ") and "\n" not in line
    code = (
        "import apu_engine.server.app, sys\n"
        "from apu_engine.config import EngineConfig\n"
        "from apu_engine.doctor import verdict_line\n"
        "verdict_line(EngineConfig(model='m.gguf'))\n"
        "print([name for name in ('numpy', 'torch', 'rich', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_check_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    documented = [
        cell
        for line in page.splitlines()
        if line.startswith("| `")
        for cell in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert documented == list(TITLES)
