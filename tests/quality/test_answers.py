"""Greedy answers of SmolLM2 to questions that it can answer: right, and ended by the model itself.

The questions are such that in float the first token leads by a logit: the bare question for the capital leads by 0.08,
less than the rounding of activations moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from apu_engine import LLM


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, ctx=512, threads=2) as llm:
        yield llm


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France? Answer in one sentence.", "Paris"),
        ("How many days are there in a week?", "7"),
        ("What is 2 + 2?", "4"),
        ("Name the largest ocean on Earth.", "Pacific"),
    ],
)
def test_simple_questions(smollm2: LLM, question: str, word: str) -> None:
    answer = smollm2.chat(question, 32, temperature=0)
    assert word in answer.text
    assert answer.finish_reason == "stop"
    assert answer.text.isprintable()
