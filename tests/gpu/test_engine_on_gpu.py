"""The engine on device hip, played by the stand-in: answers, what it says about itself, bench, a fault in service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hip_double import HipDouble

from apu_engine import LLM
from apu_engine._native import DeviceError
from apu_engine.cli import main
from apu_engine.options import format_size
from models import TinyModel, tiny_deepseek2_gguf


@pytest.fixture
def kernels(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    return hip_kernels


def test_answers_are_the_cpus(kernels: Path, tiny_llama: TinyModel) -> None:
    ids = [1, 5, 9, 13]
    with LLM(str(tiny_llama.path), device="cpu", ctx=256) as cpu:
        expected = cpu.generate(ids, 12, temperature=0, ignore_eos=True)
    with LLM(str(tiny_llama.path), device="hip:0", ctx=256, memory="staged") as gpu:
        assert gpu.generate(ids, 12, temperature=0, ignore_eos=True).tokens == expected.tokens
        assert gpu.runtime.device_line.startswith("hip, gfx1151, HIP double 0 (as asked, with /")
        assert gpu.runtime.device_line.endswith(", named by APU_HIP_LIBRARY)")
        size = gpu.memory["copied"]
        assert tiny_llama.path.stat().st_size * 0.9 < size < tiny_llama.path.stat().st_size  # all but the header
        copied = format_size(size)
        line = f"weights {copied} staged: as asked; copied {copied} once, file pages dropped, anonymous 0; ctx 256"
        assert gpu.summary().startswith(line)


@pytest.mark.parametrize("memory", ["staged", "auto"])
def test_answers_of_latent_attention_are_the_cpus(kernels: Path, tmp_path: Path, memory: str) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", sigmoid=True, groups=4, groups_used=2, experts=16)
    found = []
    for device, options in (("cpu", {}), ("hip:0", {"memory": memory})):
        with LLM(str(tiny.path), device=device, ctx=256, **options) as llm:
            found.append(llm.generate(list(range(20)), 24, temperature=0, ignore_eos=True).tokens)
    assert found[0] == found[1]


def test_bench(
    kernels: Path, tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apu_engine.cli.bench_measure.READ_BYTES", 1 << 20)  # the stand-in reads slowly
    sizes = ["-p", "8", "-n", "4", "-r", "1", "-o", "json"]
    assert main(["bench", "-m", str(tiny_llama.path), "--device", "hip", *sizes]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["backends"] for row in rows] == ["hip", "hip"]
    assert all(row["gpu_info"] == "HIP double 0" and row["isa"] == "gfx1151" and row["avg_ts"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("kind", "graph", "text"),
    [
        ("launch", True, r"op \d+ MATMUL.*, kernel matvec_f32_r1: device hip: hipErrorLaunchFailure \(719\) launching"),
        ("fault", False, r"op \d+ MATMUL.*, kernel matvec_f32_r1: device hip: hipErrorIllegalAddress \(700\)"),
        ("fault", True, r"op 0 EMBED to op \d+ SAMPLE, in one graph: device hip: hipErrorIllegalAddress .*--no-graph"),
    ],
)
def test_a_fault_in_service(
    hip: HipDouble, kernels: Path, tiny_llama: TinyModel, kind: str, graph: bool, text: str
) -> None:
    """The request fails, and says of which kernel as far as that is known; closing neither hangs nor crashes."""
    with LLM(str(tiny_llama.path), device="hip", ctx=256, graph=graph) as llm:
        hip.set(**{kind: "matvec_f32_r1"})
        with pytest.raises(DeviceError, match=text):
            llm.generate([1, 5], 4, temperature=0, ignore_eos=True)
        hip.set()
