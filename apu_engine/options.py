"""What an option is: its kind, range and default, how text becomes its value, and how a bad value is refused.

The options themselves are fields of `EngineConfig` (config.py), each made by `option`, whose metadata is a `Spec` but
for the name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from apu_engine.errors import ConfigError

Kind = Literal["int", "float", "bool", "str", "path", "size"]
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Spec:
    """What an option accepts and how it is shown. `optional`: None is a value, an empty string means it."""

    name: str
    kind: Kind
    default: Any
    help: str
    group: str
    flags: tuple[str, ...]
    optional: bool
    choices: tuple[str, ...]
    lo: float | None
    hi: float | None
    default_text: str

    @property
    def env(self) -> str:
        """The variable in the environment."""
        return "APU_" + self.name.upper()

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        if self.choices:
            return "|".join(self.choices)
        names = {"int": "N", "float": "X", "bool": "0|1", "str": "TEXT", "path": "PATH", "size": "BYTES"}
        return names[self.kind]

    @property
    def shown_default(self) -> str:
        """The default as help and documentation show it."""
        if self.default_text:
            return self.default_text
        if self.kind == "bool":
            return "on" if self.default else "off"
        if self.kind == "size" and self.default:
            return format_size(self.default)
        return "none" if self.default is None else self._show(self.default)

    @property
    def expected(self) -> str:
        """What a good value is, for messages and the documentation."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        what = {
            "int": "an integer",
            "float": "a number",
            "bool": "1, true, yes, on or 0, false, no, off",
            "str": "text",
            "path": "a path",
            "size": "a size such as 512MiB or 8G",
        }[self.kind]
        if self.lo is not None and self.hi is not None:
            return f"{what} from {self._show(self.lo)} to {self._show(self.hi)}"
        if self.lo:
            return f"{what} of at least {self._show(self.lo)}"
        return what

    def _show(self, value: Any) -> str:
        if self.kind == "size":
            return format_size(int(value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    def convert(self, value: Any) -> Any:
        """`value` as this option's type; ValueError when it is not one. Strings are parsed."""
        if self.optional and (value is None or value == ""):
            return None
        if self.choices:
            if value not in self.choices:
                raise ValueError
            return value
        converted = _CONVERT[self.kind](value)
        if (self.lo is not None and converted < self.lo) or (self.hi is not None and converted > self.hi):
            raise ValueError
        return converted

    def check(self, value: Any, source: str) -> Any:
        """As `convert`, but raises ConfigError naming the option as the user of `source` knows it."""
        try:
            return self.convert(value)
        except (ValueError, TypeError, OverflowError):
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
            label, where = self.name, "argument"
            if source == "flag":
                label, where = self.flags[0] if self.flags else self.name, "command line"
            elif source == "environment":
                label, where = self.env, "environment"
            message = f"{label}: expected {self.expected}, found {shown} (from the {where})"
            raise ConfigError(message, self.name) from None


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in TRUE | _FALSE:
        raise ValueError
    return text in TRUE


def _to_str(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ValueError
    return text


def _to_size(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
    if match is None:
        raise ValueError
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


_CONVERT: Mapping[str, Any] = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "path": _to_str,
    "size": _to_size,
}


def format_size(nbytes: int) -> str:
    """Bytes in binary units that `--memory-budget` and its like read back: 0, 512 B, 1.5 GiB."""
    for unit, name in (("t", "TiB"), ("g", "GiB"), ("m", "MiB"), ("k", "KiB")):
        if abs(nbytes) >= _SIZE_UNITS[unit] * (1 - 0.05 / 1024):  # which would be 1024.0 of the smaller one
            amount = nbytes / _SIZE_UNITS[unit]
            return f"{amount:.0f} {name}" if amount == int(amount) else f"{amount:.1f} {name}"
    return f"{nbytes} B" if nbytes else "0"


def option(
    kind: Kind,
    default: Any,
    help: str,
    *flags: str,
    group: str,
    choices: tuple[str, ...] = (),
    lo: float | None = None,
    hi: float | None = None,
    default_text: str = "",
    optional: bool | None = None,
) -> Any:
    """A dataclass field that is an option; `optional` is true where the default is None, unless it is given."""
    optional = default is None if optional is None else optional
    return field(
        default=default,
        metadata={
            "kind": kind,
            "help": help,
            "flags": flags,
            "group": group,
            "choices": choices,
            "lo": lo,
            "hi": hi,
            "default_text": default_text,
            "optional": optional,
        },
    )
