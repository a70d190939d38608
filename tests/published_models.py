"""Headers of published files from tests/fixtures/published, over a hole of the true size: they take no disk space.

Vocabularies are invented, of the size that the fixture states.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from synthesis import vocabularies

PUBLISHED = Path(__file__).parent / "fixtures" / "published"
_SCALARS = {"u32": "add_uint32", "i32": "add_int32", "f32": "add_float32", "bool": "add_bool", "string": "add_string"}


class Published(NamedTuple):
    """`metadata`: key -> (type, value; or a vocabulary's length). `tensors`: name -> (type, shape, outermost first)."""

    metadata: dict[str, tuple[str, Any]]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    file_bytes: int


def published(name: str) -> Published:
    """The fixture of that name."""
    raw = json.loads((PUBLISHED / f"{name}.json").read_text())
    metadata = {key: (kind, value) for key, kind, value in raw["metadata"]}
    tensors = {}
    for own, dtype, dims, *layers in raw["tensors"]:
        for prefix in map("blk.{}.".format, _layers(*layers)) if layers else ("",):
            tensors[prefix + own] = (dtype, tuple(dims[::-1]))
    return Published(metadata, tensors, raw["file_bytes"])


def _layers(text: str) -> range:
    """ "2-42/2": every second of 2 to 42."""
    ends, _, step = text.partition("/")
    first, last = map(int, ends.split("-"))
    return range(first, last + 1, int(step or 1))


def write_sparse(path: Path, model: Published, types: Mapping[str, str] | None = None, *, hole: bool = True) -> Path:
    """The header, then a hole where the tensors are, or nothing. `types` replaces those of tensors by their last name
    but the suffix.
    """
    writer = gguf.GGUFWriter(path, model.metadata["general.architecture"][1])
    words = vocabularies.deepseek4(model.metadata["tokenizer.ggml.tokens"][1])
    for key, (kind, value) in model.metadata.items():
        if key == "general.architecture":
            continue
        if kind.endswith("[]"):
            values = value if isinstance(value, list) else list(words[key])
            assert len(values) == (len(value) if isinstance(value, list) else value), key
            writer.add_array(key, [int(item) if kind == "i32[]" else item for item in values])
        else:
            getattr(writer, _SCALARS[kind])(key, words[key] if value is None else value)
    total = 0
    for name, (dtype, shape) in model.tensors.items():
        kind = Type[(types or {}).get(name.split(".")[-2], dtype)]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(shape) // block * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    if hole:
        os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return path
