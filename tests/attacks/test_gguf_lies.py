"""Well-formed files whose metadata lies, through the whole loader: refused by key, at once, with nothing left open."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apu_engine import LLM, ApuError
from models import tiny_gemma3_gguf, tiny_llama_gguf, tiny_qwen3_gguf

NAN, INF = float("nan"), float("inf")
LLAMA: dict[str, Any] = {
    "llama.block_count": [0, 1, 3, 10**9, "two", None],
    "llama.embedding_length": [0, 63, 2**31, None],
    "llama.attention.head_count": [0, 3, 5, 2**31],
    "llama.attention.head_count_kv": [0, 3, 5],
    "llama.feed_forward_length": [0, 95, 2**32 - 1],
    "llama.context_length": [0, 2**32 - 1],
    "llama.attention.layer_norm_rms_epsilon": [0.0, -1.0, NAN, INF, None],
    "llama.rope.freq_base": [0.0, -1.0, NAN, INF],
    "llama.rope.dimension_count": [0, 7, 1000],
    "llama.vocab_size": [0, 10**9],
    "llama.expert_count": [8],
    "tokenizer.ggml.bos_token_id": [320, 2**31],
    "tokenizer.ggml.eos_token_id": [10**6],
    "tokenizer.ggml.merges": [["a", "b c d"], [1, 2]],
    "tokenizer.ggml.tokens": [["a"], [1, 2, 3]],
    "tokenizer.ggml.token_type": [[1, 2], [NAN, 1.0]],
    "tokenizer.ggml.model": [7],
}
GEMMA: dict[str, Any] = {
    "gemma3.attention.sliding_window": [2**31],
    "gemma3.attention.key_length": [0, 10**6],
    "tokenizer.ggml.scores": [[0.0, 1.0], [NAN] * 512],
}
QWEN: dict[str, Any] = {
    "qwen3moe.block_count": [1, 3],
    "qwen3moe.expert_count": [0, 7, 9, 65536, 2**31, "eight", [8, 8], None],
    "qwen3moe.expert_used_count": [0, 9, 2**31, -1, None],
    "qwen3moe.expert_feed_forward_length": [0, 95, 2**32 - 1, None],
    "qwen3moe.expert_gating_func": [0, 3, 2**31],
    "qwen3moe.expert_weights_scale": [-1.0, NAN, INF],
    "qwen3moe.expert_weights_norm": [1],
    "qwen3moe.expert_shared_count": [1],
}


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(key, value, id=f"{key}={str(value)[:20]}") for key in table for value in table[key]]


def refused(path: Path, key: str) -> None:
    before = path.name in Path("/proc/self/maps").read_text()
    start = time.perf_counter()
    with pytest.raises(ApuError) as caught, LLM(path, device="cpu", threads=1, ctx=128) as llm:
        llm.tokenize("text")  # a file whose tokenizer is unusable loads for token ids; text fails by name
    assert time.perf_counter() - start < 1
    message = str(caught.value)
    names = (key, key.rpartition(".")[2], "tensor", "blk.", "token_embd", "output")
    assert str(path) in message and any(name in message for name in names), message
    assert not before and path.name not in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The time limit is for the refusal, not for the imports."""
    with LLM(tiny_llama_gguf(tmp_path_factory.mktemp("good") / "model.gguf").path, device="cpu", ctx=128) as llm:
        assert np.isfinite(llm.logits(llm.tokenize("text"))).all()


@pytest.mark.parametrize(("key", "value"), cases(LLAMA))
def test_llama(tmp_path: Path, key: str, value: Any) -> None:
    refused(tiny_llama_gguf(tmp_path / "lying-llama.gguf", metadata={key: value}).path, key)


@pytest.mark.parametrize(("key", "value"), cases(GEMMA))
def test_gemma3(tmp_path: Path, key: str, value: Any) -> None:
    refused(tiny_gemma3_gguf(tmp_path / "lying-gemma.gguf", metadata={key: value}).path, key)


@pytest.mark.parametrize(("key", "value"), cases(QWEN))
def test_qwen3moe(tmp_path: Path, key: str, value: Any) -> None:
    refused(tiny_qwen3_gguf(tmp_path / "lying-qwen.gguf", experts=8, metadata={key: value}).path, key)
