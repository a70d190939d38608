"""Reasoning: how much of it a request asks for, and where it ends and the answer begins.

Models that think write `<think>...</think>` before the answer, or similar tags. Often the template writes the first
tag, so that the answer starts inside the block; where thinking is off, it writes both. `find_block` reads that off the
rendered prompt; `ReasoningSplit` cuts the generated text, wherever its tokens cut the tags. How a template is told to
think differs too: `thinking_variables` turns `reasoning_effort` into the variables that this template reads.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from apu_engine.errors import ConfigError

if TYPE_CHECKING:  # the server's schema takes names from here, and starts without numpy
    from apu_engine.text.prompt import Prompt

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
# On and off, as templates name it: Qwen3 and GLM; DeepSeek V3.1 and Granite.
SWITCHES = ("enable_thinking", "thinking")
_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)


class Block(NamedTuple):
    """The tags around a model's reasoning, and whether the prompt has written the first one; `instead`: what an answer
    may begin with in place of a block, which is no part of its content.
    """

    open: str
    close: str
    opened: bool
    instead: tuple[str, ...] = ()


# gpt-oss's format, harmony: messages in channels, of which "analysis" is the reasoning and "final" the answer. Source:
# https://cookbook.openai.com/articles/openai-harmony
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
HARMONY = Block(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    False,
    ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
)


def find_block(prompt: Prompt, template: str, control_tokens: Collection[str]) -> Block | None:
    """The block that an answer to `prompt` may begin with.

    None where the prompt ends with a finished block, and for models that know no such tags: those that neither the
    template's source nor the vocabulary has. What users wrote is not mistaken for a tag of the template.
    """
    end = prompt.marked.rstrip()
    for first, last in _TAGS:
        if end.endswith(first):
            return Block(first, last, True)
        if end.endswith(last):
            return None
    if all(token in control_tokens for token in _HARMONY):
        return HARMONY
    for first, last in _TAGS:
        if first in control_tokens or last in control_tokens or last in template:
            return Block(first, last, False)
    return None


class ReasoningSplit:
    """Cuts one answer into reasoning and content; both come out without the white space around the tags.

    Only a block at the answer's start counts. Where its end never comes, everything is reasoning.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        # "start": a tag may follow; "opened": the prompt has it, but some models write it once more.
        self._state: Literal["start", "opened", "inside", "gap", "content"] = "opened" if block.opened else "start"
        self._fresh = True  # nothing of the reasoning came out yet
        self._held = ""  # white space and beginnings of tags
        self.began = block.opened  # whether there is, or was, a block

    @property
    def open(self) -> bool:
        """Whether the block, or the beginning that may become one, has not ended."""
        return self._state in ("start", "opened", "inside")

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that more text makes certain."""
        self._held += text
        reasoning = content = ""
        if self._state in ("start", "opened"):
            bare, first = self._held.lstrip(), self.block.open
            if bare.startswith(first):
                self._state, self._held, self.began = "inside", bare[len(first) :], True
            elif (head := next(filter(bare.startswith, self.block.instead), "")) and not self.began:
                self._state, self._held = "gap", bare[len(head) :]
            elif not any(tag.startswith(bare) for tag in (first, *self.block.instead)):
                self._state = "inside" if self.began else "content"
        if self._state == "inside":
            reasoning = self._inside()
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content":
            content, self._held = self._held, ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """What is still held, when no text follows."""
        held, self._held = self._held, ""
        if self._state in ("opened", "inside"):
            return (held.strip() if self._fresh else held.rstrip()), ""
        return "", held if self._state == "start" else ""

    def _inside(self) -> str:
        last = self.block.close
        if self._fresh:
            self._held = self._held.lstrip()
        at = self._held.find(last)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(last) :]
            self._state = "gap"
        else:
            keep = next((n for n in range(len(last) - 1, 0, -1) if self._held.endswith(last[:n])), 0)
            text = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(text) :]
        if text:
            self._fresh = False
        return text


def thinking_variables(
    effort: str | None, template: str, reads: Collection[str], given: Collection[str]
) -> dict[str, Any]:
    """The template variables that stand for `effort`; none where it is None.

    `reads` are the variables that the template looks up. A template with a switch only thinks or does not: there every
    effort up to high is on. One that reads reasoning_effort itself takes low, medium, high and what its source names.
    Raises ConfigError for what this template cannot do, and when one of `given` would say the same twice.
    """
    if effort is None:
        return {}

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"reasoning_effort: {problem}", "reasoning_effort")

    if effort not in EFFORTS:
        raise refuse(f"expected one of {', '.join(EFFORTS)}, found {effort!r:.60}")
    if twice := sorted({*SWITCHES, "reasoning_effort"} & set(given)):
        raise refuse(f"given together with the template variable {twice[0]}; expected one of them")
    switches = [name for name in SWITCHES if name in reads]
    levels: list[str] = []
    if "reasoning_effort" in reads:
        levels = [e for e in EFFORTS if e in ("low", "medium", "high") or f"'{e}'" in template or f'"{e}"' in template]
    elif switches:
        levels = ["minimal", "low", "medium", "high"]
    if switches and "none" not in levels:
        levels.insert(0, "none")
    if not levels:
        raise refuse("this model's chat template has no thinking modes; leave it out")
    if effort not in levels:
        raise refuse(f"this model's chat template has no mode for {effort!r}; expected one of {', '.join(levels)}")
    found: dict[str, Any] = dict.fromkeys(switches, effort != "none")
    # A switch says "none" better than a word that the template may not know.
    if "reasoning_effort" in reads and (effort != "none" or not switches):
        found["reasoning_effort"] = effort
    return found
