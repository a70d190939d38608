"""Reasoning in the Python API and on the terminal: efforts, the text kept apart, and what a conversation keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apu_engine import LLM, ConfigError
from apu_engine.cli.chat import Session
from apu_engine.config import EngineConfig
from apu_engine.engine.job import Done, Job, SamplingParams, Timings, TokenEvent
from apu_engine.engine.llm import Completion, Generation
from apu_engine.engine.load import Runtime
from apu_engine.text.reasoning import Block, ReasoningSplit
from apu_engine.text.stream import TextStream
from models import TinyModel

SWITCH = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n\n</think>\n' }}{% endif %}"
)
TIMINGS = Timings(0.0, 0.0, 0.0, 1, 0, 1, 0.0)


@pytest.fixture(scope="module")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "switch.jinja"
    path.write_text(SWITCH)
    return path


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyModel, template_file: Path) -> Iterator[LLM]:
    with LLM(tiny_llama.path, threads=2, ctx=256, batch=32, chat_template=template_file) as llm:
        yield llm


def test_a_block_that_never_ends_is_all_reasoning(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    thought = llm.chat("hello", 8, **options)
    assert thought.text == "" and thought.reasoning and thought.reasoning_tokens == 8
    assert thought.reasoning == llm.detokenize(thought.tokens, skip_special=True).strip()
    parts = list(llm.stream_chat("hello", 8, reasoning_effort="high", **options).parts())
    assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == (thought.reasoning, "")
    assert list(llm.stream_chat("hello", 8, **options)) == []


def test_efforts_choose_the_prompt(llm: LLM) -> None:
    assert llm.chat_prompt("hello").block == Block("<think>", "</think>", True)
    off = llm.chat_prompt("hello", "none")
    assert off.block is None and off.tokens == llm.chat_tokens("hello", enable_thinking=False)
    assert off == llm.chat_prompt("hello", template_options={"enable_thinking": False})
    assert llm.chat_tokens("hello", reasoning_effort="high") == llm.chat_tokens("hello")
    answer = llm.chat("hello", 8, reasoning_effort="none", temperature=0, ignore_eos=True)
    assert answer.reasoning == "" and answer.reasoning_tokens == 0
    assert answer.text == llm.detokenize(answer.tokens, skip_special=True)


def test_what_cannot_be_asked_for(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no mode for 'max'"):
        llm.chat("hello", reasoning_effort="max")
    with pytest.raises(ConfigError, match="found 'huge'"):
        llm.chat("hello", reasoning_effort="huge")
    with pytest.raises(ConfigError, match="together with the template variable enable_thinking"):
        llm.chat("hello", reasoning_effort="none", template_options={"enable_thinking": True})
    with pytest.raises(ConfigError, match=r"template_options\.thinking: .*no such variable; it has .*enable_thinking"):
        llm.chat("hello", template_options={"thinking": True})


def test_the_option_is_the_default(tiny_llama: TinyModel, template_file: Path) -> None:
    with LLM(tiny_llama.path, threads=1, ctx=64, chat_template=template_file, reasoning_effort="none") as llm:
        off, on = llm.chat_prompt("hello"), llm.chat_prompt("hello", "high")
        assert off.block is None and on.block is not None
        assert llm.chat_prompt("hello", template_options={"enable_thinking": True}) == on
    with pytest.raises(ConfigError, match="reasoning_effort"):
        LLM(tiny_llama.path, reasoning_effort="huge")


def test_an_option_that_no_chat_could_have_ends_loading(tiny_llama: TinyModel, template_file: Path) -> None:
    config = EngineConfig(
        model=str(tiny_llama.path), ctx=64, chat_template=str(template_file), reasoning_effort="max", threads=1
    )
    with pytest.raises(ConfigError, match=r"reasoning_effort: .*no mode for 'max'"):
        LLM.from_config(config, for_chat=True)
    with LLM.from_config(config) as llm:  # on token ids it runs
        assert llm.generate([5], 2, ignore_eos=True).tokens


# ---- an answer that ends its block, from an engine that says what it is told to


class Engine:
    def __init__(self, said: bytes, reason: str = "stop") -> None:
        self.said, self.reason = said, reason

    def submit(self, job: Job) -> None:
        for byte in self.said:
            job.on_event(job, TokenEvent(byte))
        job.on_event(job, Done(self.reason, TIMINGS, 1))  # type: ignore[arg-type]

    def cancel(self, job: Job) -> None:
        pass


class Tokenizer:
    special_ids: frozenset[int] = frozenset()
    control_tokens: dict[str, int] = {}  # noqa: RUF012
    add_space_prefix = False

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def generation(said: bytes, stop: tuple[str, ...] = ()) -> Generation:
    split = ReasoningSplit(Block("<think>", "</think>", True))
    text = TextStream(Tokenizer(), stop, split=split)  # type: ignore[arg-type]
    job = Job(prompt=[1], params=SamplingParams(), max_tokens=100, stop_ids=frozenset())
    return Generation(SimpleNamespace(engine=Engine(said)), job, text)  # type: ignore[arg-type]


def test_reasoning_is_not_part_of_the_text() -> None:
    made = generation("\nhm é\n</think>\n\nJa, é.".encode())
    assert "".join(made) == "Ja, é."
    assert (made.result.text, made.result.reasoning) == ("Ja, é.", "hm é")
    assert made.result.reasoning_tokens == len("\nhm é\n</think>".encode())
    assert generation(b"a, b</think>c, d", (", ",)).result.text == "c"


class Listener:
    """As much of LLM as a terminal session uses."""

    config = SimpleNamespace(max_tokens=0)

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)
        self.heard: list[list[dict[str, str]]] = []

    def stream_chat(self, messages: list[dict[str, str]]) -> Generation:
        self.heard.append(list(messages))
        return generation(self.said.pop(0))


def test_a_terminal_shows_reasoning_apart(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Listener(b"hm\nhm</think>\nYes.", b"</think>No.", b"endless")
    session = Session(llm)  # type: ignore[arg-type]
    for text in ("a", "b", "c"):
        session.turn(text)
    out, err = capsys.readouterr()
    assert out == "Yes.\nNo.\n\n"
    assert err == "(thinking) hm\nhm\n(thinking) endless\n"
    assert llm.heard[-1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "hm\nhm"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "c"},
    ]


def test_a_completion_without_reasoning_says_so() -> None:
    plain = Completion("x", [1], "stop", TIMINGS, 1)
    assert (plain.reasoning, plain.reasoning_tokens) == ("", 0)


def test_a_built_in_format_counts_as_a_template() -> None:
    names = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")  # noqa: RUF001
    tokenizer = SimpleNamespace(bos_id=0, eos_id=1, control_tokens=dict.fromkeys(names, 5))

    def has(architecture: str, tokenizer: Any, override: str | None = None, **meta: str) -> bool:
        model = SimpleNamespace(metadata={"general.architecture": architecture, **meta})
        runtime: Any = SimpleNamespace(template_override=override, model=model, tokenizer=tokenizer)
        return bool(Runtime.has_template.fget(runtime))  # type: ignore[attr-defined]

    assert has("deepseek4", tokenizer) and not has("deepseek4", None) and not has("llama", tokenizer)
    assert has("llama", None, "given") and has("llama", tokenizer, **{"tokenizer.chat_template": "own"})
