"""Errors of the text layer: bad input text, and chat templates that fail or exceed their limits."""

from __future__ import annotations

from apu_engine.errors import ApuError


class TextError(ApuError):
    """Input text that no tokenizer can take, such as a lone surrogate; the message says where."""


class TemplateError(ApuError):
    """A chat template could not be rendered.

    `reason` is one of "raised" (the template's own raise_exception), "syntax", "runtime", "security", "time",
    "memory", "size", "input" or "worker"; `line` is the template's line where known, counted from 1.
    """

    def __init__(self, message: str, reason: str = "runtime", line: int | None = None) -> None:
        super().__init__(message, reason, line)
        self.reason = reason
        self.line = line

    def __str__(self) -> str:
        at = f" (line {self.line})" if self.line else ""
        return f"chat template: {self.args[0]}{at}"
