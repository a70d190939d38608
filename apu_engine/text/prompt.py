"""Keeping the template's own control tokens apart from what users write.

A template joins trusted literals and untrusted strings into one text, in which `<|im_end|>` from either looks the same.
So before rendering, the punctuation that control tokens begin and end with is swapped for private-use twins in every
string that comes from the request: one character for one character, so that trimming, slicing and comparing lengths
work as before. In the rendered text only the template's own control tokens are spelled right. They are cut out, the
twins are swapped back in what remains, and that is encoded as text. One exception: reasoning tags in assistant messages
stay as they are, because templates look for them to drop old reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apu_engine.text.tokenizer import Tokenizer

_PRIVATE = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
_ANY_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
# Never swapped: templates compare names and types that hold them.
_PLAIN = frozenset("_-./:,'\"#*&= ")
_BARS = frozenset("|｜")  # noqa: RUF001
_REASONING = re.compile(r"</?(?:think|thinking|reasoning|seed:think)>|\[/?THINK\]")
_REASONING_KEYS = frozenset(("content", "text", "reasoning_content", "reasoning", "thinking"))


@dataclass(frozen=True)
class Prompt:
    """A rendered chat. `marked` still holds twins where a request's text could be taken for a control token."""

    marked: str
    twins: Mapping[int, str] = field(default_factory=dict)  # code point of a twin -> the character it stands for

    @property
    def text(self) -> str:
        """The rendered text as Hugging Face's `apply_chat_template` gives it."""
        return self.marked.translate(self.twins)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Ids of a rendered chat: the template's control tokens are tokens, everything else is text; BOS exactly once."""
    pieces = tokenizer.split(prompt.marked)
    if prompt.twins:
        pieces = [piece.translate(prompt.twins) if isinstance(piece, str) else piece for piece in pieces]
    return tokenizer.with_bos(tokenizer.encode_pieces(pieces))


class Guard:
    """Swaps characters of untrusted strings, given the control tokens of a vocabulary and a template's source."""

    def __init__(self, control_tokens: Iterable[str], source: str) -> None:
        edges: set[str] = set()
        words: list[str] = []
        for token in control_tokens:
            if _plain(token[0]):
                words.append(token)
            edges.update(char for char in (token[0], token[-1]) if not _plain(char))
            edges.update(char for char in (token[1:2], token[-2:-1]) if char in _BARS)
        self._chars = sorted(edges | {word[0] for word in words})
        self._edges = edges
        self._source = source
        # A control token that begins like a word is broken only where it stands whole.
        starts = (f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in sorted(words, key=len, reverse=True))
        self._words = re.compile("|".join(starts)) if words else None

    def mark(self, variables: dict[str, Any], dumped: str) -> tuple[dict[str, Any], dict[int, str]]:
        """`variables` with twins in all strings, and the table that swaps back. `dumped` is their JSON."""
        chosen = self._unused(dumped)
        table = {ord(char): twin for char, twin in chosen.items()}
        edges = {ord(char): chosen[char] for char in self._edges}

        def text(string: str) -> str:
            if self._words is not None:
                string = self._words.sub(lambda match: chosen[match.group()], string)
            return string.translate(edges)

        def walk(value: Any, keep_reasoning: bool = False) -> Any:
            if isinstance(value, str):
                if keep_reasoning and _REASONING.search(value):
                    parts = _REASONING.split(value)
                    tags = [*_REASONING.findall(value), ""]
                    return "".join(text(part) + tag for part, tag in zip(parts, tags, strict=True))
                return text(value)
            if isinstance(value, dict):
                return {text(key): walk(item, keep_reasoning and key in _REASONING_KEYS) for key, item in value.items()}
            if isinstance(value, list):
                return [walk(item, keep_reasoning) for item in value]
            return value

        marked = {key: walk(value) for key, value in variables.items() if key != "messages"}
        marked["messages"] = [walk(item, item.get("role") == "assistant") for item in variables["messages"]]
        return marked, {ord(twin): chr(char) for char, twin in table.items()}

    def unescape(self, rendered: str, twins: Mapping[int, str]) -> str:
        """Undoes what tojson(ensure_ascii=True) does to twins."""
        if "\\ud" in rendered:
            for twin in twins:
                rendered = rendered.replace(json.dumps(chr(twin))[1:-1], chr(twin))
        return rendered

    def _unused(self, dumped: str) -> dict[str, str]:
        used = set(_ANY_PRIVATE.findall(dumped)) | set(_ANY_PRIVATE.findall(self._source))
        plain = dumped.replace("\\\\", "\\") if "\\ud" in dumped else ""  # texts that spell such an escape themselves
        free = (
            char
            for block in _PRIVATE
            for char in map(chr, block)
            if char not in used and not (plain and json.dumps(char)[1:-1] in plain)
        )
        return dict(zip(self._chars, free, strict=False))


def _plain(char: str) -> bool:
    return char.isalnum() or char.isspace() or char in _PLAIN
