"""The plain English that accuracy is measured on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.opening import open_model

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"


@pytest.fixture(scope="session")
def prose() -> Callable[[Path, int], list[int]]:
    """The first `count` tokens of the text for the model at `path`, after its BOS where it wants one."""

    def ids(path: Path, count: int) -> list[int]:
        tokens = Tokenizer.from_metadata(open_model(path).metadata, str(path)).encode(PROSE.read_text("utf-8"))
        assert len(tokens) >= count, f"{PROSE.name} has {len(tokens)} tokens"
        return tokens[:count]

    return ids
