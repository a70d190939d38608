"""Malformed files: each is refused at once, with an error that names the file and the field."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_builder import (
    ARCH,
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    array,
    gguf,
    inner,
    scalar,
    string,
    text,
)

from apu_engine.errors import FormatError
from apu_engine.weights.opening import open_model


def keys(*more: tuple[str | bytes, bytes]) -> list[tuple[str | bytes, bytes]]:
    return [ARCH, *more]


def nested(depth: int) -> bytes:
    value = array(U8, [1])
    for _ in range(depth):
        value = array(ARRAY, [inner(value)])
    return value


BIG_ENDIAN = b"GGUF" + struct.pack(">IQQ", 3, 0, 1)

# name -> (bytes of the file, field that the error must name, words that it must say)
FILES: dict[str, tuple[bytes, str, str]] = {
    # not a GGUF file at all
    "empty": (b"", "", "empty"),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        "magic",
        "git lfs pull",
    ),
    "html page": (b"<!DOCTYPE html><html>login</html>", "magic", "HTML"),
    "html page, blank first": (b"\n  <html><body></body></html>", "magic", "HTML"),
    "json error": (b'{"error": "Repository not found"}', "magic", "JSON"),
    "zip": (b"PK\x03\x04" + bytes(60), "magic", "zip"),
    "pickle": (b"\x80\x02}q\x00" + bytes(60), "magic", "PyTorch"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "magic", "gzip"),
    "ggjt": (b"tjgg" + bytes(60), "magic", "GGJT"),
    "safetensors": (struct.pack("<Q", 32) + b'{"x":{"dtype":"F32"}}' + bytes(60), "magic", "safetensors"),
    "reserved, never filled": (bytes(4096), "magic", "zeros"),
    "noise": (b"\x13\x37" * 40, "magic", "not a GGUF file"),
    "three bytes": (b"GGU", "magic", "not a GGUF file"),
    # preamble
    "version 1": (gguf(version=1), "version", "version 1"),
    "version 4": (gguf(version=4), "version", "found 4"),
    "version 0": (gguf(version=0), "version", "found 0"),
    "big-endian": (BIG_ENDIAN + bytes(64), "version", "big-endian"),
    "tensor count 2^63": (gguf(n_tensors=1 << 63), "tensor_count", "9,223,372,036,854,775,808"),
    "tensor count 2^64-1": (gguf(n_tensors=(1 << 64) - 1), "tensor_count", "left"),
    "key count 2^63": (gguf(n_keys=1 << 63), "metadata_kv_count", "left"),
    "key count 10^6": (gguf(n_keys=10**6), "metadata_kv_count", "left"),
    # keys and values
    "key length 2^63": (
        gguf([(b"", b"")], n_keys=1)[:24] + struct.pack("<Q", 1 << 63) + bytes(64),
        "metadata key 0",
        "65,535",
    ),
    "key length 0": (gguf([("", scalar(U32, 1))]), "metadata key 0", "found 0"),
    "key not UTF-8": (gguf([(b"a\xff", scalar(U32, 1))]), "metadata key 0", "UTF-8"),
    "key twice": (gguf(keys(("a", scalar(U32, 1)), ("a", scalar(U32, 2)))), "a", "twice"),
    "value type 13": (gguf(keys(("a", struct.pack("<I", 13)))), "a type", "found 13"),
    "value type 2^32-1": (gguf(keys(("a", struct.pack("<I", 0xFFFFFFFF)))), "a type", "0 to 12"),
    "bool 2": (gguf(keys(("a", scalar(BOOL, 2)))), "a", "boolean"),
    "bool array 7": (gguf(keys(("a", array(BOOL, [0, 1, 7])))), "a[2]", "boolean"),
    "string length 2^64-1": (gguf(keys(("a", text("b", (1 << 64) - 1)))), "a", "left"),
    "string not UTF-8": (gguf(keys(("a", text(b"\xc3(")))), "a", "UTF-8"),
    "array length 2^63": (gguf(keys(("a", array(F32, [], 1 << 63)))), "a length", "left"),
    "array bytes wrap": (gguf(keys(("a", array(U64, [], (1 << 61) + 1)))), "a length", "left"),
    "string array length 2^63": (gguf(keys(("a", array(STRING, [], 1 << 63)))), "a length", "left"),
    "string array wraps": (gguf(keys(("a", array(STRING, [string("b", (1 << 64) - 8)])))), "a[0]", "left"),
    "string array too short": (
        gguf(keys(("a", array(STRING, [string("b"), string("c", 10**6)])))),
        "a[1]",
        "left",
    ),
    "array of arrays 2^63": (gguf(keys(("a", array(ARRAY, [], 1 << 63)))), "a length", "left"),
    "array element type 13": (
        gguf(keys(("a", struct.pack("<IIQ", ARRAY, 13, 0)))),
        "a element type",
        "found 13",
    ),
    "arrays nest 1000 deep": (gguf(keys(("a", nested(1000)))), "a[0]", "nest deeper"),
    "arrays nest 9 deep": (gguf(keys(("a", nested(8)))), "a[0]", "nest deeper"),
    "100,000 nested arrays": (
        gguf(keys(("a", array(ARRAY, [inner(array(U8, []))] * 100_000)))),
        "a length",
        "65,536",
    ),
    "alignment 0": (gguf(keys(("general.alignment", scalar(U32, 0)))), "general.alignment", "power of two"),
    "alignment 48": (gguf(keys(("general.alignment", scalar(U32, 48)))), "general.alignment", "found 48"),
    "alignment text": (gguf(keys(("general.alignment", text("32")))), "general.alignment", "found '32'"),
    "alignment true": (gguf(keys(("general.alignment", scalar(BOOL, 1)))), "general.alignment", "found True"),
    "alignment 2^31": (
        gguf(keys(("general.alignment", scalar(U32, 1 << 31))), [Tensor()]),
        'tensor "x"',
        "truncated",
    ),
    "no architecture": (gguf([("a", scalar(U32, 1))]), "general.architecture", "missing"),
    "architecture empty": (gguf([("general.architecture", text(""))]), "general.architecture", "empty"),
    "architecture a number": (
        gguf([("general.architecture", scalar(U32, 1))]),
        "general.architecture",
        "string",
    ),
    "split count 10^9": (gguf(keys(("split.count", scalar(U32, 10**9)))), "split.count", "99999"),
    "split count text": (gguf(keys(("split.count", text("3")))), "split.count", "found '3'"),
    "split count -1": (gguf(keys(("split.count", scalar(5, -1)))), "split.count", "found -1"),
    # tensor infos
    "tensor name not UTF-8": (gguf(tensors=[Tensor(b"\xfe")]), "tensor 0 name", "UTF-8"),
    "tensor name empty": (gguf(tensors=[Tensor("")]), "tensor 0 name length", "found 0"),
    "n_dims 10^6": (gguf(tensors=[Tensor(n_dims=10**6)]), 'tensor "x" n_dims', "found 1,000,000"),
    "n_dims 2^32-1": (gguf(tensors=[Tensor(n_dims=2**32 - 1)]), 'tensor "x" n_dims', "at most 4"),
    "n_dims 5": (gguf(tensors=[Tensor(dims=(1,) * 5)]), 'tensor "x" n_dims', "found 5"),
    "dimension 0": (gguf(tensors=[Tensor(dims=(4, 0))]), 'tensor "x" dimension 1', "found 0"),
    "dimension 2^63": (gguf(tensors=[Tensor(dims=(1 << 63,))]), 'tensor "x" dimension 0', "found"),
    "product wraps to 0": (gguf(tensors=[Tensor(dims=(1 << 32, 1 << 32))]), 'tensor "x"', "truncated"),
    "product wraps to 4": (
        gguf(tensors=[Tensor(dims=(4, (1 << 62) + 1, 1, 1), dtype=24)]),
        'tensor "x"',
        "truncated",
    ),
    "bytes wrap": (gguf(tensors=[Tensor(dims=((1 << 62) + 1,))]), 'tensor "x"', "truncated"),
    "row splits a block": (gguf(tensors=[Tensor(dims=(48,), dtype=2)]), 'tensor "x" dimension 0', "32"),
    "scalar of a block type": (gguf(tensors=[Tensor(dims=(), dtype=12)]), 'tensor "x" dimension 0', "256"),
    "type 99": (gguf(tensors=[Tensor(dtype=99)]), 'tensor "x" type', "type 99 is unknown"),
    "type 31": (gguf(tensors=[Tensor(dims=(32,), dtype=31)]), 'tensor "x" type', "Q4_0_4_4"),
    "tensor twice": (gguf(tensors=[Tensor(), Tensor(offset=32)]), 'tensor "x"', "twice"),
    "offset not aligned": (
        gguf(tensors=[Tensor(offset=4)]),
        'tensor "x" offset',
        "multiple of the alignment 32",
    ),
    "offset past the end": (gguf(tensors=[Tensor(offset=1 << 20)]), 'tensor "x"', "truncated"),
    "offset near 2^64": (gguf(tensors=[Tensor(offset=(1 << 64) - 32)]), 'tensor "x"', "truncated"),
    "one byte too short": (gguf(tensors=[Tensor(offset=32, dims=(8,))])[:-1], 'tensor "x"', "truncated"),
    "no data": (gguf(tensors=[Tensor()], data=0), 'tensor "x"', "truncated"),
    "overlap": (
        gguf(tensors=[Tensor(dims=(16,)), Tensor("y", offset=32)]),
        'tensor "y"',
        'overlaps tensor "x"',
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_by_field(name: str, tmp_path: Path) -> None:
    content, field, words = FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        open_model(path)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    error = caught.value
    assert error.file == str(path) and str(error).startswith(str(path))
    assert error.field.startswith(field) and bool(error.field) == bool(field), error
    assert words in str(error)
    assert seconds < 1
    assert peak < 16 << 20, "nothing may be allocated for a count before it is checked"


SMALL = gguf(
    [
        ARCH,
        ("general.alignment", scalar(U32, 64)),
        ("a.float", scalar(F32, 1.5)),
        ("a.flag", scalar(BOOL, 1)),
        ("a.ints", array(U16, [1, 2, 3])),
        ("a.words", array(STRING, [string("one"), string(""), string("drei")])),
        ("a.nested", array(ARRAY, [inner(array(U8, [1, 2])), inner(array(STRING, [string("x")]))])),
    ],
    [Tensor("one", (4, 2)), Tensor("two", (32,), 2, 64)],
    data=64 + 18,
    alignment=64,
)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    assert list(open_model(path).tensors) == ["one", "two"]
    start = time.perf_counter()
    for size in range(len(SMALL)):
        path.write_bytes(SMALL[:size])
        with pytest.raises(FormatError) as caught:
            open_model(path)
        assert str(path) in str(caught.value)
        assert caught.value.field or not size
    assert time.perf_counter() - start < 0.02 * len(SMALL)


def test_a_header_that_never_ends(tmp_path: Path) -> None:
    """A sparse file whose array claims gigabytes that the file really has: refused before they are read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(keys(("a", array(U64, [], 1 << 26))), data=0))
    os.truncate(path, 16 << 30)
    with pytest.raises(FormatError, match=r"a: makes the header larger than 128 MiB"):
        open_model(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: b"")
    with pytest.raises(FormatError, match="shrank"):
        open_model(path)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)

    def broken(fd: int, count: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(FormatError, match="Input/output error"):
        open_model(path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "model.gguf"
    os.mkfifo(fifo)
    with pytest.raises(FormatError, match="FIFO"):
        open_model(fifo)
    with pytest.raises(FormatError, match="character device"):
        open_model("/dev/zero")
    with pytest.raises(FormatError, match="does not exist"):
        open_model(tmp_path / "none.gguf")
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "blob")
    with pytest.raises(FormatError, match=r"link to .*blob, which does not exist"):
        open_model(link)
    with pytest.raises(FormatError, match=r"NUL|null"):
        open_model("a\0b.gguf")


def test_a_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(FormatError, match="may not be read by user"):
        open_model(path)
