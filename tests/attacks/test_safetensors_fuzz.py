"""A short fuzz: whatever happens to the bytes of a valid folder, it opens or it is an ApuError, soon."""

from __future__ import annotations

import json
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors_builder import entry, safetensors

from apu_engine import arch
from apu_engine.errors import ApuError, FormatError
from apu_engine.weights.opening import open_model
from apu_engine.weights.safetensors import read_header

VALID = safetensors(
    {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": entry("F32", (3, 4), 0, 48),
        "model.norm.weight": entry("BF16", (4,), 48, 56),
        "empty": entry("U8", (0, 7), 56, 56),
        "lm_head.weight": entry("F16", (3, 4), 56, 80),
    },
    80,
)
HEADER = len(VALID) - 80
NUMBERS = [b"0", b"-1", b"1e9", b"18446744073709551616", b"9223372036854775807", b"[]", b"{}", b"null", b'"F4"', b"NaN"]
at = st.integers(0, HEADER - 1)
edits = st.one_of(
    st.tuples(st.just("byte"), at, st.integers(0, 255)),
    st.tuples(st.just("u64"), st.just(0), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("number"), at, st.integers(0, len(NUMBERS) - 1)),
    st.tuples(st.just("cut"), at, st.integers(1, 40)),
    st.tuples(st.just("copy"), at, st.integers(1, 200)),
    st.tuples(st.just("end"), at, st.integers(0, len(VALID))),
)
LIMITS = settings(
    max_examples=300,
    deadline=timedelta(seconds=2),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def edited(raw: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    out = bytearray(raw)
    for kind, place, value in changes:
        place = min(place, max(0, len(out) - 1))
        if kind == "byte":
            out[place : place + 1] = bytes([value])
        elif kind == "u64":
            out[place : place + 8] = struct.pack("<Q", value)
        elif kind == "number":
            out[place : place + 1] = NUMBERS[value]
        elif kind == "cut":
            del out[place : place + value]
        elif kind == "copy":
            out[place:place] = out[place : place + value]
        else:
            del out[value:]
    return bytes(out)


def relength(raw: bytes) -> bytes:
    """The header's length made right again, so that an edit reaches what is behind it."""
    return struct.pack("<Q", max(0, len(raw) - 88)) + raw[8:]


@LIMITS
@given(changes=st.lists(edits, min_size=1, max_size=4), fitted=st.booleans())
def test_headers(tmp_path: Path, changes: list[tuple[str, int, int]], fitted: bool) -> None:
    raw = edited(VALID, changes)
    path = tmp_path / "model.safetensors"
    path.write_bytes(relength(raw) if fitted else raw)
    try:
        header = read_header(path)
    except FormatError as error:
        assert error.file == str(path) and error.problem
        return
    covered = sorted((item.offset, item.nbytes) for item in header.tensors.values() if item.nbytes)
    assert sum(nbytes for _, nbytes in covered) <= header.size
    assert all(offset + nbytes <= header.size for offset, nbytes in covered)


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "head_dim": 4,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0},
    "text_config": {"sliding_window": None, "tie_word_embeddings": False},
    "eos_token_id": [1, 2],
    "layer_types": ["full_attention"],
}
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["type", "factor", "rope_type"]), st.sampled_from(["yarn", 1, None]), max_size=2),
)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "qwen3_moe", "gemma3", "deepseek_v2", "deepseek_v3"])
def test_hyperparameters(tmp_path: Path, kind: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(VALID)

    @LIMITS
    @given(changes=st.dictionaries(st.sampled_from([*CONFIG, "rope_scaling", "vocab_size"]), values, max_size=3))
    def check(changes: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes | {"model_type": kind}))
        with pytest.raises(ApuError):  # at the latest for the tensors that are missing
            arch.describe(open_model(tmp_path))

    check()
