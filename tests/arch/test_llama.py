"""Llama against transformers on random float32 weights, and its variants in the file: bias, tied, rope scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from harness import running

from apu_engine._native import Device
from apu_engine.weights.opening import open_model
from models import TinyModel, tiny_llama_gguf, write

TOLERANCE = 1e-4
IDS = np.random.default_rng(7).integers(0, 320, 150).tolist()


def test_agrees_with_transformers(tiny_llama: TinyModel, device: Device) -> None:
    expected = reference.logits(reference.llama(tiny_llama), IDS)
    with running(tiny_llama.path, device) as model:
        found = model.prefill(IDS)
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= TOLERANCE


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_many_rows_equal_single_rows_bit_for_bit(tiny_llama: TinyModel, isa: str) -> None:
    with Device("cpu", threads=2, isa=isa) as device, running(tiny_llama.path, device) as model:
        whole = model.prefill(IDS, chunk=150)
        assert np.array_equal(model.prefill(IDS, chunk=1), whole)
        assert np.array_equal(model.prefill(IDS, chunk=7), whole)


def test_interleaved_sequences_equal_separate_ones(tiny_llama: TinyModel, device: Device) -> None:
    other = IDS[::-1]
    with running(tiny_llama.path, device, parallel=2) as model:
        separate = [model.prefill(IDS), model.prefill(other)]
        together: list[list[Any]] = [[], []]
        for at in range(0, 150, 10):
            rows = 10 if at % 20 else 1  # ragged: one row of the first sequence, ten of the second, and back
            first, second = IDS[at : at + 10], other[at : at + 10]
            out = model.logits([(0, at, first[:rows]), (1, at, second)])
            together[0].append(out[:rows])
            together[1].append(out[rows:])
            if rows < 10:
                together[0].append(model.logits([(0, at + rows, first[rows:])]))
    assert np.array_equal(np.concatenate(together[0]), separate[0])
    assert np.array_equal(np.concatenate(together[1]), separate[1])


def test_threads_do_not_change_a_bit(tiny_llama: TinyModel) -> None:
    found = []
    for threads in (1, 2, 3):
        with Device("cpu", threads=threads) as device, running(tiny_llama.path, device) as model:
            found.append(model.prefill(IDS[:40]))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"bias": True},
        {"d": 24},
        {"H": 6, "K": 1, "D": 96},
        {"K": 4, "rope_base": 500000.0},
        {"tokenizer": False, "layers": 1, "V": 77},
    ],
    ids=lambda options: "-".join(options),
)
def test_variants(tmp_path: Path, device: Device, options: dict[str, Any]) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", **options)
    ids = [token % tiny.shape["V"] for token in IDS[:60]]
    expected = reference.logits(reference.llama(tiny), ids)
    with running(tiny.path, device) as model:
        assert np.abs(model.prefill(ids) - expected).max() <= TOLERANCE


def _llama3_factors(dims: int, base: float, factor: float, low: float, high: float, original: int) -> Any:
    """Per-frequency divisors as the converter writes them into rope_freqs.weight."""
    inverse = base ** (-np.arange(0, dims, 2) / dims)
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    mixed = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, mixed))
    return factors.astype(np.float32)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rope_scaling(tmp_path: Path, device: Device, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    metadata: dict[str, Any] = {}
    factors = None
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        factors = _llama3_factors(32, 10000.0, 4.0, 1.0, 4.0, 64)
    else:
        metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
        metadata["llama.rope.scaling.original_context_length"] = 128
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", d=32, rope_factors=factors, metadata=metadata)
    expected = reference.logits(reference.llama(tiny, rope=rope), IDS)
    plain = reference.logits(reference.llama(tiny), IDS)
    assert np.abs(expected - plain).max() > 0.01
    with running(tiny.path, device) as model:
        assert np.abs(model.prefill(IDS) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_exact_precision_equals_dequantised_floats(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_llama_gguf(tmp_path / "model.gguf", quant=quant)
    expected = reference.logits(reference.llama(tiny, tiny.dequantized()), IDS)
    with running(tiny.path, device, precision="exact", kv_type="f32") as model:
        exact = model.prefill(IDS)
    assert np.abs(exact - expected).max() <= TOLERANCE
    with running(tiny.path, device) as model:
        default = model.prefill(IDS)
        assert np.array_equal(model.prefill(IDS, chunk=1), default)
    assert np.abs(default - expected).max() <= 0.3  # int8 activations and f16 cache


@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_1"])
def test_shards_and_odd_addresses_change_nothing(tmp_path: Path, device: Device, quant: str) -> None:
    tiny = tiny_llama_gguf(tmp_path / "plain.gguf", quant=quant)
    with running(tiny.path, device) as model:
        expected = model.prefill(IDS[:40])
    tiny.path = tmp_path / "odd.gguf"
    tiny.metadata["general.name"] = "x" * (1 + _header_bytes(write(tiny, quant, alignment=1).path) % 2)
    write(tiny, quant, alignment=1)
    refs = open_model(tiny.path).tensors.values()
    assert any(ref.offset % 2 for ref in refs)
    with running(tiny.path, device) as model:
        assert np.array_equal(model.prefill(IDS[:40]), expected)
    tiny.path = tmp_path / "shards.gguf"
    with running(write(tiny, quant, shard_tensors=5).path, device) as model:
        assert np.array_equal(model.prefill(IDS[:40]), expected)


def _header_bytes(path: Path) -> int:
    return min(ref.offset for ref in open_model(path).tensors.values())
