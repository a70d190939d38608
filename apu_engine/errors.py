"""Every error a caller of apu_engine may want to tell apart.

Each message is complete in itself: it names the file, field, tensor or option, says what was expected and
what was found, and what to do. So a server, a command line or a notebook can print `str(error)` and nothing
else. The fields that a program may branch on are attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath

UNFIT = 78  # EX_CONFIG of sysexits.h: a supervisor does not try again


class ApuError(Exception):
    """Base of all errors that apu_engine raises on purpose. `exit_status` is that of a command which it ends."""

    exit_status = 1


class FormatError(ApuError):
    """A model file is malformed or truncated, or one of its fields holds an impossible value.

    `file` is the path, `field` the header field, metadata key or tensor ("" when the file as a whole is
    meant).
    """

    def __init__(self, file: str | PathLike[str], field: str, problem: str) -> None:
        super().__init__(fspath(file), field, problem)
        self.file: str = str(fspath(file))
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file}: {self.field}: {self.problem}" if self.field else f"{self.file}: {self.problem}"


class ModelError(ApuError):
    """A well-formed file holds something that this engine does not support or cannot do.

    `names` lists the architecture, tensors or tokenizer kind that are meant.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message, tuple(names))
        self.names: tuple[str, ...] = tuple(names)

    def __str__(self) -> str:
        return str(self.args[0])


class MappingError(ApuError):
    """A file could not be mapped, or it changed while it was mapped. `file` is its path."""

    def __init__(self, file: str | PathLike[str], problem: str) -> None:
        super().__init__(fspath(file), problem)
        self.file: str = str(fspath(file))
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


class BudgetError(ApuError):
    """Memory does not suffice: the message gives needed and available bytes and the remedies."""

    exit_status = UNFIT


class GpuError(ApuError):
    """A GPU that is there, or that was asked for, cannot be used: the message says why, and what to do."""

    exit_status = UNFIT


class ConfigError(ApuError):
    """An option, environment variable or argument has a bad value. `option` is its name."""

    exit_status = 2

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message, option)
        self.option = option

    def __str__(self) -> str:
        return str(self.args[0])


class LoadCancelled(ApuError):
    """Loading was cancelled, as whoever started it asked."""


def brief(error: BaseException, most: int = 200) -> str:
    """What an error says on one line of at most `most` characters, for a table; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
