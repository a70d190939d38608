"""Reasoning told apart from the answer, however its tags are cut; and what templates are told about thinking."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONTROL, USER, bpe_metadata

from apu_engine.errors import ConfigError
from apu_engine.text.prompt import Prompt
from apu_engine.text.reasoning import EFFORTS, HARMONY, Block, ReasoningSplit, find_block, thinking_variables
from apu_engine.text.stream import TextStream
from apu_engine.text.template import ChatTemplate
from apu_engine.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
CLOSED, OPENED = Block(OPEN, CLOSE, False), Block(OPEN, CLOSE, True)
# The tags as tokens of their own, of the kinds that vocabularies give them.
VOCABULARIES = {
    kind: Tokenizer.from_metadata(
        bpe_metadata("qwen2", [("t", "h"), ("<", "/")], [(OPEN, kind), (CLOSE, kind), ("<|im_end|>", CONTROL)]),
        "t.gguf",
    )
    for kind in (USER, CONTROL)
}


def whole(text: str, block: Block) -> tuple[str, str]:
    """The rule, for a finished text."""
    bare = text.lstrip()
    if bare.startswith(OPEN):
        text = bare[len(OPEN) :]
    elif not block.opened:
        return "", text
    reasoning, end, content = text.partition(CLOSE)
    return reasoning.strip(), content.lstrip() if end else ""


def run(pieces: list[str], block: Block) -> tuple[str, str, list[tuple[str, str]]]:
    split = ReasoningSplit(block)
    parts = [split.feed(piece) for piece in pieces]
    parts.append(split.flush())
    return "".join(a for a, _ in parts), "".join(b for _, b in parts), parts


texts = st.lists(
    st.sampled_from([OPEN, CLOSE, "<", "</", "thi", "nk>", "</thin", "k>", " ", "\n", "\n\n", "a", "b c", "é", ">"]),
    max_size=12,
).map("".join)


@given(texts, st.sampled_from([CLOSED, OPENED]), st.randoms(use_true_random=False))
def test_any_cut_gives_what_the_whole_text_gives(text: str, block: Block, random: Any) -> None:
    pieces, rest = [], text
    while rest:
        at = random.randint(1, min(4, len(rest)))
        pieces.append(rest[:at])
        rest = rest[at:]
    reasoning, content, parts = run(pieces, block)
    assert (reasoning, content) == whole(text, block)
    first = next((at for at, part in enumerate(parts) if part[1]), len(parts))
    assert not any(part[0] for part in parts[first + 1 :])  # reasoning comes before content


@pytest.mark.parametrize(
    ("text", "block", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.", CLOSED, "hm", "Yes."),
        ("\n<think>hm</think>Yes. <think>not this</think>", CLOSED, "hm", "Yes. <think>not this</think>"),
        ("\nhm\n\nhm</think>\n\nYes.\n", OPENED, "hm\n\nhm", "Yes.\n"),
        ("<think>\nhm</think>Yes.", OPENED, "hm", "Yes."),  # the tag twice, as some distillations write it
        ("</think>Yes.", OPENED, "", "Yes."),
        ("<think>\n\n</think>\n\nYes.", CLOSED, "", "Yes."),
        ("hm, a long thought", OPENED, "hm, a long thought", ""),  # the end never comes
        ("hm </thin", OPENED, "hm </thin", ""),
        ("hm \n", OPENED, "hm", ""),
        ("<thi", CLOSED, "", "<thi"),
        ("  Yes <think>", CLOSED, "", "  Yes <think>"),
        ("Yes</think>", CLOSED, "", "Yes</think>"),
        ("  \n", CLOSED, "", "  \n"),
        ("", OPENED, "", ""),
    ],
)
def test_reasoning_and_content(text: str, block: Block, reasoning: str, content: str) -> None:
    assert run([text], block)[:2] == run(list(text), block)[:2] == (reasoning, content)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}hm<|end|><|start|>assistant{FINAL}Yes.", "hm", "Yes."),
        (f"{FINAL}Yes.", "", "Yes."),
        ("<|channel|>commentary<|message|>I will look.", "", "I will look."),
        (f"{ANALYSIS}hm", "hm", ""),
        ("Yes.", "", "Yes."),
    ],
)
def test_channels_of_gpt_oss(text: str, reasoning: str, content: str) -> None:
    assert run([text], HARMONY)[:2] == run(list(text), HARMONY)[:2] == (reasoning, content)
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    tokenizer = Tokenizer.from_metadata(bpe_metadata("gpt-4o", [], [(token, CONTROL) for token in special]), "t.gguf")
    assert find_block(Prompt("<|start|>assistant", ()), "", tokenizer.control_tokens) == HARMONY
    made = TextStream(tokenizer, split=ReasoningSplit(HARMONY))
    found = [(made.push(token), made.reasoning) for token in tokenizer.encode(text + "<|return|>", parse_special=True)]
    found.append((made.flush(), made.reasoning))
    assert ("".join(b for _, b in found), "".join(a for a, _ in found)) == (reasoning, content)


def test_nothing_waits_longer_than_it_must() -> None:
    split = ReasoningSplit(OPENED)
    shown = [split.feed(piece) for piece in ("\n", "hm", " ok", " <", "b", " </thi", "nk>", "\n", "Yes", " <thi")]
    reasoning = ["", "hm", " ok", "", " <b", "", "", "", "", ""]
    assert shown == list(zip(reasoning, [*[""] * 8, "Yes", " <thi"], strict=True))


def stream(kind: int, stop: list[str], block: Block | None, ids: list[int]) -> tuple[str, str, TextStream]:
    made = TextStream(VOCABULARIES[kind], stop, split=None if block is None else ReasoningSplit(block))
    text = reasoning = ""
    for token_id in ids:
        text += made.push(token_id)
        reasoning += made.reasoning
    text += made.flush()
    return reasoning + made.reasoning, text, made


@pytest.mark.parametrize("kind", [USER, CONTROL])
@pytest.mark.parametrize("as_tokens", [True, False])
def test_streams_of_tokens(kind: int, as_tokens: bool) -> None:
    """Tags are seen as one token, also as a control token, and as ordinary text cut over several."""
    tokenizer = VOCABULARIES[kind]
    ids = tokenizer.encode("<think>é 1\n</think>\n\nJa, é.", parse_special=as_tokens)
    reasoning, text, made = stream(kind, [], CLOSED, ids)
    assert (reasoning, text) == ("é 1", "Ja, é.")
    assert made.reasoning_tokens == len(tokenizer.encode("<think>é 1\n</think>", parse_special=as_tokens))
    reasoning, text, made = stream(kind, [], OPENED, ids[1:] if as_tokens else ids)
    assert (reasoning, text) == ("é 1", "Ja, é.")


def test_counts_of_reasoning_tokens() -> None:
    tokenizer = VOCABULARIES[USER]
    no_block = tokenizer.encode("Yes </think>", parse_special=True)
    assert stream(USER, [], CLOSED, no_block)[2].reasoning_tokens == 0
    assert stream(USER, [], None, no_block)[2].reasoning_tokens == 0
    endless = tokenizer.encode("hm hm")
    assert stream(USER, [], OPENED, endless)[2].reasoning_tokens == len(endless)
    assert stream(USER, [], OPENED, tokenizer.encode("</think>Yes", parse_special=True))[2].reasoning_tokens == 1


def test_stop_strings_end_the_answer_not_the_reasoning() -> None:
    ids = VOCABULARIES[USER].encode("a STOP b</think>c STOP d", parse_special=True)
    reasoning, text, made = stream(USER, [" STOP"], OPENED, ids)
    assert (reasoning, text, made.finished, made.matched) == ("a STOP b", "c", "stop", " STOP")
    assert stream(USER, [CLOSE], OPENED, ids)[1] == "c STOP d"


def test_half_a_character_at_the_end_of_reasoning() -> None:
    ids = VOCABULARIES[USER].encode("hm é")[:-1]
    assert stream(USER, [], OPENED, ids)[:2] == ("hm \ufffd", "")


# ---- the block that a prompt ends in


def block_of(source: str, names: list[str], said: str = "x", **variables: Any) -> Block | None:
    tokens = [(name, USER) for name in names]
    tokenizer = Tokenizer.from_metadata(bpe_metadata("qwen2", [], tokens), "t.gguf")
    made = ChatTemplate(source, control_tokens=tokenizer.control_tokens)
    try:
        prompt = made.render([{"role": "user", "content": said}], **variables)
        return find_block(prompt, source, tokenizer.control_tokens)
    finally:
        made.close()


QWEN3 = (
    "{{ messages[0].content }}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


def test_blocks_of_prompts() -> None:
    names = [OPEN, CLOSE]
    assert block_of(QWEN3, names) == CLOSED
    assert block_of(QWEN3, names, enable_thinking=False) is None
    assert block_of(QWEN3, []) == CLOSED  # the template knows the tags
    assert block_of("{{ messages[0].content }}<think>\n", names) == OPENED
    assert block_of("{{ messages[0].content }}</think>", names) is None
    assert block_of("{{ messages[0].content }}", names) == CLOSED
    assert block_of("{{ messages[0].content }}", []) is None
    assert block_of("[THINK]", ["[THINK]", "[/THINK]"]) == Block("[THINK]", "[/THINK]", True)
    assert block_of("<seed:think>", []) == Block("<seed:think>", "</seed:think>", True)
    assert find_block(Prompt("User: x\nAssistant:"), "", ()) is None


def test_tags_that_users_write_open_nothing() -> None:
    names = [OPEN, CLOSE]
    assert block_of("{{ messages[0].content }}", names, "a<think>") == CLOSED
    assert block_of("{{ messages[0].content }}", names, "a</think>") == CLOSED


# ---- what templates are told

SWITCH = "{% if enable_thinking %}{% endif %}"
BOTH = "{% if not thinking is defined %}{% set thinking = enable_thinking %}{% endif %}{{ thinking }}"
LEVELS = "Reasoning: {{ reasoning_effort | default('medium') }}"
ALL = "{% if enable_thinking and reasoning_effort in ['max', 'none'] %}{% endif %}"


def variables(source: str, effort: str | None, *given: str) -> dict[str, Any]:
    made = ChatTemplate(source)
    try:
        return thinking_variables(effort, source, made.variables(), given)
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        (SWITCH, None, {}),
        (SWITCH, "none", {"enable_thinking": False}),
        (SWITCH, "low", {"enable_thinking": True}),
        (SWITCH, "high", {"enable_thinking": True}),
        (BOTH, "none", {"enable_thinking": False, "thinking": False}),
        (LEVELS, "low", {"reasoning_effort": "low"}),
        (ALL, "none", {"enable_thinking": False}),
        (ALL, "max", {"enable_thinking": True, "reasoning_effort": "max"}),
    ],
)
def test_efforts(source: str, effort: str | None, expected: dict[str, Any]) -> None:
    assert variables(source, effort) == expected


@pytest.mark.parametrize(
    ("source", "effort", "given", "words"),
    [
        (SWITCH, "max", (), "no mode for 'max'; expected one of none, minimal, low, medium, high$"),
        (LEVELS, "none", (), "expected one of low, medium, high$"),
        (LEVELS, "max", (), "expected one of low, medium, high$"),
        (ALL, "xhigh", (), "expected one of none, low, medium, high, max$"),
        ("{{ messages }}", "none", (), "no thinking modes"),
        ("{{ messages }}", "high", (), "no thinking modes"),
        (SWITCH, "loud", (), "expected one of none, .*found 'loud'"),
        (SWITCH, "low", ("enable_thinking",), "together with the template variable enable_thinking"),
        (LEVELS, "low", ("reasoning_effort",), "together with the template variable reasoning_effort"),
    ],
)
def test_efforts_that_a_template_cannot_do(source: str, effort: str, given: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^reasoning_effort: .*{words}") as caught:
        variables(source, effort, *given)
    assert caught.value.option == "reasoning_effort"


def test_variables_that_a_template_looks_up() -> None:
    made = ChatTemplate(
        "{% set mine = 1 %}{% for m in messages %}{{ m.thinking }}{{ mine }}{% endfor %}{{ namespace(a=1).a }}"
        "{% if enable_thinking is defined %}'reasoning_effort'{% endif %}{{ raise_exception if bos_token else '' }}"
    )
    try:
        assert made.variables() == {"messages", "enable_thinking", "bos_token"}
        made.close()
        assert made.variables() == {"messages", "enable_thinking", "bos_token"}
    finally:
        made.close()


def test_the_list_of_efforts_is_the_option() -> None:
    from apu_engine.config import EngineConfig

    for effort in EFFORTS:
        assert EngineConfig.resolve({"reasoning_effort": effort}).reasoning_effort == effort
