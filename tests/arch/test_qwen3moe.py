"""Qwen 3, dense and mixtures, against transformers on random weights; batches, threads and levels change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.errors import FormatError
from apu_engine.plan.cost import Rows, cost, decode_bytes, family
from apu_engine.plan.dump import lines, render
from apu_engine.weights.opening import open_model
from models import TinyModel, tiny_qwen3_gguf, write

TOLERANCE = 1e-4
IDS = np.random.default_rng(11).integers(0, 320, 150).tolist()


def test_mixture_agrees_with_transformers(tiny_qwen3moe: TinyModel, device: Device) -> None:
    expected = reference.logits(reference.qwen3(tiny_qwen3moe), IDS)
    with running(tiny_qwen3moe.path, device) as model:
        found = model.prefill(IDS)
        ids = model.loaded.plan.read("blk.1.expert_ids")
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= TOLERANCE
    assert ids.dtype == np.int32 and len(np.unique(ids)) > 3  # the router tells rows apart


def test_dense_agrees_with_transformers(tmp_path: Path, device: Device) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "dense.gguf", tied=True)
    expected = reference.logits(reference.qwen3(tiny), IDS)
    with running(tiny.path, device) as model:
        found = model.prefill(IDS)
        assert np.array_equal(model.prefill(IDS, chunk=1), found)
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"experts": 8, "used": 1}, {}),
        ({"experts": 4, "used": 4, "tied": True}, {}),
        ({"experts": 1, "used": 1}, {}),
        ({"experts": 40, "used": 6, "F": 32, "layers": 3}, {}),
        ({"experts": 8, "metadata": {"qwen3moe.expert_weights_norm": False}}, {"norm_topk_prob": False}),
        ({"experts": 8, "metadata": {"qwen3moe.feed_forward_length": None}}, {}),
        ({"experts": 8, "metadata": {"qwen3moe.expert_gating_func": 1, "qwen3moe.expert_weights_scale": 0.0}}, {}),
    ],
    ids=["one", "all", "single", "many", "not-normalised", "no-dense-width", "spelled-out"],
)
def test_variants(tmp_path: Path, device: Device, options: dict[str, Any], extra: dict[str, Any]) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "model.gguf", **options)
    expected = reference.logits(reference.qwen3(tiny, **extra), IDS[:80])
    with running(tiny.path, device) as model:
        found = model.prefill(IDS[:80], chunk=80)
        assert np.abs(found - expected).max() <= TOLERANCE
        assert np.array_equal(model.prefill(IDS[:80], chunk=1), found)


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_many_rows_equal_single_rows_bit_for_bit(tmp_path: Path, isa: str, quant: str) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "model.gguf", experts=8, quant=quant)
    with Device("cpu", threads=2, isa=isa) as device, running(tiny.path, device) as model:
        whole = model.prefill(IDS, chunk=150)
        for chunk in (1, 2, 3, 7, 64):
            assert np.array_equal(model.prefill(IDS, chunk=chunk), whole), chunk


def test_interleaved_sequences_equal_separate_ones(tiny_qwen3moe: TinyModel, device: Device) -> None:
    other = IDS[::-1]
    with running(tiny_qwen3moe.path, device, parallel=2) as model:
        separate = np.stack([model.prefill(IDS), model.prefill(other)])
        for at in range(0, 150, 15):
            out = model.logits([(0, at, IDS[at : at + 15]), (1, at, other[at : at + 15])])
            assert np.array_equal(out.reshape(2, 15, -1), separate[:, at : at + 15])


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "model.gguf", experts=8, quant="Q8_0")
    found = []
    for threads in (1, 2, 3):
        with Device("cpu", threads=threads) as device, running(tiny.path, device) as model:
            found.append(model.prefill(IDS[:40], chunk=13))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "model.gguf", experts=8, quant=quant)
    expected = reference.logits(reference.qwen3(tiny, tiny.dequantized()), IDS)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        exact = model.prefill(IDS)
        routed = model.loaded.plan.read("blk.0.expert_ids")
    assert np.abs(exact - expected).max() <= TOLERANCE
    with running(tiny.path, device) as model:
        default = model.prefill(IDS)
        same = (model.loaded.plan.read("blk.0.expert_ids") == routed).all(-1)
        assert np.array_equal(model.prefill(IDS, chunk=1), default)
    # int8 activations and an f16 cache; where they tip the choice of an expert, the logits jump: the median is judged
    assert np.median(np.abs(default - expected).max(-1)) <= 0.3
    assert same.mean() > 0.8


def test_shards_and_odd_addresses_change_nothing(tmp_path: Path, device: Device) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "plain.gguf", experts=8, quant="Q8_0")
    with running(tiny.path, device) as model:
        expected = model.prefill(IDS[:40])
    for name, options in (("odd", {"alignment": 1}), ("shards", {"shard_tensors": 5})):
        tiny.path = tmp_path / f"{name}.gguf"
        with running(write(tiny, "Q8_0", **options).path, device) as model:
            assert np.array_equal(model.prefill(IDS[:40]), expected)


def test_bytes_count_the_used_experts(tiny_qwen3moe: TinyModel) -> None:
    spec = arch.plan(open_model(tiny_qwen3moe.path), arch.PlanOptions(ctx=300, max_rows=16))
    stored = {name: values.nbytes for name, values in tiny_qwen3moe.tensors.items()}
    experts = sum(size for name, size in stored.items() if "_exps" in name)
    norms = sum(size for name, size in stored.items() if name.endswith("ffn_norm.weight"))
    table = stored["token_embd.weight"]
    read, _ = decode_bytes(spec, 1)
    # the norm before router and experts is read by both
    assert read == sum(stored.values()) - experts // 8 * 5 + norms - table + 64 * 4
    for rows, used in ((1, 3), (2, 6), (3, 8), (16, 8)):
        found = [cost(spec, op, Rows(rows, 1, rows)) for op in spec.ops if family(spec, op) == "experts"]
        assert sum(each.weight_bytes for each in found) == experts // 8 * used + norms
        assert sum(each.multiply_adds for each in found) == experts // 4 // 8 * 3 * rows
    assert sum(line.weight_bytes for line in lines(spec)) == read
    text = render(spec)
    assert "expert_ids (T k) I32" in text and "ffn_gate_exps (8 96 64) F32" in text
    assert "E = 8, k = 3, Fe = 96" in text
    assert f"reads {read / 1e6:.1f} of {sum(stored.values()) / 1e6:.1f} MB of weights" in text


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("expert_count", None, "required"),
        ("expert_count", 0, "between 1"),
        ("expert_count", 2**31, "between 1"),
        ("expert_count", 7, "ffn_gate_inp"),
        ("expert_count", 65536, "ffn_gate_inp"),
        ("expert_used_count", None, "required"),
        ("expert_used_count", 0, "between 1 and 8"),
        ("expert_used_count", 9, "between 1 and 8"),
        ("expert_used_count", 2**31, "between 1 and 8"),
        ("expert_feed_forward_length", None, "required"),
        ("expert_feed_forward_length", 0, "between 1"),
        ("expert_feed_forward_length", 97, "ffn_gate_exps"),
        ("expert_gating_func", 3, "not supported"),
        ("expert_weights_norm", 1, "true or false"),
        ("expert_weights_scale", -1.0, "between 0"),
        ("expert_weights_scale", float("nan"), "finite"),
        ("expert_shared_count", 1, "not supported"),
        ("expert_group_count", 2, "not supported"),
        ("leading_dense_block_count", 1, "not supported"),
    ],
)
def test_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    tiny = tiny_qwen3_gguf(tmp_path / "lie.gguf", experts=8, tokenizer=False, metadata={f"qwen3moe.{key}": value})
    with pytest.raises(FormatError, match=r"lie\.gguf") as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)
    assert f"qwen3moe.{key}" in str(error.value) or "blk.0.ffn_" in str(error.value)


def test_a_sigmoid_router_runs(tmp_path: Path, device: Device) -> None:
    metadata = {"qwen3moe.expert_gating_func": 2, "qwen3moe.expert_weights_scale": 2.5}
    tiny = tiny_qwen3_gguf(tmp_path / "model.gguf", experts=8, metadata=metadata)
    with running(tiny.path, device) as model:
        model.prefill(IDS[:20])
        weights = model.loaded.plan.read("blk.0.expert_weights")
    np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-6)
