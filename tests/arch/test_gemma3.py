"""Gemma 3 against transformers on random float32 weights; the sliding window is shorter than the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine._native import Device
from models import TinyModel, tiny_gemma3_gguf

TOLERANCE = 1e-4
IDS = np.random.default_rng(8).integers(0, 512, 150).tolist()


def test_agrees_with_transformers(tiny_gemma3: TinyModel, device: Device) -> None:
    expected = reference.logits(reference.gemma3(tiny_gemma3), IDS)
    with running(tiny_gemma3.path, device) as model:
        assert [group.window for group in model.loaded.groups] == [0, 24]
        found = model.prefill(IDS)
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= TOLERANCE


def test_window_matters_and_freed_pages_are_never_read(tmp_path: Path, device: Device) -> None:
    tiny = tiny_gemma3_gguf(tmp_path / "model.gguf", window=40, V=512)
    ids = np.random.default_rng(9).integers(0, 512, 400).tolist()
    expected = reference.logits(reference.gemma3(tiny), ids)
    with running(tiny.path, device, max_rows=32) as model:
        assert model.loaded.groups[1].page_count < model.loaded.groups[0].page_count
        found = model.prefill(ids, chunk=32)
    assert np.abs(found - expected).max() <= TOLERANCE


def test_many_rows_equal_single_rows_bit_for_bit(tiny_gemma3: TinyModel, device: Device) -> None:
    with running(tiny_gemma3.path, device) as model:
        whole = model.prefill(IDS, chunk=150)
        assert np.array_equal(model.prefill(IDS, chunk=1), whole)
        assert np.array_equal(model.prefill(IDS, chunk=11), whole)


def test_interleaved_sequences_equal_separate_ones(tiny_gemma3: TinyModel, device: Device) -> None:
    other = IDS[::-1]
    with running(tiny_gemma3.path, device, parallel=2) as model:
        separate = np.stack([model.prefill(IDS), model.prefill(other)])
        for at in range(0, 150, 15):
            out = model.logits([(0, at, IDS[at : at + 15]), (1, at, other[at : at + 15])])
            assert np.array_equal(out.reshape(2, 15, -1), separate[:, at : at + 15])


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"tied": False}, {}),
        ({"K": 2, "layers": 7}, {}),
        (
            {"metadata": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}},
            {"rope": {"rope_type": "linear", "factor": 8.0}},
        ),
        ({"metadata": {"gemma3.final_logit_softcapping": 5.0}}, {"final_logit_softcapping": 5.0}),
        ({"metadata": {"gemma3.attn_logit_softcapping": 2.0}}, {"attn_logit_softcapping": 2.0}),
        (
            {"metadata": {"gemma3.attention.sliding_window_pattern": [True, False] * 3}},
            {"layer_types": ["sliding_attention", "full_attention"] * 3},
        ),
        (
            {"metadata": {"gemma3.attention.sliding_window_pattern": 3}},
            {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
        ),
        ({"metadata": {"gemma3.attention.scale": 0.25}}, {"query_pre_attn_scalar": 16}),
    ],
    ids=["untied", "gqa", "linear", "final-softcap", "score-softcap", "pattern", "period", "scale"],
)
def test_variants(tmp_path: Path, device: Device, options: dict[str, Any], extra: dict[str, Any]) -> None:
    tiny = tiny_gemma3_gguf(tmp_path / "model.gguf", **options)
    expected = reference.logits(reference.gemma3(tiny, **extra), IDS[:80])
    with running(tiny.path, device) as model:
        assert np.abs(model.prefill(IDS[:80]) - expected).max() <= TOLERANCE
