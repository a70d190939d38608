"""Synthesised Hugging Face folders: transformers and the engine agree on them, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import synthesize
import torch
from folders import load
from synthesis import folders
from synthesis.architectures import ARCHITECTURES
from transformers import PreTrainedTokenizerFast

from apu_engine import LLM
from apu_engine.weights.opening import open_model


def write(out: Path, arch: str, *arguments: str) -> Path:
    given = ["--arch", arch, "--format", "safetensors", "--out", str(out), *arguments]
    assert synthesize.main(given) == 0
    return out


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("arch", folders.SUPPORTED)
def test_transformers_agrees(tmp_path: Path, arch: str) -> None:
    folder = write(tmp_path / "model", arch)
    text = "the rain in the town and the sea"
    with LLM(folder, device="cpu", threads=2, ctx=256, precision="exact", kv_type="f32") as llm:
        ids = llm.tokenize(text)
        with torch.no_grad():
            expected = load(folder)(torch.tensor([ids])).logits[0].numpy()
        assert np.abs(expected).max() > 1
        assert np.abs(llm.logits(ids) - expected).max() < 1e-4
        assert llm.detokenize(ids, skip_special=True) == text
        reader = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        assert llm.tokenize(text, add_special=False) == reader.encode(text, add_special_tokens=False)
        assert llm.generate(llm.chat_tokens("the sea"), 4).tokens


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    first = digests(write(tmp_path / "a", "qwen3"))
    assert digests(write(tmp_path / "b", "qwen3")) == first
    other = digests(write(tmp_path / "c", "qwen3", "--seed", "1"))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_model(write(tmp_path / "whole", "qwen3moe", "--layers", "1"))
    monkeypatch.setattr(folders, "SHARD_BYTES", 700_000)
    model = open_model(write(tmp_path / "shards", "qwen3moe", "--layers", "1"))
    assert len(model.files) > 2 and len(whole.files) == 1
    assert model.weight_bytes == whole.weight_bytes and model.tensors.keys() == whole.tensors.keys()
    experts = model.tensors["blk.0.ffn_gate_exps.weight"]
    assert len(experts.pieces) == 8 and len({piece.shard for piece in experts.pieces}) > 1


def test_a_preset_has_its_models_parameters() -> None:
    shape = ARCHITECTURES["qwen3"].presets["8b"]
    table = synthesize.tensors(ARCHITECTURES["qwen3"], shape, synthesize.MIXES["BF16"], 36)
    stored = list(folders.stored("qwen3", table, shape.letters))
    assert sum(tensor.elements for tensor in stored) == 8_190_735_360  # as its model card has it
    assert len(stored) == 399  # as its published index has it
    config = folders.config("qwen3", "qwen3", shape, dict(shape.letters) | {"L": 36}, "BF16")
    published = {"head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    published |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 1_000_000}
    assert published.items() <= config.items()


def test_what_exists_is_replaced_only_where_it_was_written_by_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "model", "llama", "--layers", "1")
    arguments = ["--arch", "llama", "--format", "safetensors", "--out", str(folder)]
    assert synthesize.main(arguments) == 1 and "--force replaces it" in capsys.readouterr().err
    write(folder, "llama", "--layers", "2", "--force")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    (folder / "config.json").write_text("{}")
    assert synthesize.main([*arguments, "--force"]) == 1
    assert "no folder that this script wrote" in capsys.readouterr().err
    assert synthesize.main(["--arch", "llama", "--format", "safetensors", "--type", "Q4_0"]) == 1
    assert "in BF16, F16, F32, found llama in Q4_0" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
