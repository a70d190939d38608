"""DeepSeek V2, V2-Lite and V3 against transformers on random weights; batches, threads and levels change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.errors import ConfigError, FormatError
from apu_engine.plan.cost import decode_bytes
from apu_engine.plan.dump import lines, render
from apu_engine.weights.opening import open_model
from models import tiny_deepseek2_gguf, write

IDS = np.random.default_rng(12).integers(0, 320, 150).tolist()
V3 = {"sigmoid": True, "groups": 4, "groups_used": 2, "experts": 16}
SIZES = {"q_rank": 32, "nope": 32, "rank": 64, "rope": 32, "value": 32}  # whole blocks
YARN = {
    "deepseek2.rope.scaling.type": "yarn",
    "deepseek2.rope.scaling.factor": 4.0,
    "deepseek2.rope.scaling.original_context_length": 64,
    "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
}
YARN_HF = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, {}),
        ({"q_rank": 0}, {}),
        ({"groups": 4, "groups_used": 2, "experts": 16}, {}),
        (V3, {}),
        (V3 | {"q_rank": 0, "shared": 1, "dense": 2}, {}),
        ({"sigmoid": True}, {}),
        ({"metadata": YARN}, {"rope": YARN_HF}),
        (V3 | {"metadata": YARN}, {"rope": YARN_HF}),
        ({"joined": True}, {}),
        (V3 | {"joined": True, "nope": 160, "value": 40}, {}),
        ({"dense": 0, "layers": 2}, {}),
        ({"H": 12, "D": 96, "rank": 64, "value": 32}, {}),
    ],
    ids=[
        "v2",
        "v2-lite",
        "v2-groups",
        "v3",
        "v3-no-q-rank",
        "kimi",
        "v2-yarn",
        "v3-yarn",
        "joined",
        "v3-joined-long-keys",
        "no-dense",
        "twelve-heads",
    ],
)
def test_agrees_with_transformers(
    tmp_path: Path, device: Device, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device) as model:
        found = model.prefill(IDS)
        assert np.array_equal(model.prefill(IDS, chunk=1), found)
    reference.agree(found, reference.deepseek(tiny, **extra), IDS)


def test_yarn_without_a_multiplier_scales_the_rotation(tmp_path: Path, device: Device) -> None:
    """As transformers does without mscale_all_dim."""
    metadata = {key: value for key, value in YARN.items() if "multiplier" not in key}
    hf = {key: value for key, value in YARN_HF.items() if "mscale" not in key}
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", metadata=metadata, **V3)
    with running(tiny.path, device) as model:
        reference.agree(model.prefill(IDS), reference.deepseek(tiny, rope=hf), IDS)


def test_heads_whose_rows_are_those_of_one_matrix(tmp_path: Path, device: Device) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", **V3)
    with running(tiny.path, device) as model:
        expected = model.prefill(IDS[:40])
    for name, values in tiny.tensors.items():
        if "attn_k_b" in name or "attn_v_b" in name:
            tiny.tensors[name] = values.reshape(-1, values.shape[-1])
    with running(write(tiny).path, device) as model:
        assert np.array_equal(model.prefill(IDS[:40]), expected)


def test_a_router_whose_kind_is_not_said_takes_softmax(tmp_path: Path, device: Device) -> None:
    found = []
    for kind in (1, 0, None):
        metadata = {"deepseek2.expert_gating_func": kind}
        tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", metadata=metadata)
        with running(tiny.path, device) as model:
            found.append(model.prefill(IDS[:20]))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_joined_equals_split(tmp_path: Path, device: Device) -> None:
    found = []
    for joined in (False, True):
        tiny = tiny_deepseek2_gguf(tmp_path / f"{joined}.gguf", joined=joined, **V3)
        with running(tiny.path, device) as model:
            found.append(model.prefill(IDS))
    assert np.abs(found[0] - found[1]).max() <= 2e-5  # keys are added up in another order


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize(("quant", "kv_type"), [("F32", "f32"), ("Q8_0", "f16"), ("Q4_0", "q8_0")])
@pytest.mark.parametrize("joined", [False, True])
def test_many_rows_equal_single_rows_bit_for_bit(
    tmp_path: Path, isa: str, quant: str, kv_type: str, joined: bool
) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", quant=quant, joined=joined, **SIZES, **V3)
    with Device("cpu", threads=2, isa=isa) as device, running(tiny.path, device, kv_type=kv_type) as model:
        model.same_in_chunks(IDS)


def test_long_contexts_are_spread_over_workers_without_a_change(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 320, 700).tolist()
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", layers=2, context=1024)
    found = []
    for threads in (1, 3):
        with Device("cpu", threads=threads) as device, running(tiny.path, device, ctx=1024) as model:
            whole = model.prefill(ids, chunk=250)
            assert np.array_equal(model.logits([(0, 699, ids[699:])])[0], whole[699])
            found.append(whole)
    assert np.array_equal(found[0], found[1])
    reference.agree(found[0], reference.deepseek(tiny), ids)


def test_interleaved_sequences_equal_separate_ones(tmp_path: Path, device: Device) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", **V3)
    with running(tiny.path, device, parallel=2) as model:
        model.same_in_turns(IDS)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("joined", [False, True])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str, joined: bool) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", quant=quant, joined=joined, **SIZES)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        found = model.prefill(IDS)
    reference.agree(found, reference.deepseek(tiny, tiny.dequantized()), IDS)


@pytest.mark.parametrize(("kv_type", "most"), [("f16", 0.01), ("q8_0", 0.2)])
def test_smaller_caches_stay_close(tmp_path: Path, device: Device, kv_type: str, most: float) -> None:
    sizes = {"rank": 64, "rope": 32}
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", experts=4, used=4, **sizes)  # no choice that could tip
    with running(tiny.path, device) as model:
        expected = model.prefill(IDS)
    with running(tiny.path, device, kv_type=kv_type) as model:
        assert np.abs(model.prefill(IDS) - expected).max() <= most


def test_odd_offsets_and_shards_change_nothing(tmp_path: Path, device: Device) -> None:
    for joined in (False, True):
        tiny = tiny_deepseek2_gguf(tmp_path / "even.gguf", quant="Q8_0", joined=joined, **SIZES)
        with running(tiny.path, device) as model:
            expected = model.prefill(IDS[:40])
        for name, options in (("odd", {"alignment": 1}), ("shards", {"shard_tensors": 5})):
            tiny.path = tmp_path / f"{name}-{joined}.gguf"
            with running(write(tiny, "Q8_0", **options).path, device) as model:
                assert np.array_equal(model.prefill(IDS[:40]), expected)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_pages_are_forked_saved_and_restored_exactly(tmp_path: Path, device: Device, kv_type: str) -> None:
    """Sequence 1 goes on from copies of sequence 0's pages, sequence 0 from pages that were saved and reset."""
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", **SIZES, **V3)
    with running(tiny.path, device, parallel=2, kv_type=kv_type) as model:
        whole = model.prefill(IDS)
        plan = model.loaded.plan
        pages = list(zip(model.tables(0, 0, 256)[0], model.tables(1, 0, 256)[0], strict=True))
        assert len(pages) == 2
        saved = [plan.export_page(0, page) for page, _ in pages]
        for page, copy in pages:
            plan.copy_page(0, page, copy)
            plan.reset_page(0, page)
        assert np.array_equal(model.logits([(1, 140, IDS[140:])]), whole[140:])  # rows 140 on are written again
        for (page, _), data in zip(pages, saved, strict=True):
            plan.import_page(0, page, data)
        assert np.array_equal(model.logits([(0, 130, IDS[130:])]), whole[130:])


def test_layers_of_next_token_prediction_are_left_out(tmp_path: Path, device: Device) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", metadata={"deepseek2.nextn_predict_layers": 1})
    assert arch.describe(open_model(tiny.path)).layers == 3  # the file says how many there are, but has none
    tiny.tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((48, 96), np.float32)
    write(tiny)
    del tiny.tensors["blk.2.nextn.eh_proj.weight"]
    with running(tiny.path, device) as model:
        found = model.prefill(IDS[:20])
        assert model.loaded.layers == 2
    whole = dict(tiny.tensors)
    tiny.shape["layers"] = 2
    kept = {name: values for name, values in whole.items() if not name.startswith("blk.2.")}
    reference.agree(found, reference.deepseek(tiny, kept), IDS[:20])


def test_a_token_costs_one_row_per_layer(tmp_path: Path) -> None:
    for joined in (False, True):
        sizes = {"rank": 512, "rope": 64, "nope": 128, "value": 128, "H": 2}
        tiny = tiny_deepseek2_gguf(tmp_path / f"{joined}.gguf", joined=joined, tokenizer=False, **sizes)
        model = open_model(tiny.path)
        for kv_type, row in (("f32", 2304), ("f16", 1152), ("q8_0", 612)):
            assert arch.describe(model, kv_type).kv_bytes_per_token == (3 * row,)
        spec = arch.plan(model, arch.PlanOptions(ctx=300, max_rows=16, kv_type="f16"))
        weights, kv = decode_bytes(spec, 300)
        assert kv == 300 * 3 * 1152
        layer = {name: values.nbytes for name, values in tiny.tensors.items() if name.startswith("blk.0.")}
        first = sum(op.weight_bytes for op in lines(spec) if op.layer == 0)
        assert first == sum(layer.values())  # each weight once
        assert weights > first
        assert "latent_attention" in render(spec)


def test_rows_of_no_whole_blocks_have_no_q8_cache(tmp_path: Path) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", rank=40)
    with pytest.raises(ConfigError, match="blocks of 32"):
        arch.describe(open_model(tiny.path), "q8_0")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.kv_lora_rank", None, "required"),
        ("attention.kv_lora_rank", 0, "between 1"),
        ("attention.kv_lora_rank", 47, "attention.key_length"),
        ("attention.key_length", 65, "expected 64"),
        ("attention.key_length_mla", 16, "between 17"),
        ("attention.key_length_mla", 41, "attn_q_b"),
        ("attention.value_length_mla", None, "required"),
        ("attention.value_length_mla", 21, "attn_"),
        ("attention.head_count_kv", 2, "expected 1 or 4"),
        ("attention.q_lora_rank", 25, "attn_q_a"),
        ("attention.q_lora_rank", 0, "attn_q.weight"),
        ("rope.dimension_count", None, "required"),
        ("rope.dimension_count", 15, "attention.key_length"),
        ("expert_gating_func", 3, "not supported"),
        ("expert_group_count", 3, "evenly"),
        ("expert_group_used_count", 5, "between 1 and 4"),
        ("expert_group_used_count", None, "required"),
        ("expert_used_count", 9, "hold less than expert_used_count 9"),
        ("expert_shared_count", 1, "ffn_gate_shexp"),
        ("leading_dense_block_count", 4, "between 0 and 3"),
        ("leading_dense_block_count", 2, "blk.1.ffn_gate.weight"),
        ("leading_dense_block_count", 0, "blk.0.ffn_gate_inp"),
        ("nextn_predict_layers", 3, "between 0 and 2"),
        ("rope.scaling.yarn_log_multiplier", -1.0, "between 0"),
    ],
)
def test_lies_are_refused_by_name(tmp_path: Path, key: str, value: Any, says: str) -> None:
    metadata = {f"deepseek2.{key}": value}
    if "yarn" in key:
        metadata = YARN | metadata
    tiny = tiny_deepseek2_gguf(tmp_path / "lie.gguf", tokenizer=False, metadata=metadata, **V3)
    with pytest.raises(FormatError, match=r"lie\.gguf") as error:
        arch.describe(open_model(tiny.path))
    assert says in str(error.value)
    assert "deepseek2." in str(error.value) or "blk." in str(error.value)


@pytest.mark.parametrize("name", ["attn_kv_a_norm", "attn_q_a_norm", "attn_v_b", "attn_k_b", "exp_probs_b"])
def test_missing_and_wrong_tensors_are_named(tmp_path: Path, name: str) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf", tokenizer=False, **V3)
    full = next(key for key in tiny.tensors if f".{name}." in key)
    tiny.tensors[full] = tiny.tensors[full][:-1]
    write(tiny)
    with pytest.raises(FormatError, match=name):
        arch.describe(open_model(tiny.path))
