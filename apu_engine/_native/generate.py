"""Writes `_cdef.py`, the Python twin of native/include/apu.h, in cffi's out-of-line ABI form.

Run by CMake at build time: `python generate.py apu.h _cdef.py`. The header is the only source: preprocessor
lines and the export macro are stripped, integer macros stay as constants. Nothing is compiled, and at run
time only cffi's small backend module is imported, never the C parser.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_DEFINE = re.compile(r"#\s*define\s+(APU_\w+)\s+\(?(-?(?:0[xX][0-9a-fA-F]+|\d+))[uUlL]*\)?\s*$")


def declarations(header: str) -> str:
    """The header's C declarations as cffi's parser takes them.

    Integer macros become `#define NAME value` lines.
    """
    text = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    lines: list[str] = []
    skipping_cplusplus = False
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped.startswith("#"):
            if not skipping_cplusplus:
                lines.append(line.replace("APU_API ", ""))
            continue
        if stripped.startswith("#ifdef __cplusplus"):
            skipping_cplusplus = True
        elif stripped.startswith("#endif"):
            skipping_cplusplus = False
        elif define := _DEFINE.match(stripped):
            lines.append(f"#define {define[1]} {define[2]}")
    return "\n".join(lines) + "\n"


def generate(header: Path, output: Path) -> None:
    """Writes `output` from `header`; its text changes only when the declarations do."""
    from cffi import FFI

    builder = FFI()
    builder.cdef(declarations(header.read_text(encoding="utf-8")))
    builder.set_source("apu_engine._native._cdef", None)
    output.parent.mkdir(parents=True, exist_ok=True)
    builder.emit_python_code(str(output))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: generate.py HEADER OUTPUT")
    generate(Path(sys.argv[1]), Path(sys.argv[2]))
