"""Tokens in, text that is safe to show out: one filter for streamed and for whole answers.

Two things are held back: the bytes of a character that is not complete yet, and the end of the text while it may still
grow into a stop string. What comes out does not depend on how the text was cut into tokens: the stop string that is
complete first ends the text, the longest one if several are complete at once. Everything held comes out on `flush()`,
which belongs to every end but a stop string, also the one by max_tokens. Reasoning is told apart before stop strings
are looked for: they end the answer, not the thinking about it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from apu_engine.errors import ConfigError
from apu_engine.text.reasoning import ReasoningSplit
from apu_engine.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters; this much text may have to be held back


class TextStream:
    """The text of one answer. `push` each token, then `flush`; the pieces joined are `Tokenizer.decode` of all ids,
    cut before the stop string. With `continuation` the ids go on from another text, whose last word they may end, so a
    leading space of SentencePiece is kept. With `split` the pieces are the content alone; after each call `reasoning`
    is the reasoning that it made certain.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        continuation: bool = False,
        split: ReasoningSplit | None = None,
    ) -> None:
        self._stop = check_stop(stop)
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._split = split
        # Some vocabularies type the tags, or parts of them, as control tokens, which are not shown otherwise.
        tags = () if split is None else (split.block.open, split.block.close, *split.block.instead)
        control = tokenizer.control_tokens if tags else {}
        self._tags = frozenset(id for token, id in control.items() if any(token in tag for tag in tags))
        self._pushed = 0
        self.reasoning = ""
        self.reasoning_tokens = 0  # tokens of the block, its tags included, so far
        self._drop_space = tokenizer.add_space_prefix and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may become a stop string
        self.finished: Literal["stop"] | None = None
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; nothing after a stop string."""
        self.reasoning = ""
        if self.finished:
            return ""
        self._pushed += 1
        if token_id in self._skipped and not (self._split and self._split.open and token_id in self._tags):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            if data[:1] == b" ":
                data = data[1:]
        text = self._decoder.decode(data)
        if self._split is not None:
            was_open = self._split.open
            self.reasoning, text = self._split.feed(text)
            if was_open and self._split.began:
                self.reasoning_tokens = self._pushed
        return self._filter(text)

    def flush(self) -> str:
        """What is still held: call once, when no token follows. An incomplete character becomes U+FFFD."""
        self.reasoning = ""
        if self.finished:
            return ""
        text = self._decoder.decode(b"", final=True)
        if self._split is not None:
            reasoning, text = self._split.feed(text)
            more, rest = self._split.flush()
            self.reasoning, text = reasoning + more, text + rest
        text = self._filter(text)
        if not self.finished:
            text, self._held = text + self._held, ""
        return text

    def _filter(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        end = start = len(text) + 1
        for stop in self._stop:
            at = text.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                end, start, self.matched = at + len(stop), at, stop
        if self.matched is not None:
            self.finished, self._held = "stop", ""
            return text[:start]
        keep = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:length]):
                    keep = length
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple. Raises ConfigError for an empty one, and for too many or too long ones."""
    try:
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        raise ConfigError(f"stop: expected a string or a list of strings, found {stop!r}", "stop") from None
    if len(strings) > MAX_STOP_STRINGS:
        raise ConfigError(f"stop: {len(strings)} strings, at most {MAX_STOP_STRINGS} are supported", "stop")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop: expected non-empty strings, found {string!r}", "stop")
        if len(string) > MAX_STOP_LENGTH:
            raise ConfigError(
                f"stop: a string of {len(string)} characters, at most {MAX_STOP_LENGTH} are supported", "stop"
            )
    return strings
