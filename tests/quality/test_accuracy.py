"""Accuracy on the real models over a thousand tokens of prose: no worse than llama.cpp's, and exact when asked.

llama.cpp's figures are those of build b11434 (CPU, AVX-512, flash attention, batches of 512), on the same ids and
against the same oracle: its logits of every position were written to a file and compared by
scripts/compare_logits.py --tokens 1024 --peer. docs/benchmarks.md tells how to repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from accuracy import VARIANTS, compare

from apu_engine._native import Device

TOKENS = 1024
LLAMA_CPP = {  # mean KL, rows of TOKENS whose likeliest token is the oracle's
    "smollm2_path": (0.002464, 975),
    "gemma3_path": (0.004409, 972),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fixture", LLAMA_CPP)
def test_logits_are_no_worse_than_llama_cpps(
    fixture: str, request: pytest.FixtureRequest, prose: Callable[[Path, int], list[int]], device: Device
) -> None:
    path: Path = request.getfixturevalue(fixture)
    found = compare(path, prose(path, TOKENS), device, VARIANTS | {"q8_0 cache": {"kv_type": "q8_0"}})
    peer_kl, peer_same = LLAMA_CPP[fixture]
    default, exact = found["default"], found["exact"]
    assert default.mean_kl <= peer_kl
    assert default.same.sum() >= peer_same
    assert found["fine"].mean_kl <= default.mean_kl
    assert exact.mean_kl <= 1e-4
    assert found["q8_0 cache"].mean_kl <= peer_kl  # the peer's is F16
    assert found["q8_0 cache"].same.sum() >= peer_same
    assert exact.same.sum() >= default.same.sum()
