"""The figures beside `bench`'s speeds: bytes per token, the read limit, and profiles per kind of op."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apu_engine import arch
from apu_engine._native import Device, lib
from apu_engine.cli import main
from apu_engine.cli.bench import Case
from apu_engine.cli.bench_measure import GAP, ReadLimit, Sample, profile_lines, token_bytes, weight_ranges
from apu_engine.plan import Limits, PlanSpec, Tensor
from apu_engine.plan.cost import Rows, decode_bytes, family, matrix_types
from apu_engine.plan.spec import Op, Segment
from apu_engine.weights.opening import open_model
from models import TinyModel


def bench(capsys: pytest.CaptureFixture[str], model: Path, *args: str) -> str:
    assert main(["bench", "-m", str(model), "-t", "1", *args]) == 0
    return capsys.readouterr().out


def plan(tiny: TinyModel) -> PlanSpec:
    return arch.plan(open_model(tiny.path), arch.PlanOptions(ctx=300, max_rows=16, max_outputs=8))


def test_bytes_and_the_read_limit_stand_beside_generation(
    capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel
) -> None:
    out = bench(capsys, tiny_llama.path, "-p", "8", "-n", "3", "-d", "10", "-r", "3", "-o", "json")
    prompt, generation = json.loads(out)
    assert prompt["decode_bytes"] is None and prompt["share_of_limit"] is None and prompt["read_limit_gb_s"] > 0
    weights, kv = decode_bytes(plan(tiny_llama), 12)  # the mean of 11, 12 and 13 tokens
    assert (generation["decode_weight_bytes"], generation["decode_kv_bytes"]) == (weights, kv)
    assert generation["decode_bytes"] == weights + kv
    limits = generation["samples_read_limit_gb_s"]
    shares = sorted(
        rate * (weights + kv) / 1e9 / limit for rate, limit in zip(generation["samples_ts"], limits, strict=True)
    )
    assert generation["share_of_limit"] == pytest.approx(shares[1], rel=0.01, abs=1e-4)
    assert generation["decode_gb_s"] == pytest.approx(generation["avg_ts"] * (weights + kv) / 1e9, abs=1e-3)
    assert "profile" not in prompt


def test_markdown_and_csv_have_the_columns(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel) -> None:
    head, _, prompt, generation = bench(capsys, tiny_llama.path, "-p", "8", "-n", "3", "-r", "1").splitlines()
    titles = [cell.strip() for cell in head.split("|")][1:-1]
    assert titles[-5:] == ["t/s", "MB/token", "GB/s", "read limit GB/s", "of limit"]
    cells = [
        dict(zip(titles, (c.strip() for c in line.split("|")[1:-1]), strict=True)) for line in (prompt, generation)
    ]
    assert cells[0]["of limit"] == "" and cells[0]["MB/token"] == "" and float(cells[0]["read limit GB/s"]) > 0
    assert cells[1]["of limit"].endswith("%") and float(cells[1]["MB/token"]) > 0
    text = bench(capsys, tiny_llama.path, "-p", "8", "-n", "3", "-r", "1", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0]["decode_bytes"] == "" and int(rows[1]["decode_bytes"]) > 0


@pytest.mark.parametrize("form", ["md", "jsonl"])
def test_profile(capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel, form: str) -> None:
    out = bench(capsys, tiny_llama.path, "-p", "20", "-n", "3", "-r", "2", "-b", "16", "--profile", "-o", form)
    if form == "md":
        assert out.count("| gate/up | matmul |") == 2
        assert "per prompt, read limit" in out and "per token, read limit" in out
        matrices, rest = out.splitlines()[-2:]
        assert matrices.startswith("all matrices of F32: ") and "% of the read limit" in matrices
        assert rest.startswith("all else: ") and rest.endswith("% of the time)")
        return
    for row in map(json.loads, out.splitlines()):
        lines = {line["family"]: line for line in row["profile"]}
        assert {"attn qkv", "attn out", "gate/up", "down", "head", "attention", "norms", "rope", "sample"} < set(lines)
        sums = {"all matrices", "all else"}
        whole = sum(line["share"] for name, line in lines.items() if name not in sums)
        assert whole == pytest.approx(1, abs=0.2)
        assert sum(lines[name]["share"] for name in sums) == pytest.approx(whole, abs=0.01)
        assert all(line["ms"] >= 0 for line in lines.values())
        assert lines["all matrices"]["bytes"] == sum(line["bytes"] for line in row["profile"] if line["op"] == "matmul")


def test_profile_lines_add_up(tiny_llama: TinyModel) -> None:
    spec = plan(tiny_llama)
    gate = [index for index, op in enumerate(spec.ops) if family(spec, op) == "gate/up"]
    times = np.full((3, len(spec.ops)), 1000, np.uint64)
    times[:, gate] = 500_000
    times[1] *= 100  # a step that was interrupted
    steps = (Rows(1, 1, 1), Rows(1, 1, 2), Rows(1, 1, 3))
    samples = [Sample(0.1, 10e9, steps, (0.010, 0.08, 0.010), times)]
    lines = {line.family: line for line in profile_lines(spec, Case(0, 3, 0), samples)}
    line = lines["gate/up"]
    size = sum(tensor.nbytes for tensor in spec.tensors if "ffn_gate" in tensor.name or "ffn_up" in tensor.name)
    size += sum(tensor.nbytes for tensor in spec.tensors if "ffn_norm" in tensor.name)
    assert (line.op, line.ops, line.bytes) == ("matmul", 2, size)
    assert line.ms == pytest.approx(1.0) and line.share == pytest.approx(0.1)
    assert line.gb_s == pytest.approx(size / 1e6) and line.share_of_limit == pytest.approx(size / 1e7)
    assert line.gop_s == pytest.approx(2 * 2 * 2 * 64 * 96 / 1e6)
    ops = 1.0 + (len(spec.ops) - 2) * 0.001
    assert lines["outside ops"].ms == pytest.approx(10 - ops)
    assert (lines["all matrices"].ops, lines["all matrices"].types) == (9, "F32")
    assert lines["all matrices"].ms + lines["all else"].ms == pytest.approx(10)

    # A prompt of two steps: both count, and the head only where a token was drawn.
    samples = [Sample(0.010, 10e9, (Rows(16, 0, 16), Rows(4, 1, 20)), (0.006, 0.004), times[[0, 2]])]
    lines = {line.family: line for line in profile_lines(spec, Case(20, 0, 0), samples)}
    assert lines["gate/up"].bytes == 2 * size and lines["gate/up"].ms == pytest.approx(2.0)
    assert lines["gate/up"].gop_s == pytest.approx(2 * 2 * 20 * 2 * 64 * 96 / 2e6)
    assert lines["head"].bytes == next(t.nbytes for t in spec.tensors if t.name == "output.weight")


def test_types_of_matrices_apart() -> None:
    tensors = {
        "a": Tensor(0, "blk.0.attn_q.weight", "", (64, 64), lib.APU_Q8_0),
        "b": Tensor(1, "blk.0.ffn_gate_inp.weight", "", (8, 64), lib.APU_F16),
        "table": Tensor(2, "blk.0.ffn_gate_tid2eid.weight", "", (100, 2), lib.APU_I32),
        "norm": Tensor(3, "blk.0.attn_norm.weight", "", (64,), lib.APU_F32),
    }
    spec = PlanSpec(Limits(1, 1, 1, 1, 1), tensors=list(tensors.values()))
    both = Op(lib.APU_OP_MATMUL, 0, weights=(3, 1, 0))
    spec.ops = [both, Op(lib.APU_OP_ROUTE, 0, weights=(3, 1, 2)), Op(lib.APU_OP_RMS_NORM, 0, weights=(3,))]
    assert [matrix_types(spec, op) for op in spec.ops] == ["Q8_0 + F16", "F16", ""]
    samples = [Sample(0.1, 10e9, (Rows(1, 1, 1),), (0.010,), np.full((1, 3), 1_000_000, np.uint64))]
    lines = profile_lines(spec, Case(0, 1, 0), samples)
    sums = {(line.family, line.types): (line.ops, line.ms) for line in lines if line.family.startswith("all ")}
    assert sums.pop(("all else", "")) == (1, pytest.approx(8))
    types = {("all matrices", "Q8_0 + F16"): (1, 1), ("all matrices", "F16"): (1, 1), ("all matrices", ""): (2, 2)}
    assert sums == {name: (ops, pytest.approx(ms)) for name, (ops, ms) in types.items()}


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_a_filled_context_is_decoded_after(
    capsys: pytest.CaptureFixture[str], tiny_llama: TinyModel, kv_type: str
) -> None:
    args = ["-p", "0", "-n", "3", "-d", "0,700", "-r", "1", "-b", "16", "--fill", "--kv-type", kv_type, "-o", "json"]
    empty, filled = json.loads(bench(capsys, tiny_llama.path, *args))
    assert filled["decode_kv_bytes"] > 100 * empty["decode_kv_bytes"] and filled["n_depth"] == 700


def test_bytes_per_token_follow_the_window(tiny_gemma3: TinyModel) -> None:
    spec = plan(tiny_gemma3)
    weights, kv = token_bytes(spec, Case(0, 100, 50))
    contexts = np.arange(51, 151)
    assert weights == decode_bytes(spec, 1)[0]
    assert kv == pytest.approx(np.mean([decode_bytes(spec, int(context))[1] for context in contexts]), rel=0.01)


def _spec(*segments: tuple[int, int]) -> PlanSpec:
    tensors = [
        Tensor(i, f"w{i}", "", (rows, 64), 0, segments=(Segment(address, 0, rows, 256, 0),))
        for i, (address, rows) in enumerate(segments)
    ]
    return PlanSpec(Limits(1, 1, 1, 1, 1), tensors=tensors)


def test_neighbouring_weights_are_one_range() -> None:
    far = 4096 + 2560 + GAP + 1
    assert weight_ranges(_spec((4096, 4), (5120, 6), (far, 2))) == [(4096, 2560), (far, 512)]
    assert weight_ranges(_spec((5120, 6), (4096, 4), (4096, 4))) == [(4096, 2560)]
    assert weight_ranges(_spec((4096, 4), (5120, 6)), [4000, 5100]) == [(4096, 1024), (5120, 1536)]


def test_the_limit_reads_small_weights_often_and_large_ones_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def read_rate(self, address: int, nbytes: int) -> float:
            self.calls.append((address, nbytes))
            return 1e9 if address < 1 << 20 else 4e9

    def calls(spec: PlanSpec) -> tuple[list[tuple[int, int]], float]:
        reader: Any = Reader()
        rate = ReadLimit(reader, spec).measure()
        return reader.calls, rate

    monkeypatch.setattr("apu_engine.cli.bench_measure.READ_BYTES", 1 << 20)
    small, rate = calls(_spec((4096, 1024), (1 << 21, 1024)))
    assert small == [(4096, 1 << 18), (1 << 21, 1 << 18)] * 2
    assert rate == pytest.approx(1.6e9)  # a quarter of the time goes to half of the bytes
    large, _ = calls(_spec((4096, 2048), (1 << 21, 8192)))
    assert large == [(4096, 1 << 19), (1 << 21, 1 << 19)]


def test_the_limit_is_measured_on_a_device(device: Device) -> None:
    data = np.ones((256, 64), np.float32)
    assert 1e6 < ReadLimit(device, _spec((data.ctypes.data, 256))).measure() < 1e13
