"""JSON of files that nobody vouches for: bounded in size, UTF-8, no name twice, no NaN, no nesting without end.

The standard parser is lenient where these files must not be: a name that occurs twice has two meanings, one for each
reader. Errors are FormatErrors that name the file and the place.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from apu_engine.errors import FormatError, MappingError
from apu_engine.memory.files import open_regular


def read_whole(path: Path, most: int) -> bytes:
    """A file of at most `most` bytes. Raises FormatError, as the others here."""
    try:
        fd, info = open_regular(path)
    except MappingError as error:
        raise FormatError(error.file, "", error.problem.replace("a model is", "it must be")) from None
    with os.fdopen(fd, "rb") as file:
        data = b"" if info.st_size > most else file.read(most + 1)
    if max(info.st_size, len(data)) > most:
        raise FormatError(path, "", f"has {info.st_size:,} bytes, expected at most {most:,}")
    return data


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The object in a file of at most `most` bytes."""
    document = parse_json(read_whole(path, most), path)
    if not isinstance(document, dict):
        raise FormatError(path, "", f"expected a JSON object, found {type(document).__name__}")
    return document


def parse_json(data: bytes, path: Path, field: str = "") -> Any:
    """The document that is `data`, a part of file `path` that errors call `field`."""

    def fail(problem: str) -> FormatError:
        return FormatError(path, field, problem)

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(found)
        if len(out) != len(found):
            twice, _ = Counter(name for name, _ in found).most_common(1)[0]
            raise fail(f"name {twice[:80]!r} occurs twice")
        return out

    def constant(text: str) -> Any:
        raise fail(f"holds {text}, which is no JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise fail(f"is not UTF-8 (byte {error.start:,})") from None
    except json.JSONDecodeError as error:
        raise fail(f"is not JSON: {error.msg} at character {error.pos:,}; download it again") from None
    except RecursionError:
        raise fail("is nested too deeply; the file is corrupt") from None
    except ValueError as error:  # a number of thousands of digits
        raise fail(f"is not JSON that can be read: {error}") from None
