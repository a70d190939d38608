"""A short fuzz: whatever happens to the bytes of a valid file, it loads or it is a FormatError, soon."""

from __future__ import annotations

import struct
from datetime import timedelta
from pathlib import Path

import pytest
from gguf_builder import ARCH, ARRAY, BOOL, F32, STRING, U8, U32, Tensor, array, gguf, inner, scalar, string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apu_engine.errors import FormatError
from apu_engine.weights.ggml_types import GGML_TYPES
from apu_engine.weights.model_file import StringArray
from apu_engine.weights.opening import open_model

VALID = gguf(
    [
        ARCH,
        ("general.alignment", scalar(U32, 32)),
        ("llama.block_count", scalar(U32, 2)),
        ("llama.eps", scalar(F32, 1e-5)),
        ("llama.flag", scalar(BOOL, 1)),
        ("tokens", array(STRING, [string(word) for word in ("<s>", "a", "ä", "")])),
        ("scores", array(F32, [0.0, 1.0, 2.0])),
        ("nested", array(ARRAY, [inner(array(U8, [1, 2])), inner(array(STRING, [string("x")]))])),
        ("split.count", scalar(U32, 1)),
    ],
    [Tensor("token_embd.weight", (32, 3), 8), Tensor("norm", (4,), 0, 128)],
    data=160,
)
HEADER = len(VALID) - 160
NUMBERS = [
    0,
    1,
    7,
    8,
    9,
    31,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**61 + 1,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
]
at = st.integers(0, HEADER - 1)
edits = st.one_of(
    st.tuples(st.just("byte"), at, st.integers(0, 255)),
    st.tuples(st.just("u32"), at, st.sampled_from(NUMBERS)),
    st.tuples(st.just("u64"), at, st.sampled_from(NUMBERS)),
    st.tuples(st.just("cut"), at, st.integers(1, 40)),
    st.tuples(st.just("insert"), at, st.integers(1, 40)),
    st.tuples(st.just("end"), at, st.integers(0, len(VALID))),
)


def mutate(edit_list: list[tuple[str, int, int]]) -> bytes:
    content = bytearray(VALID)
    for kind, where, value in edit_list:
        if kind == "byte":
            content[where : where + 1] = bytes([value])
        elif kind == "u32":
            content[where : where + 4] = struct.pack("<I", value & 0xFFFFFFFF)
        elif kind == "u64":
            content[where : where + 8] = struct.pack("<Q", value)
        elif kind == "cut":
            del content[where : where + value]
        elif kind == "insert":
            content[where:where] = content[:value]
        else:
            del content[value:]
    return bytes(content)


def strings(value: object) -> None:
    if isinstance(value, StringArray):
        value.tolist()
    elif isinstance(value, list):
        for item in value:
            strings(item)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=400, deadline=timedelta(seconds=1), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(edits, min_size=1, max_size=4))
def test_loads_or_is_refused(folder: Path, edit_list: list[tuple[str, int, int]]) -> None:
    path = folder / "model.gguf"
    path.write_bytes(mutate(edit_list))
    try:
        model = open_model(path)
        for value in model.metadata.values():
            strings(value)
    except FormatError as error:
        assert str(error).startswith(str(folder))
        return
    size = path.stat().st_size
    for tensor in model.tensors.values():
        assert tensor.offset >= 0 and 0 < tensor.nbytes <= size - tensor.offset
        block = GGML_TYPES[tensor.dtype]
        assert tensor.nbytes == tensor.elements // block.elements * block.nbytes


@settings(max_examples=100, deadline=timedelta(seconds=1))
@given(st.binary(max_size=200), st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", VALID[:60]]))
def test_noise(folder: Path, noise: bytes, start: bytes) -> None:
    path = folder / "noise.gguf"
    path.write_bytes(start + noise)
    try:
        open_model(path)
    except FormatError as error:
        assert str(path) in str(error)
