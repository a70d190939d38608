"""Prompt formats of models whose files may come without a chat template, written as templates.

A format is chosen by the file's architecture and only where the vocabulary has its control tokens; a template in the
file, or one that is given, always wins. Thinking is on unless asked otherwise, as in DeepSeek's own API, and so are the
names for how much: https://api-docs.deepseek.com/guides/thinking_mode
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apu_engine.text.tokenizer import Tokenizer

# What DeepSeek V4 is told for the highest effort, in front of everything else.
_MAX_EFFORT = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

# DeepSeek V4, as "DeepSeek-V4 Encoding" (encoding/README.md of deepseek-ai/DeepSeek-V4-Flash) states it: neighbouring
# messages of users are one turn; reasoning stays only after the last of them, unless drop_thinking is false. Beyond
# that text, an answer is always opened where add_generation_prompt asks for one.
DEEPSEEK_V4 = (
    r"""
{%- set effort = reasoning_effort | default(none) -%}
{%- if effort not in [none, 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] -%}
  {{- raise_exception('reasoning_effort: expected none, high or max, found ' ~ effort) -}}
{%- endif -%}
{%- set think = effort != 'none' -%}
{%- if thinking is defined and thinking is not none -%}
  {%- set think = thinking -%}
{%- elif enable_thinking is defined and enable_thinking is not none -%}
  {%- set think = enable_thinking -%}
{%- endif -%}
{%- set keep = drop_thinking is defined and not drop_thinking -%}
{%- if tools -%}
  {{- raise_exception('tools are not supported by the built-in prompt format') -}}
{%- endif -%}
{{- bos_token -}}
{%- if think and effort in ['xhigh', 'max'] -%}
  {{- """
    + repr(_MAX_EFFORT)
    + r""" -}}
{%- endif -%}
{%- set last = namespace(user=-1, role='') -%}
{%- for message in messages if message.role == 'user' -%}
  {%- set last.user = loop.index0 -%}
{%- endfor -%}
{%- set turns = namespace(users=-1) -%}
{%- for message in messages -%}
  {%- set content = message.content | default('', true) -%}
  {%- if message.tool_calls -%}
    {{- raise_exception('tool calls are not supported by the built-in prompt format') -}}
  {%- endif -%}
  {%- if message.role in ['system', 'developer'] -%}
    {{- content -}}
  {%- elif message.role == 'user' -%}
    {%- set turns.users = turns.users + 1 -%}
    {{- ('\n\n' if last.role == 'user' else '<｜User｜>') + content -}}
  {%- elif message.role == 'assistant' -%}
    {%- set reasoning = message.reasoning_content | default('', true) -%}
    {%- if '</think>' in content -%}
      {%- set reasoning = reasoning or content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<｜Assistant｜>' -}}
    {%- if think and (keep or turns.users == last.user) -%}
      {{- '<think>' + reasoning -}}
    {%- endif -%}
    {{- '</think>' + content + eos_token -}}
  {%- else -%}
    {{- raise_exception('a message of role ' ~ message.role ~ ' is not supported by the built-in prompt format') -}}
  {%- endif -%}
  {%- set last.role = message.role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<｜Assistant｜>' + ('<think>' if think else '</think>') -}}
{%- endif -%}
"""  # noqa: RUF001
)

# architecture -> (the format, control tokens that it is made of)
_FORMATS = {
    "deepseek4": (DEEPSEEK_V4, ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")),  # noqa: RUF001
}

ARCHITECTURES = frozenset(_FORMATS)


def find_format(meta: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """The prompt format, as a chat template, that goes with a file's architecture and vocabulary; None if there is
    none.
    """
    source, needed = _FORMATS.get(str(meta.get("general.architecture")), ("", ()))
    has_ends = tokenizer.bos_id is not None and tokenizer.eos_id is not None
    return source if needed and has_ends and tokenizer.control_tokens.keys() >= set(needed) else None
