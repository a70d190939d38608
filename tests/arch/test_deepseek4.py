"""DeepSeek V4 against transformers on random weights: both ratios, chosen rows, experts by token; batches, threads and
levels change no bit, and a sequence goes on exactly from its pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine import arch
from apu_engine._native import Device, InvalidError
from apu_engine.errors import ConfigError, FormatError
from apu_engine.plan.cost import decode_bytes
from apu_engine.plan.dump import render
from apu_engine.weights.opening import open_model
from models import tiny_deepseek4_gguf, write

IDS = np.random.default_rng(14).integers(0, 320, 150).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ratios": (0,), "hashed": 0},
        {"ratios": (4,), "hashed": 1},
        {"ratios": (128,), "hashed": 0},
        {"ratios": (4, 4), "top_k": 5, "index_heads": 16},
        {"ratios": (128, 0, 4), "streams": 2, "H": 6, "groups": 3, "limit": 0.5},
    ],
    ids=["all", "window", "four", "hundred", "chosen", "other-sizes"],
)
def test_transformers(tmp_path: Path, device: Device, options: dict[str, Any]) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", **options)
    with running(tiny.path, device, max_rows=64) as model:
        found = model.prefill(IDS)
    reference.agree(found, reference.deepseek4(tiny), IDS)


@pytest.mark.parametrize("isa", ["portable", "avx2", "auto"])
@pytest.mark.parametrize(("quant", "kv_type"), [("F32", "f32"), ("Q8_0", "f16")])
def test_many_rows_equal_single_rows_bit_for_bit(tmp_path: Path, isa: str, quant: str, kv_type: str) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", quant=quant, out_rank=32, top_k=7)
    with Device("cpu", threads=2, isa=isa) as device, running(tiny.path, device, kv_type=kv_type) as model:
        model.same_in_chunks(IDS)


def test_threads_change_nothing_over_several_pages(tmp_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 320, 400).tolist()
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", top_k=128)
    found = []
    for threads in (1, 3):
        with Device("cpu", threads=threads) as device, running(tiny.path, device) as model:
            whole = model.prefill(ids, chunk=250)
            assert np.array_equal(model.logits([(0, 399, ids[399:])])[0], whole[399])
            found.append(whole)
    assert np.array_equal(found[0], found[1])
    reference.agree(found[0], reference.deepseek4(tiny), ids)


def test_interleaved_sequences_equal_separate_ones(tmp_path: Path, device: Device) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", top_k=9)
    with running(tiny.path, device, parallel=2) as model:
        model.same_in_turns(IDS)


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_sequences_go_on_exactly_from_the_middle_of_a_compression(tmp_path: Path, device: Device, kv_type: str) -> None:
    """Sequence 0 goes on from fewer tokens and from pages saved and reset, sequence 1 from copies of its pages."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", top_k=9)
    with running(tiny.path, device, parallel=2, kv_type=kv_type) as model:
        whole, plan = model.prefill(IDS), model.loaded.plan
        model.logits([(0, 127, IDS[:9])])  # other tokens, taken back: 126 is the middle of every compressed row
        assert np.array_equal(model.logits([(0, 127, IDS[127:])]), whole[127:])
        model.prefill(IDS[:142])
        groups = range(len(model.loaded.groups))
        tables = [list(zip(model.tables(0, 0, 150)[g], model.tables(1, 0, 150)[g], strict=True)) for g in groups]
        saved = [[plan.export_page(g, page) for page, _ in tables[g]] for g in groups]
        for g in groups:
            for page, copy in tables[g]:
                plan.copy_page(g, page, copy)
                plan.reset_page(g, page)
        assert np.array_equal(model.logits([(1, 142, IDS[142:])]), whole[142:])
        for g in groups:
            for (page, _), data in zip(tables[g], saved[g], strict=True):
                plan.import_page(g, page, data)
        assert np.array_equal(model.logits([(0, 142, IDS[142:])]), whole[142:])


@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q4_0"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", quant=quant, out_rank=32)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        reference.agree(model.prefill(IDS), reference.deepseek4(tiny, tiny.dequantized()), IDS)


def test_rounding_is_that_of_the_trained_model(tmp_path: Path, device: Device) -> None:
    """Against transformers with its cached rows rounded; single elements may round to the other side, so on average."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", top_k=37)
    plain = reference.logits(reference.deepseek4(tiny), IDS)
    rounded = reference.logits(reference.rounded_rows(reference.deepseek4(tiny)), IDS)
    with running(tiny.path, device, kv_type="f16") as model:
        found = model.prefill(IDS)
    assert np.abs(rounded - plain).mean() > 0.01
    assert np.abs(found - rounded).mean() < 0.15 * np.abs(rounded - plain).mean()


def test_states_have_the_published_shares(tmp_path: Path) -> None:
    """Bytes by token: rows of d at a ratio, the indexer's at 4; open rows are twice d, or four times, in float32."""
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", ratios=(0, 4, 128))
    model = open_model(tiny.path)
    d, size = tiny.shape["d"], tiny.shape["index_size"]
    info = arch.describe(model, "f16")
    assert info.windows == (0, 128)
    assert info.kv_bytes_per_token == (
        d * 2 // 4 + size * 2 // 4 + d * 2 // 128,
        3 * d * 2 + 4 * (4 * d + 4 * size + 2 * d),
    )
    spec = arch.plan(model, arch.PlanOptions(ctx=4096, kv_type="f16"))
    whole = {state.name: state.page_bytes for state in spec.states if not state.window}
    assert whole == {
        "blk.1.compressed_rows": 32 * d * 2,
        "blk.1.index_rows": 32 * size * 2,
        "blk.2.compressed_rows": d * 2,
    }
    assert "sparse_attention" in render(spec)
    read, kv = decode_bytes(spec, 4096)
    assert 0 < kv < 4096 * sum(info.kv_bytes_per_token)
    assert 0 < read < model.weight_bytes


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.compress_ratios": (0, 4, 8, 4)}, r"compress_ratios.*expected entries of \(0, 4, 128\)"),
        ({"attention.compress_ratios": (0, 4)}, r"compress_ratios.*each of 4 layers, found 2"),
        ({"attention.head_count_kv": 2}, r"head_count_kv.*expected 1, found 2"),
        ({"attention.output_group_count": 3}, r"output_group_count.*3 does not divide"),
        ({"attention.sliding_window": 64}, r"sliding_window.*between 128"),
        ({"attention.indexer.key_length": 8}, r"indexer.key_length.*at least 16"),
        ({"hyper_connection.count": 17}, r"hyper_connection.count.*between 1 and 16"),
        ({"hash_layer_count": 5}, r"hash_layer_count.*between 0 and 4"),
        ({"hash_layer_count": 3}, r"blk.2.ffn_gate_tid2eid.weight.*missing"),
        ({"swiglu_clamp_exp": (1.0, 1.0)}, r"swiglu_clamp_exp.*each of 4 layers, found 2"),
        ({"swiglu_clamp_shexp": (1.0, 1.0)}, r"swiglu_clamp_shexp.*each of 4 layers, found 2"),
        ({"expert_gating_func": 2}, r"expert_gating_func.*expected 4.*found 2"),
        ({"rope.scaling.type": "linear"}, r"rope.scaling.type.*expected yarn, found 'linear'"),
    ],
)
def test_metadata_that_cannot_be_right(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    tiny = tiny_deepseek4_gguf(
        tmp_path / "model.gguf", metadata={f"deepseek4.{key}": value for key, value in metadata.items()}
    )
    with pytest.raises(FormatError, match=message):
        arch.describe(open_model(tiny.path))


def test_ratios_of_layers_in_other_files_are_left_out(tmp_path: Path, device: Device) -> None:
    extra = {"deepseek4.attention.compress_ratios": (0, 4, 128, 4, 0), "deepseek4.swiglu_clamp_exp": 1.5}
    plain, longer = (
        tiny_deepseek4_gguf(tmp_path / f"{name}.gguf", metadata=metadata)
        for name, metadata in (("plain", {}), ("longer", extra))
    )
    found = []
    for tiny in (plain, longer):
        with running(tiny.path, device) as model:
            found.append(model.prefill(IDS[:20]))
    assert np.array_equal(found[0], found[1])


def test_layers_of_next_token_prediction_are_left_out(tmp_path: Path, device: Device) -> None:
    """Where the file has them; converters that leave them out say how many the model has all the same."""
    short = tiny_deepseek4_gguf(tmp_path / "short.gguf", metadata={"deepseek4.nextn_predict_layers": 1})
    assert arch.describe(open_model(short.path)).layers == 4
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", ratios=(0, 4, 128, 4, 0))
    tiny.tensors["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    tiny.metadata["deepseek4.nextn_predict_layers"] = 1
    found = []
    for written in (short, write(tiny)):
        written.tensors |= {name: values for name, values in tiny.tensors.items() if not name.startswith("blk.4.")}
        with running(write(written).path, device) as model:
            assert model.loaded.layers == 4
            found.append(model.prefill(IDS[:20]))
    assert np.array_equal(found[0], found[1])


def test_shared_experts_have_a_limit_of_their_own(tmp_path: Path, device: Device) -> None:
    found = []
    for limit in (1.5, 1000.0):
        metadata = {"deepseek4.swiglu_clamp_shexp": (limit,) * 4}
        tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf", metadata=metadata)
        with running(tiny.path, device) as model:
            found.append(model.prefill(IDS[:20]))
    with running(tiny_deepseek4_gguf(tmp_path / "model.gguf").path, device) as model:
        assert np.array_equal(model.prefill(IDS[:20]), found[0])
    assert not np.array_equal(found[0], found[1])


def test_what_is_refused(tmp_path: Path, device: Device) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"q8_0 is not for deepseek4.*use f16"):
        arch.describe(open_model(tiny.path), "q8_0")
    tiny.tensors["blk.1.ffn_gate_tid2eid.weight"][17, 1] = 8
    write(tiny)
    message = r"blk.1.ffn_gate_tid2eid.*token 17 goes to expert 8, expected 0 to 7"
    with pytest.raises(InvalidError, match=message), running(tiny.path, device):
        pass
