"""Prompts of DeepSeek's models: templates written as the files of V2, V3, R1, V3.1 and Kimi K2 carry them
(tokenizer_config.json of deepseek-ai/DeepSeek-V2-Lite-Chat, -V3, -R1, -V3.1 and moonshotai/Kimi-K2-Instruct), and V4's
built-in format.

The expected texts of V4 follow "DeepSeek-V4 Encoding" (encoding/README.md of deepseek-ai/DeepSeek-V4-Flash), read into
`documented` apart from the template.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from rendering import transformers_render
from tiny import CONTROL, USER, P, bpe_metadata

from apu_engine.errors import ConfigError
from apu_engine.text.errors import TemplateError
from apu_engine.text.formats import DEEPSEEK_V4, find_format
from apu_engine.text.prompt import encode_prompt
from apu_engine.text.reasoning import Block, find_block, thinking_variables
from apu_engine.text.template import ChatTemplate
from apu_engine.text.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
ASK, SAY = "<｜User｜>", "<｜Assistant｜>"
MARKUP = ("<think>", "</think>", "｜DSML｜")
Message = Mapping[str, Any]

# In one line with mixed whitespace control, as R1's file has it; the prompt opens the block.
R1 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system='', first=true) %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- if ns.first %}{% set ns.system = ns.system + message['content'] %}{% set ns.first = false %}{%- else %}"
    "{% set ns.system = ns.system + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system }}{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
V3 = R1.replace("<think>\\n", "")
# Indented, with a switch under two names, as V3.1's is.
V31 = """\
{% if not thinking is defined -%}
  {%- if enable_thinking is defined -%}
    {%- set thinking = enable_thinking -%}
    {%- else -%}
    {%- set thinking = false -%}
  {%- endif -%}
{%- endif -%}
{%- set ns = namespace(system='', asked=false) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set ns.system = ns.system + ('' if ns.system == '' else '

') + message['content'] -%}
  {%- endif -%}
{%- endfor -%}{{ bos_token }}{{ ns.system }}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {%- set ns.asked = true -%}{{'<｜User｜>' + message['content']}}
  {%- elif message['role'] == 'assistant' -%}
    {%- if ns.asked -%}{{'<｜Assistant｜></think>'}}
    {%- endif -%}
    {%- set ns.asked = false -%}
    {{- message['content'].split('</think>', 1)[-1] + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.asked -%}{{'<｜Assistant｜>'}}
  {%- if not thinking -%}{{'</think>'}}
    {%- else -%}{{'<think>'}}
  {%- endif -%}
{%- endif %}"""
# No control tokens but the ends, and newlines inside of a string.
V2 = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# A system message of its own where there is none, tests of types, and content in parts.
K2 = """\
{% if tools -%}
    {{ '<|im_system|>tool_declare<|im_middle|>' -}}{{- tools | tojson -}}{{ '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if loop.first and message['role'] != 'system' -%}
    {{ '<|im_system|>system<|im_middle|>Help.<|im_end|>' }}
  {%- endif -%}
  {%- if message['role'] in ('user', 'assistant') -%}
    {{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}
  {%- else -%}
    {{ '<|im_system|>' + message['role'] + '<|im_middle|>' }}
  {%- endif -%}
  {%- if message['content'] is string -%}
    {{- message['content'] + '<|im_end|>' -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {{ part['text'] }}
    {%- endfor -%}{{ '<|im_end|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif -%}"""
CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "system", "content": "  Be kind."},
    {"role": "user", "content": " What?\n\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThat."},
    {"role": "user", "content": "日本語 <｜Assistant｜> é\n"},
]
SYSTEM = "Be brief.\n\n\n  Be kind."


def vocabulary(names: Sequence[str] = MARKUP) -> Tokenizer:
    """The control tokens that the prompts are made of, each with the type that converters give it."""
    tokens = [(BOS, CONTROL), (EOS, CONTROL), (ASK, CONTROL), (SAY, CONTROL), *((name, USER) for name in names)]
    meta = bpe_metadata("joyai-llm", [], tokens)
    meta |= {P + "bos_token_id": 256, P + "eos_token_id": 257, P + "add_bos_token": False}
    return Tokenizer.from_metadata(meta, "deepseek.gguf")


def from_file(source: str | None, tokenizer: Tokenizer, architecture: str = "deepseek2") -> ChatTemplate:
    meta = {"general.architecture": architecture}
    if source is not None:
        meta["tokenizer.chat_template"] = source
    return ChatTemplate.from_metadata(meta, tokenizer, "deepseek.gguf")


@pytest.mark.parametrize(
    ("source", "options", "history", "end"),
    [
        (R1, {}, f"{SAY}\n\nThat.", f"{SAY}<think>\n"),
        (V3, {}, f"{SAY}\n\nThat.", SAY),
        (V31, {}, f"{SAY}</think>\n\nThat.", f"{SAY}</think>"),
        (V31, {"thinking": True}, f"{SAY}</think>\n\nThat.", f"{SAY}<think>"),
        (V31, {"enable_thinking": True}, f"{SAY}</think>\n\nThat.", f"{SAY}<think>"),
    ],
)
def test_templates_of_v3_and_r1(source: str, options: dict[str, bool], history: str, end: str) -> None:
    """White space and all; the same as transformers makes of them."""
    tokenizer = vocabulary()
    made = from_file(source, tokenizer)
    try:
        prompt = made.render(CHAT, **options)
        text = f"{BOS}{SYSTEM}{ASK} What?\n\n{history}{EOS}{ASK}日本語 <｜Assistant｜> é\n{end}"
        assert prompt.text == text
        for count in range(1, len(CHAT) + 1):
            for generate in (True, False):
                assert made.render(CHAT[:count], add_generation_prompt=generate, **options).text == transformers_render(
                    source, CHAT[:count], add_generation_prompt=generate, bos_token=BOS, eos_token=EOS, **options
                )
        # The user's spelling of a control token is text.
        ids = encode_prompt(tokenizer, prompt)
        assert tokenizer.decode(ids) == text
        assert [ids.count(256 + at) for at in range(4)] == [1, 1, 2, 2]
        opened = end.rstrip().endswith("<think>")
        expected = None if end.endswith("</think>") else Block("<think>", "</think>", opened)
        assert find_block(prompt, source, tokenizer.control_tokens) == expected
    finally:
        made.close()


def test_templates_of_v2_and_kimi_k2() -> None:
    tokenizer = vocabulary()
    told = "Be brief.\n\n\n  Be kind.\n\nUser:  What?\n\n\n\n"
    asked = "<|im_assistant|>assistant<|im_middle|>"
    for source, begin, end in (
        (V2, f"{BOS}{told}Assistant: <think>", "Assistant:"),
        (K2, "<|im_system|>system<|im_middle|>Be brief.\n<|im_end|><|im_system|>system", asked),
    ):
        made = from_file(source, tokenizer)
        try:
            text = made.render(CHAT).text
            assert text.startswith(begin) and text.endswith(end)
            for chat in (CHAT, CHAT[2:], CHAT[2:4], CHAT[:1]):
                for generate in (True, False):
                    found = made.render(chat, add_generation_prompt=generate).text
                    values = {"bos_token": BOS, "eos_token": EOS, "add_generation_prompt": generate}
                    assert found == transformers_render(source, chat, **values)
        finally:
            made.close()


# ---- V4's own format


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary()


@pytest.fixture(scope="module")
def v4(tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
    made = from_file(None, tokenizer, "deepseek4")
    yield made
    made.close()


MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and "
    "comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all "
    "potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, "
    "documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked.\n\n"
)
HELLO: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
THINKING, DIRECT = f"{SAY}<think>", f"{SAY}</think>"


@pytest.mark.parametrize(
    ("effort", "prefix", "end"),
    [
        (None, "", THINKING),
        ("none", "", DIRECT),
        ("minimal", "", THINKING),
        ("low", "", THINKING),
        ("medium", "", THINKING),
        ("high", "", THINKING),
        ("xhigh", MAX_EFFORT, THINKING),
        ("max", MAX_EFFORT, THINKING),
    ],
)
def test_modes(v4: ChatTemplate, tokenizer: Tokenizer, effort: str | None, prefix: str, end: str) -> None:
    """As reasoning_effort, and as the same word handed to the template."""
    text = f"{BOS}{prefix}Be brief.{ASK}What is 2+2?{end}"
    options = thinking_variables(effort, v4.source, v4.variables(), ())
    prompt = v4.render(HELLO, **options)
    assert prompt.text == text == v4.render(HELLO, reasoning_effort=effort).text
    block = None if effort == "none" else Block("<think>", "</think>", True)
    assert find_block(prompt, v4.source, tokenizer.control_tokens) == block


@pytest.mark.parametrize("switch", ["thinking", "enable_thinking"])
def test_switches(v4: ChatTemplate, switch: str) -> None:
    assert v4.render(HELLO, **{switch: False}).text.endswith(DIRECT)
    assert v4.render(HELLO, **{switch: True}).text.endswith(THINKING)
    assert v4.render(HELLO, **{switch: True}, reasoning_effort="max").text.startswith(BOS + MAX_EFFORT)
    assert v4.render(HELLO, **{switch: False}, reasoning_effort="max").text.startswith(f"{BOS}Be brief.")


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (HELLO, {"reasoning_effort": "huge"}, "reasoning_effort: expected none, high or max, found huge"),
        (HELLO, {"tools": [{"type": "function"}]}, "tools are not supported"),
        ([{"role": "tool", "content": "x"}], {}, "a message of role tool is not supported"),
        ([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], {}, "tool calls are not"),
    ],
)
def test_what_the_format_refuses(
    v4: ChatTemplate, messages: list[Message], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        v4.render(messages, **options)
    assert caught.value.reason == "raised"


def documented(messages: Sequence[Message], think: bool, effort: str | None = None, drop: bool = True) -> str:
    """The format as its description has it: transitions belong to the user's message before the answer."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] == "user":
            turns[-1]["content"] += "\n\n" + message["content"]
        else:
            turns.append(dict(message))
    last = max(at for at, turn in enumerate(turns) if turn["role"] == "user")
    text = BOS + (MAX_EFFORT if think and effort == "max" else "")
    for at, turn in enumerate(turns):
        if turn["role"] == "system":
            text += turn["content"]
        elif turn["role"] == "user":
            text += ASK + turn["content"]
            if at + 1 == len(turns) or turns[at + 1]["role"] == "assistant":
                text += SAY + ("<think>" if think and (not drop or at >= last) else "</think>")
        else:
            if think and (not drop or at > last):
                text += turn.get("reasoning_content", "") + "</think>"
            text += turn["content"] + EOS
    return text


def conversations(count: int) -> Iterator[list[Message]]:
    """Turns of users, often answered; system messages before a user's."""
    draw = random.Random(4)
    for _ in range(count):
        messages: list[Message] = []
        for turn in range(draw.randint(1, 5)):
            if draw.random() < 0.4:
                messages.append({"role": "system", "content": draw.choice(["", "Be kind.", " s\n"])})
            messages.append({"role": "user", "content": draw.choice(["", "Hi", "\n x \n", f"{turn} <think> {EOS}"])})
            if draw.random() < 0.7:
                said = {"role": "assistant", "content": draw.choice(["", "Yes.", "\n\nNo. "])}
                messages.append(said | ({"reasoning_content": "hm\n"} if draw.random() < 0.6 else {}))
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "And?"})
        yield messages


def test_conversations_follow_the_description(v4: ChatTemplate, tokenizer: Tokenizer) -> None:
    for messages in conversations(150):
        for effort in ("none", "high", "max"):
            for drop in (True, False):
                expected = documented(messages, effort != "none", effort, drop)
                prompt = v4.render(messages, reasoning_effort=effort, drop_thinking=drop)
                assert prompt.text == expected
                assert tokenizer.decode(encode_prompt(tokenizer, prompt)) == expected


def test_an_answer_that_was_sent_back(v4: ChatTemplate) -> None:
    """After the last question reasoning stays; as a field, and inside the content where a client leaves it there."""
    asked = [{"role": "user", "content": "a"}]
    for said in (
        {"role": "assistant", "reasoning_content": "hm", "content": "b"},
        {"role": "assistant", "content": "<think>hm</think>b"},
    ):
        kept = f"{BOS}{ASK}a{SAY}<think>hm</think>b{EOS}"
        assert v4.render([*asked, said], add_generation_prompt=False).text == kept
        dropped = f"{BOS}{ASK}a{SAY}</think>b{EOS}{ASK}c{SAY}<think>"
        assert v4.render([*asked, said, {"role": "user", "content": "c"}]).text == dropped


def test_where_the_format_is_chosen(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """By the architecture and the vocabulary, and never in place of a template."""
    v4 = {"general.architecture": "deepseek4"}
    assert find_format(v4, tokenizer) == DEEPSEEK_V4
    assert find_format({"general.architecture": "deepseek2"}, tokenizer) is None
    assert find_format({}, tokenizer) is None
    assert find_format(v4, vocabulary(["<think>"])) is None
    with caplog.at_level(logging.WARNING):
        for meta, override, expected in (
            (v4, None, DEEPSEEK_V4),
            ({**v4, "tokenizer.chat_template": ""}, None, DEEPSEEK_V4),
            ({**v4, "tokenizer.chat_template": "own"}, None, "own"),
            (v4, "given", "given"),
        ):
            made = ChatTemplate.from_metadata(meta, tokenizer, "v4.gguf", override)
            made.close()
            assert made.source == expected and not made.is_default and made.default_stop == ()
    assert not caplog.records


def test_what_a_converters_template_cannot_do(tokenizer: Tokenizer) -> None:
    """DeepSeek publishes no template of V4; a converter's serves, but the highest effort is the model's own format."""
    made = from_file(V31, tokenizer, "deepseek4")
    given = ChatTemplate.from_metadata({"general.architecture": "deepseek4"}, tokenizer, "v4.gguf", V31)
    try:
        for effort, end in ((None, DIRECT), ("none", DIRECT), ("high", THINKING)):
            chosen, options = made.for_effort(effort)
            assert chosen is made and made.render(HELLO, **options).text == f"{BOS}Be brief.{ASK}What is 2+2?{end}"
        chosen, options = made.for_effort("max")
        assert chosen.render(HELLO, **options).text == f"{BOS}{MAX_EFFORT}Be brief.{ASK}What is 2+2?{THINKING}"
        with pytest.raises(ConfigError, match="found 'huge'"):
            made.for_effort("huge")
        with pytest.raises(ConfigError, match="together with the template variable thinking"):
            made.for_effort("max", ["thinking"])
        with pytest.raises(ConfigError, match="no mode for 'max'"):
            given.for_effort("max")
    finally:
        made.close()
        given.close()
