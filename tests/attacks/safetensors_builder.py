"""Builds safetensors files byte by byte, so that a test can lie in any field. No checks, on purpose."""

from __future__ import annotations

import json
from typing import Any


def entry(dtype: Any = "F32", shape: Any = (4,), begin: Any = 0, end: Any = 16, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def safetensors(header: Any, data: int = 16, length: int | None = None) -> bytes:
    """`header` is bytes, or becomes JSON; `length` is what the file says of it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(i % 251 for i in range(data))
