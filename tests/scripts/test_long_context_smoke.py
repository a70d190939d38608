"""The long-context smoke script: with a real model on the cpu, with a tiny one on the GPU that the CPU plays."""

from __future__ import annotations

import json
from pathlib import Path

import long_context_smoke as smoke
import pytest

from apu_engine.catalog import fetch


def test_a_real_model_recalls_what_was_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "STORED", 700)
    report = tmp_path / "report.json"
    model = fetch("smollm2-135m-instruct")
    assert smoke.main([str(model), "--device", "cpu", "--ctx", "512", "--chunk", "128", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["points"][0]["tokens"] == 256 and len(found["points"]) == 2
    checks = [check["text"] for check in found["checks"]]
    assert len(checks) == 7 and all(check["ok"] for check in found["checks"])
    assert sum("likeliest of 5" in text for text in checks) == 3
    assert "the 512 largest of 32,768 logits, 32 rows, in exact order" in checks[-1]


def test_a_wrong_answer_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(smoke, "STORED", 130)
    monkeypatch.setattr(smoke, "KV_ERROR", dict.fromkeys(smoke.KV_ERROR, 0.0))
    model = fetch("smollm2-135m-instruct")
    assert smoke.main([str(model), "--device", "cpu", "--ctx", "320"]) == 1
    assert "FAIL  attention over 130 tokens, F32: off by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--ctx", "64"], "--ctx: expected at least 128, found 64"), (["--chunk", "0"], "--chunk: expected at least 1")],
)
def test_refusals(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        smoke.main(arguments)
    assert end.value.code == 2 and text in capsys.readouterr().err


def test_a_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["no/such/model.gguf", "--device", "cpu"]) == 2
    assert "no/such/model.gguf" in capsys.readouterr().err
