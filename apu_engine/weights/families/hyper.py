"""config.json as hyperparameters: one level of values, and where each came from, for errors in the file's own words.

A null is as absent as a missing name. A multimodal model's text part may be an object of its own, `text_config`, whose
values come first. Values are passed on as they are: whoever reads them as metadata checks type and range.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apu_engine.errors import FormatError, ModelError

MOST = 1 << 40  # of integers that are calculated with
MOST_NUMBER = 1e15


class Hyper:
    """`h.get("hidden_size")`; `defaults` are those that the model's own code has where the file is silent."""

    def __init__(self, path: Path, document: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.path = path
        inner = document.get("text_config")
        layers = [defaults or {}, document, inner if isinstance(inner, dict) else {}]
        self.values: dict[str, Any] = {}
        for layer in layers:
            self.values |= {name: value for name, value in layer.items() if value is not None}

    def has(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int:
            raise self.fail(name, "expected an integer, found " + ("nothing" if value is None else f"{value!r:.80}"))
        if not 0 <= value <= MOST:
            raise self.fail(name, f"expected 0 to {MOST:,}, found {value!r:.80}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float):
            raise self.fail(name, "expected a number, found " + ("nothing" if value is None else f"{value!r:.80}"))
        assert isinstance(value, (int, float))
        if not -MOST_NUMBER <= value <= MOST_NUMBER:
            raise self.fail(name, f"expected a number of at most {MOST_NUMBER:g}, found {value!r:.80}")
        return value

    @property
    def head_size(self) -> int:
        """`head_dim`, else the width's share of a head."""
        if self.has("head_dim"):
            return self.integer("head_dim")
        return self.integer("hidden_size") // max(1, self.integer("num_attention_heads"))

    def strings(self, name: str, length: int) -> list[str]:
        """A list of `length` strings."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(name, f"expected a list of strings, found {value!r:.80}")
        if len(value) != length:
            raise self.fail(name, f"expected {length:,} entries, found {len(value):,}")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Raises ModelError when the value is there and none of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            raise ModelError(f"{self.path}: {name}: expected {wanted}, found {value!r:.80}: not supported", (name,))

    def object(self, name: str) -> Hyper | None:
        """The values of an object within."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"expected an object, found {value!r:.80}")
        return Hyper(self.path, value)

    def fail(self, name: str, problem: str) -> FormatError:
        return FormatError(self.path, name, problem)
