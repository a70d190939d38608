"""Hugging Face folders on device hip: tensors in pieces from several files, odd addresses and tensors that are made, by
every strategy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders import save, tiny
from hip_double import HipDouble

from apu_engine import LLM
from apu_engine.memory import strategies
from apu_engine.memory.placement import PAGE

PROMPT = [1, 5, 9, 13, 200, 7]
KINDS = ["llama", "qwen3_moe", "gemma3", "deepseek_v3"]
TOKENS = 24


@pytest.fixture(autouse=True)
def kernels(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))


def answer(folder: Path, tokens: int, **options: str) -> list[int]:
    with LLM(folder, ctx=256, **options) as llm:  # type: ignore[arg-type]
        return llm.generate(PROMPT, tokens, temperature=0, ignore_eos=True).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """F32, so that the CPU decodes the same ones."""
    folder = save(tiny(kind), tmp_path / kind, max_shard_size="60KB")
    expected = answer(folder, TOKENS, device="cpu")
    assert answer(folder, TOKENS, device="hip", memory="staged") == expected


def test_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few pages, by every strategy: tensors are cut, and pages of several parts lie in several mappings."""
    folder = save(tiny("qwen3_moe"), tmp_path / "folder", max_shard_size="60KB")
    expected = answer(folder, 3, device="cpu")
    limit = 10 * PAGE
    monkeypatch.setattr(strategies, "STAGED_BYTES", limit)
    monkeypatch.setattr(strategies.registered, "__defaults__", (limit,))
    for memory in ("staged", "registered", "auto"):
        assert answer(folder, 3, device="hip", memory=memory) == expected


def test_sixteen_bits_and_made_tensors(tmp_path: Path) -> None:
    folder = save(tiny("gemma3"), tmp_path / "model", torch.bfloat16)
    with LLM(folder, device="cpu", ctx=256, precision="exact", kv_type="f32") as llm:
        expected = llm.generate(PROMPT, 3, temperature=0, ignore_eos=True).tokens
    with LLM(folder, device="hip", ctx=256, precision="exact", kv_type="f32", memory="staged") as llm:
        assert llm.generate(PROMPT, 3, temperature=0, ignore_eos=True).tokens == expected
        assert llm.memory["made"] == 4 * (6 * (4 * 64 + 2 * 32) + 64)
