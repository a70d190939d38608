"""Headers as published files have them: opened, planned and estimated at their true size from a hole on the disk."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from published_models import Published, published, write_sparse
from synthesis.architectures import ARCHITECTURES, MIXES, metadata, tensors
from synthesize import header

from apu_engine import arch
from apu_engine.cli import main
from apu_engine.config import EngineConfig
from apu_engine.engine.context import fit
from apu_engine.memory.limits import preset
from apu_engine.plan.cost import decode_bytes
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.opening import open_model

CTX = 131_072
Q4 = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "Q4_K")


@pytest.fixture(scope="module")
def v4_flash() -> Published:
    return published("deepseek-v4-flash-q2")


@pytest.fixture(scope="module")
def v4_path(v4_flash: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_sparse(tmp_path_factory.mktemp("published") / "v4-flash.gguf", v4_flash)
    assert abs(path.stat().st_size - v4_flash.file_bytes) < 2 << 20  # other words, other template
    assert path.stat().st_blocks * 512 < 8 << 20
    return path


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def test_v4_flash_opens_plans_and_is_estimated(v4_path: Path) -> None:
    """80.76 GiB: no growth of memory, bytes of a decode step and of states as they should be."""
    before, began = anonymous_bytes(), time.perf_counter()
    model = open_model(v4_path)
    info = arch.describe(model)
    spec = arch.plan(model, arch.PlanOptions(ctx=CTX))
    fitted = fit(EngineConfig(ctx=CTX), model, None, ("registered", "staged"), preset("strix-halo-128"))
    took, grew = time.perf_counter() - began, anonymous_bytes() - before
    print(f"V4 Flash Q2, {v4_path.stat().st_size / 2**30:.2f} GiB: {took:.3f} s, {grew >> 10} KiB of anonymous memory")
    assert grew < 32 << 20
    assert (info.layers, info.vocabulary, info.context_trained) == (43, 129_280, 1 << 20)
    assert abs(info.parameters / 1e9 - 284.33) < 0.01
    assert info.kv_bytes_per_token[0] == 21 * (1024 + 256) // 4 + 20 * 1024 // 128
    open_rows = 21 * 4 * (4 * 512 + 4 * 128) + 20 * 4 * 2 * 512
    assert info.kv_bytes_per_token[1] == open_rows + 43 * 1024
    assert abs(decode_bytes(spec, 1000)[0] / 2**30 - 8.90) < 0.01  # as the public engines count
    assert fitted.needs.weights == model.weight_bytes
    assert [item.fits for item in fitted.estimates] == [True, False]
    assert not model.tensors.keys() - {tensor.name for tensor in arch.tensors_used(model, arch.PlanOptions(ctx=CTX))}


def test_the_vocabulary_can_be_read(v4_path: Path) -> None:
    model = open_model(v4_path)
    tokenizer = Tokenizer.from_metadata(model.metadata, str(v4_path))
    assert tokenizer.vocab_size == 129_280 and tokenizer.decode(tokenizer.encode("1234 words")) == "1234 words"


@pytest.mark.parametrize(
    "types",
    [Q4, dict.fromkeys(Q4, "MXFP4"), {"ffn_gate_inp": "F32", "hc_attn_fn": "F32", "attn_compressor_ape": "F32"}],
    ids=["q4-experts", "mxfp4-experts", "float"],
)
def test_other_types_of_the_same_model(v4_flash: Published, tmp_path: Path, types: dict[str, str]) -> None:
    model = open_model(write_sparse(tmp_path / "other.gguf", v4_flash, types))
    assert len(arch.plan(model, arch.PlanOptions(ctx=CTX)).ops) > 43
    assert {model.tensors[f"blk.3.{name}.weight"].type_name for name in types} == set(types.values())


def test_the_synthetic_preset_is_the_published_file(v4_flash: Published) -> None:
    """All tensors, and all keys that say what the model is."""
    preset_ = ARCHITECTURES["deepseek4"].presets["v4-flash-q2"]
    table = tensors(ARCHITECTURES["deepseek4"], preset_, MIXES["Q4_0"], 43)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in table} == v4_flash.tensors
    keys = dict(metadata("deepseek4", "V4 Flash", preset_, MIXES["Q4_0"], 43))
    for key, (kind, value) in v4_flash.metadata.items():
        if kind == "string" and value is None:
            assert key in keys, key
        elif key.startswith("deepseek4."):
            assert np.array_equal(keys.pop(key), value), key
        elif key.startswith("tokenizer."):
            assert keys[key] == value if not kind.endswith("[]") else len(keys[key]) == value, key
    assert not [key for key in keys if key.startswith("deepseek4.")]


def test_v4_pro_has_other_numbers_only(tmp_path: Path) -> None:
    """Sizes as ds4.c has them (DS4_SHAPE_PRO); its first two layers have rows of 128 tokens."""
    preset_ = ARCHITECTURES["deepseek4"].presets["v4-pro-q2"]
    table = tensors(ARCHITECTURES["deepseek4"], preset_, MIXES["Q4_0"], 61)
    path = tmp_path / "v4-pro.gguf"
    path.write_bytes(header(metadata("deepseek4", "V4 Pro", preset_, MIXES["Q4_0"], 61), table))
    model = open_model(path, whole=False)
    assert 0 <= model.missing_bytes - model.weight_bytes < 32 * len(table)  # padding
    info = arch.describe(model)
    assert (info.layers, info.hidden_size) == (61, 7168) and 1.5e12 < info.parameters < 1.7e12
    assert info.kv_bytes_per_token[0] == 30 * 320 + 31 * 8
    assert not model.tensors.keys() - {tensor.name for tensor in arch.tensors_used(model, arch.PlanOptions(ctx=CTX))}


def test_show_gives_v4_flash_at_128k_in_numbers(
    v4_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the machines that it fits on; the first 6 MB of the file are enough for that."""
    head = tmp_path / "head.gguf"
    with v4_path.open("rb") as file:
        head.write_bytes(file.read(6 << 20))
    for path in (v4_path, head):
        assert main(["show", str(path), "--estimate-only", "--ctx", str(CTX)]) == 0
        out = capsys.readouterr().out
        assert "weights 80.8 GiB, KV cache 1.1 GiB" in out
        assert ("is a part of a model: 6 MiB of it, 80.8 GiB are missing" in out) == (path == head)
        for line in (
            "2 layers: cache_shared 1024 of the last 128",
            "21 layers: compressed_rows 256, index_rows 64 bytes a token; cache_shared 1024, compressed_open 8192, "
            "index_open 2048 of the last 128",
            "20 layers: compressed_rows 8 bytes a token; cache_shared 1024, compressed_open 4096 of the last 128",
            "strix-halo-128-tuned  fits                  fits",
        ):
            assert line in out
        assert re.search(r"strix-halo-128  +fits  +fits with ttm.pages_limit=21757952\n", out)
        assert re.search(r"strix-halo-96  +fits  +fits with ttm.pages_limit=21757952\n", out)
        assert re.search(r"strix-halo-64  +24.7 GiB too much  +51.1 GiB too much\n", out)
    assert main(["show", str(head), "--estimate-only", "--ctx", str(CTX), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    in_place, copied = found["machines"]["strix-halo-128"]
    assert in_place["fits"] and not copied["fits"] and copied["pages_limit"] == 21_757_952
    sizes = {group["window"]: (group["pages"], group["bytes"]) for group in found["estimate"]["pages"]}
    assert sizes == {0: (1024, 128 * 6880), 128: (6, 128 * 340_992)}
    assert found["estimate"]["kv"] == 1024 * 128 * 6880 + 6 * 128 * 340_992
