"""GLM 4.5 against transformers on random weights: partial rotation, optional norms and biases, predicting layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running
from mixtures import tiny_glm4moe_gguf

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.errors import FormatError
from apu_engine.weights.opening import open_model

IDS = np.random.default_rng(17).integers(0, 320, 150).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_norms": False},
        {"bias": False, "dense": 0},
        {"predicting": 1, "dense": 2},
        {"groups": 4, "groups_used": 2, "experts": 16},
        {"metadata": {"glm4moe.expert_gating_func": None}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_agrees_with_transformers(tmp_path: Path, device: Device, options: dict[str, Any]) -> None:
    tiny = tiny_glm4moe_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device) as model:
        found = model.prefill(IDS)
        model.same_in_chunks(IDS)
        assert model.loaded.layers == 3
    reference.agree(found, reference.glm4moe(tiny), IDS)


def test_sequences_do_not_see_each_other(tmp_path: Path, device: Device) -> None:
    with running(tiny_glm4moe_gguf(tmp_path / "model.gguf").path, device, parallel=2) as model:
        model.same_in_turns(IDS)


@pytest.mark.parametrize("quant", ["BF16", "Q8_0"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_glm4moe_gguf(tmp_path / "model.gguf", quant=quant)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        reference.agree(model.prefill(IDS), reference.glm4moe(tiny, tiny.dequantized()), IDS)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("leading_dense_block_count", 4, "between 0 and 3"),
        ("leading_dense_block_count", 2, "ffn_gate.weight"),
        ("nextn_predict_layers", 3, "between 0 and 2"),
        ("rope.dimension_count", 64, "between 2 and 32"),
        ("expert_shared_count", 2, "ffn_gate_shexp"),
        ("expert_gating_func", 4, "not supported"),
    ],
)
def test_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    tiny = tiny_glm4moe_gguf(tmp_path / "lie.gguf", tokenizer=False, metadata={f"glm4moe.{key}": value})
    with pytest.raises(FormatError, match=r"lie\.gguf") as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)
