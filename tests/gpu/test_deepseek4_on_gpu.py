"""DeepSeek V4 on a GPU: both ratios, all rows and chosen ones, experts by token, against the CPU and transformers over
150 tokens; sequences go on exactly from the middle of a compression.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running
from test_plan_models import NEW, TOLERANCE, greedy

from apu_engine._native import Device
from models import tiny_deepseek4_gguf

IDS = np.random.default_rng(14).integers(0, 320, 150).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"ratios": (0, 4, 128)},
        {"top_k": 9, "ratios": (4, 128, 4)},
        {"ratios": (128, 0, 4), "streams": 2, "H": 6, "groups": 3, "limit": 0.5},
    ],
    ids=["all", "chosen", "other-sizes"],
)
def test_decodes_as_the_cpu_does(tmp_path: Path, device: Device, gpu: Device, options: dict[str, Any]) -> None:
    """The last of 126 tokens that are read ends neither kind of compressed row; those that are decoded end both."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device) as cpu:
        expected_tokens, expected = greedy(cpu, IDS[:126], NEW)
    with running(tiny.path, gpu) as other:
        tokens, found = greedy(other, IDS[:126], NEW)
    assert tokens == expected_tokens
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize("options", [{}, {"ratios": (4, 4), "top_k": 5, "index_heads": 16}], ids=["all", "chosen"])
def test_reads_as_transformers_does(tmp_path: Path, gpu: Device, options: dict[str, Any]) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", **options)
    expected = reference.logits(reference.deepseek4(tiny), IDS)
    with running(tiny.path, gpu) as model:
        assert np.abs(model.prefill(IDS) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_sequences_go_on_exactly_from_the_middle_of_a_compression(tmp_path: Path, gpu: Device, kv_type: str) -> None:
    """Sequence 0 goes on from fewer tokens and from pages saved and reset, sequence 1 from copies of its pages."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", ratios=(4, 128), top_k=9)

    def rest(sequence: int, begin: int) -> Any:
        return [model.logits([(sequence, at, IDS[at : at + 4])]) for at in range(begin, 138, 4)]

    with running(tiny.path, gpu, parallel=2, kv_type=kv_type) as model:
        model.prefill(IDS[:126])
        whole, plan = rest(0, 126), model.loaded.plan
        model.logits([(0, 126, IDS[:9])])  # other tokens, taken back: 125 is the middle of every compressed row
        for expected, found in zip(whole, rest(0, 126), strict=True):
            assert np.array_equal(found, expected)
        model.logits([(0, 126, IDS[126:130])])
        groups = range(len(model.loaded.groups))
        tables = [list(zip(model.tables(0, 0, 150)[g], model.tables(1, 0, 150)[g], strict=True)) for g in groups]
        saved = [[plan.export_page(g, page) for page, _ in tables[g]] for g in groups]
        for g in groups:
            for page, copy in tables[g]:
                plan.copy_page(g, page, copy)
                plan.reset_page(g, page)
        for expected, found in zip(whole[1:], rest(1, 130), strict=True):
            assert np.array_equal(found, expected)
        for g in groups:
            for (page, _), data in zip(tables[g], saved[g], strict=True):
                plan.import_page(g, page, data)
        for expected, found in zip(whole[1:], rest(0, 130), strict=True):
            assert np.array_equal(found, expected)


def test_rounded_rows_are_the_cpus(tmp_path: Path, device: Device, gpu: Device) -> None:
    """Rows of F16, rounded to E4M3 and FP4: single elements may round to the other side, so on average."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", ratios=(4, 128), top_k=37)
    found = []
    for target, kv_type in ((device, "f32"), (device, "f16"), (gpu, "f16")):
        with running(tiny.path, target, kv_type=kv_type) as model:
            found.append(model.prefill(IDS))
    plain, expected, other = found
    rounding = np.abs(expected - plain).mean()
    assert rounding > 0.005
    assert np.abs(other - expected).mean() < 0.15 * rounding
