"""Qwen 2 against transformers on random weights: biases of q, k and v, tied output, YaRN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine._native import Device
from apu_engine.errors import FormatError
from apu_engine.weights.opening import open_model
from models import tiny_qwen2_gguf

IDS = np.random.default_rng(11).integers(0, 320, 150).tolist()
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1_000_000.0}
_YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {}),
        ({"tied": True, "H": 6, "K": 1, "D": 96, "layers": 3}, {}),
        ({"metadata": {f"qwen2.rope.scaling.{k}": v for k, v in _YARN_KEYS.items()}}, {"rope_parameters": _YARN}),
    ],
    ids=["plain", "tied", "yarn"],
)
def test_agrees_with_transformers(
    tmp_path: Path, device: Device, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    tiny = tiny_qwen2_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device) as model:
        found = model.prefill(IDS)
        model.same_in_chunks(IDS)
    reference.agree(found, reference.qwen2(tiny, **extra), IDS)


def test_sequences_do_not_see_each_other(tmp_path: Path, device: Device) -> None:
    with running(tiny_qwen2_gguf(tmp_path / "model.gguf").path, device, parallel=2) as model:
        model.same_in_turns(IDS)


@pytest.mark.parametrize("quant", ["BF16", "Q8_0", "Q4_0"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_qwen2_gguf(tmp_path / "model.gguf", quant=quant)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        reference.agree(model.prefill(IDS), reference.qwen2(tiny, tiny.dequantized()), IDS)


def test_a_bias_of_another_size_is_refused(tmp_path: Path, device: Device) -> None:
    tiny = tiny_qwen2_gguf(tmp_path / "model.gguf", metadata={"qwen2.attention.head_count_kv": 4})
    with (
        pytest.raises(FormatError, match=r"blk\.0\.attn_k\.weight"),
        running(tiny.path, device),
    ):
        pass
    assert open_model(tiny.path).architecture == "qwen2"
