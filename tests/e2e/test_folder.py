"""A Hugging Face folder wherever a model may be named: Python, serve, chat, show, plan, footprint and bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folders import add_tokenizer, save, tiny
from test_serve import serve

from apu_engine import LLM
from apu_engine.cli import main

CHAT = [{"role": "user", "content": "the <|im_end|>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 in BF16 and shards: its norms are made, and more ids have logits than tokens."""
    return add_tokenizer(
        save(tiny("gemma3"), tmp_path_factory.mktemp("models") / "Tiny-Gemma", torch.bfloat16, max_shard_size="60KB")
    )


def test_text(folder: Path) -> None:
    with LLM(folder, device="cpu", threads=2, ctx=256) as llm:
        ids = llm.chat_tokens(CHAT)
        assert llm.detokenize(ids) == "<|im_start|>user\nthe <|im_end|><|im_end|>\n<|im_start|>assistant\n"
        assert ids.count(261) == 1 and llm.stop_ids == {259, 261}
        assert (llm.sampling.temperature, llm.sampling.top_k) == (0.25, 7)
        assert len(llm.generate(ids, 40, ignore_eos=True, temperature=1.0).tokens) == 40  # ids without a token too
        assert llm.tokenizer.vocab_size == llm.vocabulary == 320
        assert llm.tokenizer.token(319) == "[PAD319]"


def test_weights_are_the_files_and_what_is_made_is_told(folder: Path) -> None:
    with LLM(folder, device="cpu", threads=2, ctx=256) as llm:
        llm.generate([1, 2, 3], 4, ignore_eos=True)
        assert llm.memory["copied"] == 0
        assert llm.memory["made"] == 4 * (6 * (4 * 64 + 2 * 32) + 64)
        now = llm.footprint()
        assert len(now.files) == len(list(folder.glob("*.safetensors"))) > 5
        assert all(item.anonymous == 0 for item in now.files)
        assert "copied 0, anonymous 0, vectors 7.8 KiB; ctx 256" in llm.summary()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], ["gemma3, 6 layers of width 64", "BF16", "chat template yes"]),
        (["plan"], ["attn_q (128 64) BF16", "window 24"]),
        (["footprint", "--threads", "2"], ["model-00002-of-", "made 7.8 KiB"]),
        (["bench", "-p", "16", "-n", "4", "--threads", "2"], ["gemma3 BF16", "tg4"]),
        (["chat", "--prompt", "the", "--max-tokens", "3", "--threads", "2", "--seed", "1"], []),
    ],
    ids=lambda value: value[0] if value else "none",
)
def test_verbs(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    device = [] if arguments[0] in ("show", "plan") else ["--device", "cpu"]
    assert main([*arguments, "-m", str(folder), *device]) == 0
    out = capsys.readouterr().out
    for word in words:
        assert word in out


def test_show_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "-m", str(folder / "model.safetensors.index.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    assert found["architecture"] == "gemma3" and found["layers"] == 6 and found["chat_template"] is True


def test_serve(folder: Path, tmp_path: Path) -> None:
    with serve(folder, tmp_path / "log", "--ctx", "256") as server:
        assert [card.id for card in server.client.models.list()] == ["Tiny-Gemma"]
        answer = server.ask(messages=CHAT, max_tokens=5, temperature=1.0, seed=3)
        assert answer.usage.prompt_tokens == 31 and answer.usage.completion_tokens <= 5
        assert server.health()[1]["memory"]["made"] > 0
        assert server.end() == 0
