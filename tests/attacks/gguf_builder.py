"""Builds GGUF files byte by byte, so that a test can lie in any field. No checks, on purpose."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: float) -> bytes:
    """A typed value, the type included."""
    return struct.pack("<I" + _FORMATS[kind], kind, value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", STRING) + string(value, length)


def array(kind: int, items: Sequence[bytes | float], length: int | None = None) -> bytes:
    """An array value; items are bytes for strings and arrays (without their outer type), else numbers."""
    body = b"".join(i if isinstance(i, bytes) else struct.pack("<" + _FORMATS[kind], i) for i in items)
    return struct.pack("<IIQ", ARRAY, kind, len(items) if length is None else length) + body


def inner(value: bytes) -> bytes:
    """An array value as an element of another array: without the leading type."""
    return value[4:]


@dataclass
class Tensor:
    name: str | bytes = "x"
    dims: Sequence[int] = (4,)  # as in the file: innermost first
    dtype: int = 0
    offset: int = 0
    n_dims: int | None = None

    def info(self) -> bytes:
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return string(self.name) + struct.pack("<I", n_dims) + dims + struct.pack("<IQ", self.dtype, self.offset)


ARCH = ("general.architecture", text("llama"))


def gguf(
    keys: Sequence[tuple[str | bytes, bytes]] = (ARCH,),
    tensors: Sequence[Tensor] = (),
    data: int = 64,
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """Header, padding to `alignment`, `data` bytes of data."""
    head = magic + struct.pack("<I", version)
    head += struct.pack("<Q", len(tensors) if n_tensors is None else n_tensors)
    head += struct.pack("<Q", len(keys) if n_keys is None else n_keys)
    head += b"".join(string(key) + value for key, value in keys)
    head += b"".join(tensor.info() for tensor in tensors)
    return head + bytes(-len(head) % alignment) + bytes(i % 251 for i in range(data))
