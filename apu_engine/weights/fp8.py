"""FP8 weights of safetensors: E4M3 codes, and beside each matrix the tensor of its scales.

A matrix `x.weight` (N, K) has `x.weight_scale_inv` (DeepSeek V3, Qwen3) or `x.weight_scale`, which codes are multiplied
with: one scale for each block of quantization_config's weight_block_size; without that key one for each row, (N, 1), or
one for all. Both stay in the file. Scales of activations are not used: activations stay float.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from apu_engine.errors import FormatError
from apu_engine.weights.model_file import Scaling, TensorRef
from apu_engine.weights.safetensors import Entry

METHODS = ("fp8", "fbgemm_fp8")  # quantization_config.quant_method
_SCALE_TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # GGUF's numbers
_SUFFIXES = ("_scale_inv", "_scale")
MAX_BLOCK = 1 << 20


class Fp8(NamedTuple):
    """Rows and columns of a scale's block, where config.json names any."""

    block: tuple[int, int] | None


def read_fp8(config: Path, quantised: dict[str, Any]) -> Fp8:
    """What quantization_config says. Raises FormatError naming the key that cannot be right."""
    if (fmt := quantised.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise FormatError(config, "quantization_config.fmt", f"expected e4m3, found {fmt!r:.80}: not supported")
    block = quantised.get("weight_block_size")
    if block is None:
        return Fp8(None)
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= MAX_BLOCK for n in block):
        problem = f"expected two sizes of 1 to {MAX_BLOCK:,}, found {block!r:.80}"
        raise FormatError(config, "quantization_config.weight_block_size", problem)
    return Fp8((block[0], block[1]))


Found = dict[str, tuple[int, Entry]]


def split_scales(folder: Path, entries: Found) -> tuple[Found, Found]:
    """(all other tensors, scales by the name of their matrix). Raises FormatError for scales of no matrix, or two."""
    others: Found = {}
    scales: Found = {}
    for name, found in entries.items():
        stem = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(f".weight{end}")), None)
        if stem is None:
            others[name] = found
            continue
        if stem not in entries or stem in scales:
            problem = f"is a second scale of {stem}" if stem in scales else f"has scales, but there is no {stem}"
            raise FormatError(folder, f'tensor "{name}"', problem)
        scales[stem] = found
    return others, scales


def scaling(folder: Path, fp8: Fp8, weight: Entry, found: tuple[int, Entry] | None) -> Scaling:
    """The scales of one matrix. Raises FormatError where they are missing or have another shape."""
    if len(weight.shape) != 2:
        problem = f"is F8_E4M3 of shape {list(weight.shape)}: only matrices (N, K) are supported"
        raise FormatError(folder, f'tensor "{weight.name}"', problem)
    if found is None:
        problem = f"is F8_E4M3, but there is no {weight.name}_scale_inv or {weight.name}_scale"
        raise FormatError(folder, f'tensor "{weight.name}"', problem)
    shard, scale = found
    rows, columns = weight.shape
    if fp8.block is not None:
        height, width = fp8.block
        accepted: list[tuple[int, ...]] = [(-(-rows // height), -(-columns // width))]
    else:
        height, width = (1 if scale.shape[:1] == (rows,) and rows > 1 else rows), columns
        accepted = [(rows, 1), (rows,)] if height == 1 else [(1, 1), (1,), ()]
    if scale.dtype not in _SCALE_TYPES:
        problem = f"has type {scale.dtype}, expected one of {', '.join(_SCALE_TYPES)}"
        raise FormatError(folder, f'tensor "{scale.name}"', problem)
    if scale.shape not in accepted:
        wanted = " or ".join(str(list(shape)) for shape in accepted)
        problem = f"has shape {list(scale.shape)}, expected {wanted} for a matrix {list(weight.shape)}"
        raise FormatError(folder, f'tensor "{scale.name}"', problem)
    shape = (-(-rows // height), -(-columns // width))
    ref = TensorRef(scale.name, _SCALE_TYPES[scale.dtype], shape, shard, scale.offset, scale.nbytes)
    return Scaling(ref, height, width)
