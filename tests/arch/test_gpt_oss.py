"""gpt-oss against transformers on random weights: sinks, windows, biases, limits, YaRN between dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running
from mixtures import tiny_gpt_oss_gguf

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.errors import FormatError
from apu_engine.weights.opening import open_model
from models import write

IDS = np.random.default_rng(13).integers(0, 320, 150).tolist()
SLIDING, FULL = "sliding_attention", "full_attention"
_WHOLE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "truncate": True,
}


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {}),
        ({"experts": 4, "used": 4, "H": 8, "K": 1}, {}),
        ({"experts": 40, "used": 6, "F": 32, "layers": 2}, {}),
        (
            {"metadata": {"gpt-oss.attention.sliding_window_pattern": [False, True, True, False]}},
            {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
        ),
        ({"metadata": {"gpt-oss.rope.scaling.yarn_truncate": True}}, {"rope_parameters": _WHOLE}),
    ],
    ids=["plain", "all", "many", "pattern", "whole-dimensions"],
)
def test_agrees_with_transformers(
    tmp_path: Path, device: Device, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    tiny = tiny_gpt_oss_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device) as model:
        found = model.prefill(IDS)
        model.same_in_chunks(IDS)
    reference.agree(found, reference.gpt_oss(tiny, **extra), IDS)


def test_the_options_matter(tmp_path: Path, device: Device) -> None:
    """Whole dimensions, sinks, limits and biases of experts each change the logits."""
    tiny = tiny_gpt_oss_gguf(tmp_path / "model.gguf")
    oracle = reference.logits(reference.gpt_oss(tiny), IDS)
    changes: dict[str, Any] = {"rope_parameters": _WHOLE, "swiglu_limit": 100.0}
    for name, value in changes.items():
        other = reference.logits(reference.gpt_oss(tiny, **{name: value}), IDS)
        assert np.abs(other - oracle).max() > 0.01, name
    for part in ("attn_sinks.weight", "ffn_gate_exps.bias", "ffn_down_exps.bias", "ffn_gate_inp.bias"):
        zeros = {name: values * (part not in name) for name, values in tiny.tensors.items()}
        other = reference.logits(reference.gpt_oss(tiny, zeros), IDS)
        assert np.abs(other - oracle).max() > 0.01, part


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize("quant", ["F32", "MXFP4"])
def test_many_rows_equal_single_rows_bit_for_bit(tmp_path: Path, isa: str, quant: str) -> None:
    tiny = tiny_gpt_oss_gguf(tmp_path / "model.gguf", quant=quant)
    with Device("cpu", threads=2, isa=isa) as device, running(tiny.path, device) as model:
        model.same_in_chunks(IDS)


def test_sequences_do_not_see_each_other(tmp_path: Path, device: Device) -> None:
    with running(tiny_gpt_oss_gguf(tmp_path / "model.gguf").path, device, parallel=2) as model:
        model.same_in_turns(IDS)


@pytest.mark.parametrize("quant", ["BF16", "Q8_0", "MXFP4"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_gpt_oss_gguf(tmp_path / "model.gguf", quant=quant)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        reference.agree(model.prefill(IDS), reference.gpt_oss(tiny, tiny.dequantized()), IDS)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.sliding_window", None, "required"),
        ("attention.sliding_window", 0, "between 1"),
        ("attention.sliding_window_pattern", [True], "sliding_window_pattern"),
        ("rope.scaling.yarn_truncate", 1, "true or false"),
        ("expert_feed_forward_length", 65, "ffn_gate_exps"),
        ("expert_count", 7, "ffn_gate_inp"),
    ],
)
def test_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    tiny = tiny_gpt_oss_gguf(tmp_path / "lie.gguf", tokenizer=False, metadata={f"gpt-oss.{key}": value})
    with pytest.raises(FormatError, match=r"lie\.gguf") as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["attn_sinks.weight", "ffn_up_exps.bias", "ffn_down_exps.bias"])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, name: str) -> None:
    tiny = tiny_gpt_oss_gguf(tmp_path / "model.gguf", tokenizer=False)
    tiny.tensors[f"blk.1.{name}"] = tiny.tensors[f"blk.1.{name}"][:-1]
    write(tiny)
    with pytest.raises(FormatError, match=rf"blk\.1\.{name}"):
        arch.describe(open_model(tiny.path))
