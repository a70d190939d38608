"""The sizes of states in docs/memory.md, written out here, against what a plan asks for and what a device reserves."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import running
from published_models import published, write_sparse

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.weights.opening import open_model
from models import TinyModel, tiny_deepseek2_gguf, tiny_deepseek4_gguf, tiny_gemma3_gguf, tiny_llama_gguf

BITS = {"f32": 32, "f16": 16, "q8_0": 8.5}


def formula(ctx: int, parallel: int, batch: int, full: float, windowed: float, window: int = 128) -> int:
    pages = -(-ctx // 128)
    seen = min(pages, (window + batch + 125) // 128 + 1)
    return round(parallel * 128 * (full * pages + windowed * seen))


def v4(ratios: list[int], d: int, index: int, element: float) -> tuple[float, float]:
    """(bytes of each token, bytes of each token in the window)"""
    full = sum({0: 0.0, 4: (d + index) / 4, 128: d / 128}[ratio] * element for ratio in ratios)
    open_rows = {0: 0, 4: 16 * (d + index), 128: 8 * d}
    return full, sum(d * element + open_rows[ratio] for ratio in ratios)


def latent(layers: int, rank: int, rope: int, element: float) -> float:
    return layers * (rank + rope) * element


@pytest.mark.parametrize(("ctx", "parallel", "batch"), [(131_072, 1, 512), (1000, 3, 1), (300, 2, 512), (4096, 1, 130)])
def test_v4_flash(tmp_path_factory: pytest.TempPathFactory, ctx: int, parallel: int, batch: int) -> None:
    path = tmp_path_factory.mktemp("published") / "v4-flash.gguf"
    model = open_model(write_sparse(path, published("deepseek-v4-flash-q2"), hole=False), whole=False)
    ratios = [0, 0, *(4, 128) * 20, 4]
    for kv_type in ("f16", "f32"):
        spec = arch.plan(model, arch.PlanOptions(ctx=ctx, parallel=parallel, max_rows=batch, kv_type=kv_type))
        assert spec.state_bytes == formula(ctx, parallel, batch, *v4(ratios, 512, 128, BITS[kv_type] / 8))
    assert v4(ratios, 512, 128, 2) == (6880, 340_992)


@pytest.mark.parametrize(("ctx", "parallel", "batch"), [(512, 1, 512), (1000, 2, 1), (300, 1, 130)])
@pytest.mark.parametrize("kv_type", ["f16", "f32", "q8_0"])
def test_what_a_device_reserves(
    tmp_path: Path, device: Device, ctx: int, parallel: int, batch: int, kv_type: str
) -> None:
    """Tiny models of every kind of state: the plan's bytes, and those of the regions that hold them."""
    element = BITS[kv_type] / 8
    found: list[tuple[TinyModel, int]] = []
    tiny = tiny_deepseek2_gguf(tmp_path / "v2.gguf", rank=64, rope=32)
    found.append((tiny, formula(ctx, parallel, batch, latent(3, 64, 32, element), 0)))
    tiny = tiny_llama_gguf(tmp_path / "llama.gguf", d=32)
    found.append((tiny, formula(ctx, parallel, batch, 2 * 2 * tiny.shape["K"] * 32 * element, 0)))
    tiny = tiny_gemma3_gguf(tmp_path / "gemma.gguf", window=24)
    row = 2 * tiny.shape["K"] * tiny.shape["d"] * element
    found.append((tiny, formula(ctx, parallel, batch, row, 5 * row, 24)))
    if kv_type != "q8_0":
        tiny = tiny_deepseek4_gguf(tmp_path / "v4.gguf")
        sizes = v4(list(tiny.shape["ratios"]), tiny.shape["d"], tiny.shape["index_size"], element)
        found.append((tiny, formula(ctx, parallel, batch, *sizes)))
    for tiny, expected in found:
        options = {"max_rows": batch, "max_sequences": 1, "kv_type": kv_type}
        with running(tiny.path, device, ctx=ctx, parallel=parallel, **options) as model:
            assert model.loaded.kv_bytes == expected, tiny.arch
            assert sum(region.nbytes for region in model.loaded._regions) == expected, tiny.arch


def test_v3_takes_576_elements_per_token_and_layer(tmp_path: Path) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "v3.gguf", rank=512, rope=64, nope=128, value=128, H=2, tokenizer=False)
    model = open_model(tiny.path)
    for kv_type, row in (("f32", 576 * 4), ("f16", 576 * 2), ("q8_0", 576 // 32 * 34)):
        (kind,) = arch.layer_kinds(arch.plan(model, arch.PlanOptions(ctx=128, kv_type=kv_type)))
        assert kind == (3, (("cache_latent", row, 0),))
