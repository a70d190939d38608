"""The two real vocabularies, and what transformers makes of the same files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.opening import open_model


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(open_model(path).metadata, path.name)


@pytest.fixture(scope="session")
def smollm2_meta(smollm2_path: Path) -> Mapping[str, Any]:
    return open_model(smollm2_path).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load(smollm2_path)


@pytest.fixture(scope="session")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return load(gemma3_path)


def converted(path: Path) -> Backend:
    """What AutoTokenizer.from_pretrained(folder, gguf_file=name) holds, without its second loading of the file."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, tokenizer, _ = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, tokenizer)
    return backend
