#!/usr/bin/env python3
"""Writes a model of random weights at true or reduced shapes, to test speed and memory without a download.

    scripts/synthesize.py --arch llama --preset 8b --type Q4_0 --out llama-8b.gguf
    scripts/synthesize.py --arch qwen3 --preset 8b --format safetensors --out Qwen3-8B
    scripts/synthesize.py --arch qwen3moe --preset 2.9gb --type IQ2_XXS
    scripts/synthesize.py --list

Every block is valid and weights have the deviation of an initialisation, 1 / sqrt(row length), so activations stay
finite over any depth. The vocabulary has the real model's size and special tokens, and words that are invented; it
encodes any text. The same arguments give the same bytes on every machine. Tensors are streamed in chunks of 1 MiB:
memory does not grow with the file.

--type names the type of the matrices in the layers. Embedding and output have the types that llama.cpp's quantiser
gives them beside it: Q6_K outputs for most, Q2_K embeddings and Q5_K outputs for the IQ1 and IQ2 types, and so on
(--list shows them). Norms, routers and rotary factors are F32. Rows that a type's blocks do not divide get the type
that llama.cpp falls back to.

--format safetensors writes a Hugging Face folder in BF16 (--type F16 or F32 for these), in shards of at most 4 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from synthesis.architectures import ARCHITECTURES, MIXES, Architecture, Preset, Tensor, layer_count, metadata, tensors
from synthesis.blocks import NUMBERS, BlockStream, random_bytes

ALIGNMENT = 32  # GGUF's default
MAX_LAYERS = 1024
_TITLE = "Synthetic"  # a model's name begins with it
_VECTORS = 1 << 16  # key of their random bits, beyond all type numbers
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # value types of GGUF metadata


class SynthesisError(Exception):
    """Something that the user can change; the message says what."""


# ---------------------------------------------------------------- container


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind = {"f": _F32, "i": _I32}[value.dtype.kind]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))


def header(keys: Iterable[tuple[str, Any]], table: list[Tensor]) -> bytes:
    """Everything before the first tensor's data, padded to the alignment."""
    pairs = [_string(key) + _value(value) for key, value in keys]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(table), len(pairs)), *pairs]
    offset = 0
    for tensor in table:
        dims = tensor.shape[::-1]  # GGUF's order: innermost first
        number = NUMBERS[tensor.dtype]
        parts.append(_string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset))
        offset += _padded(tensor.nbytes)
    raw = b"".join(parts)
    return raw + bytes(_padded(len(raw)) - len(raw))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- weights


def vector(tensor: Tensor, index: int, seed: int) -> NDArray[np.float32]:
    """Norms: 0.9 to 1.1. Rotary factors: those of Llama 3.1 (factor 8, 8,192 original positions, base 500,000)."""
    (count,) = tensor.shape
    if tensor.name == "rope_freqs.weight":
        return np.array([_llama3_factor(i / count) for i in range(count)], "<f4")
    raw = random_bytes(2 * count, seed, _VECTORS, index).view("<u2").astype(np.float32)
    norms: NDArray[np.float32] = (raw / np.float32(65536) * np.float32(0.2) + np.float32(0.9)).astype("<f4")
    return norms


def _llama3_factor(position: float) -> float:
    """What divides the frequency base ** -position: 1 for short waves, 8 for long ones, smooth between."""
    turns = 8192 * math.pow(500_000.0, -position) / (2 * math.pi)  # over the original context
    smooth = min(max((turns - 1) / 3, 0.0), 1.0)
    return 1 / ((1 - smooth) / 8 + smooth)


def table_rows(tensor: Tensor) -> NDArray[np.int32]:
    """(V, k) experts of each token, below `bound`, different ones in a row."""
    rows, k = tensor.shape
    first = np.arange(rows, dtype=np.int64)[:, None] * 7919
    return ((first + np.arange(k) * (tensor.bound // k)) % tensor.bound).astype("<i4")


def data(table: list[Tensor], seed: int) -> Iterator[bytes | memoryview]:
    """The tensors' bytes in order, each padded to the alignment."""
    streams: dict[str, BlockStream] = {}
    for index, tensor in enumerate(table):
        if len(tensor.shape) == 1:
            yield vector(tensor, index, seed).data
        elif tensor.dtype == "I32":
            yield table_rows(tensor).data
        else:
            if tensor.dtype not in streams:
                streams[tensor.dtype] = BlockStream(tensor.dtype, seed)
            for blocks in streams[tensor.dtype].take(tensor.blocks, 1 / math.sqrt(tensor.shape[-1])):
                yield blocks.data
        yield bytes(_padded(tensor.nbytes) - tensor.nbytes)


# ---------------------------------------------------------------- the file


def synthesize(
    out: Path, arch: str, preset: str, dtype: str, *, layers: int | None = None, seed: int = 0, force: bool = False
) -> list[Tensor]:
    """Writes `out`, which appears only when it is complete; what it holds. Raises SynthesisError."""
    chosen = ARCHITECTURES[arch]
    if preset not in chosen.presets:
        raise SynthesisError(f"--preset: {arch} has {', '.join(chosen.presets)}, found {preset!r}")
    shape, mix = chosen.presets[preset], MIXES[dtype]
    count = layer_count(chosen, shape, mix) if layers is None else layers
    table = tensors(chosen, shape, mix, count)
    head = header(metadata(arch, f"{_TITLE} {arch} {preset} {dtype}", shape, mix, count), table)
    need = len(head) + sum(_padded(tensor.nbytes) for tensor in table)
    partial = out.parent / f".synthesize.{os.getpid()}.partial"  # short: a long name leaves no room for more
    try:
        check_target(out, need, force)
        with partial.open("xb") as file:
            write(file, head, table, seed)
        if out.exists() and not force:  # appeared meanwhile
            raise SynthesisError(f"{out}: exists; --force replaces it")
        partial.replace(out)
    except OSError as error:
        raise SynthesisError(f"{out}: {error.strerror or error} (needs {need:,} bytes)") from None
    finally:
        partial.unlink(missing_ok=True)
    return table


def synthesize_folder(
    out: Path, arch: str, preset: str, dtype: str, *, layers: int | None = None, seed: int = 0, force: bool = False
) -> list[Tensor]:
    """As `synthesize`, a Hugging Face folder."""
    from synthesis import folders

    chosen = ARCHITECTURES[arch]
    if arch not in folders.SUPPORTED or dtype not in folders.TYPES:
        known = f"{', '.join(folders.SUPPORTED)} in {', '.join(folders.TYPES)}"
        raise SynthesisError(f"--format: safetensors are written of {known}, found {arch} in {dtype}")
    if preset not in chosen.presets:
        raise SynthesisError(f"--preset: {arch} has {', '.join(chosen.presets)}, found {preset!r}")
    shape, mix = chosen.presets[preset], MIXES[dtype]
    count = layer_count(chosen, shape, mix) if layers is None else layers
    table = tensors(chosen, shape, mix, count)
    kind = folders.model_type(arch, shape)
    files = folders.shards(folders.stored(kind, table, shape.letters), dtype)
    title = f"{_TITLE} {arch} {preset} {dtype}"
    texts = folders.texts(kind, arch, title, shape, count, dtype, files)
    need = sum(tensor.elements for shard in files for tensor in shard) * folders.TYPES[dtype] + (64 << 20)
    partial = out.parent / f".synthesize.{os.getpid()}.partial"
    try:
        check_target(out, need, force, folder=True)
        partial.mkdir()
        stream = BlockStream(dtype, seed)
        for number, (name, shard) in enumerate(zip(folders.shard_names(len(files)), files, strict=True)):
            with (partial / name).open("xb") as file:
                file.write(folders.header(shard, dtype))
                for index, tensor in enumerate(shard):
                    if len(tensor.shape) > 1:
                        for blocks in stream.take(tensor.elements, 1 / math.sqrt(tensor.shape[-1])):
                            file.write(blocks.data)
                    else:
                        file.write(folders.norm(tensor, dtype, seed, number << 32 | index))
        for name, text in texts.items():
            (partial / name).write_text(text)
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except OSError as error:
        raise SynthesisError(f"{out}: {error.strerror or error} (needs {need:,} bytes)") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return table


def _is_synthetic(folder: Path) -> bool:
    """Whether an earlier run wrote this folder, so that it may be replaced."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(json.loads((folder / "config.json").read_text()).get("_name_or_path", "")).startswith(_TITLE)
    return False


def check_target(out: Path, need: int, force: bool, folder: bool = False) -> None:
    """Whether a file, or a `folder`, of `need` bytes may be written to `out`, and fits."""
    if folder and out.exists() and force and not _is_synthetic(out):
        raise SynthesisError(f"{out}: is no folder that this script wrote; --force does not replace it")
    if out.exists() and not out.is_file() and not folder:
        raise SynthesisError(f"{out}: is no regular file; name a file to write")
    if out.exists() and not force:
        raise SynthesisError(f"{out}: exists; --force replaces it")
    if not out.parent.is_dir():
        raise SynthesisError(f"{out}: the folder {out.parent} does not exist; make it or name another")
    free = shutil.disk_usage(out.parent).free
    if free < need:
        raise SynthesisError(
            f"{out}: needs {need:,} bytes, but {out.parent} has {free:,} free; free some, name another folder "
            "with --out, or shorten the model with --layers"
        )


def write(file: BinaryIO, head: bytes, table: list[Tensor], seed: int) -> None:
    file.write(head)
    for chunk in data(table, seed):
        file.write(chunk)


# ---------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `--list | head`
        print(listing())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the partial file goes
    began = time.monotonic()
    try:
        write_model = synthesize_folder if args.format == "safetensors" else synthesize
        table = write_model(
            args.out, args.arch, args.preset, args.type, layers=args.layers, seed=args.seed, force=args.force
        )
    except SynthesisError as error:
        print(f"synthesize: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("synthesize: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    took = time.monotonic() - began
    size = sum(path.stat().st_size for path in (args.out.iterdir() if args.out.is_dir() else [args.out]))
    layers = sum(tensor.name.endswith(".attn_norm.weight") for tensor in table)
    parameters = sum(math.prod(tensor.shape) for tensor in table)
    print(
        f"{args.out}: {args.arch} {args.preset} {args.type}, {layers} layers, {parameters / 1e9:.2f} B parameters, "
        f"{size / 1e9:.2f} GB in {took:.1f} s ({size / 1e9 / took:.2f} GB/s), "
        f"{peak_memory() >> 20} MiB of memory at most"
    )
    return 0


def peak_memory() -> int:
    """Bytes; of this program alone, where getrusage would count what its parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama", help="architecture (default %(default)s)")
    parser.add_argument("--preset", default="tiny", help="sizes, see --list (default %(default)s)")
    parser.add_argument("--format", choices=("gguf", "safetensors"), default="gguf", help="(default %(default)s)")
    parser.add_argument("--type", type=str.upper, help="of the layers' matrices (default Q4_0, BF16 of safetensors)")
    parser.add_argument("--layers", type=int, help="number of layers (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="for other weights (default %(default)s)")
    parser.add_argument("--out", type=Path, help="default: models/synthetic-ARCH-PRESET-TYPE, with .gguf for a file")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--list", action="store_true", help="print architectures, presets and types, then exit")
    args = parser.parse_args(argv)
    args.type = args.type or ("BF16" if args.format == "safetensors" else "Q4_0")
    if args.type not in MIXES:
        parser.error(f"--type: expected one of {', '.join(MIXES)}, found {args.type!r}")
    if args.layers is not None and not 1 <= args.layers <= MAX_LAYERS:
        parser.error(f"--layers: expected 1 to {MAX_LAYERS}, found {args.layers}")
    if not 0 <= args.seed < 1 << 64:
        parser.error(f"--seed: expected 0 to 2^64 - 1, found {args.seed}")
    if args.out is None:
        folder = Path(__file__).resolve().parents[1] / "models"
        suffix = "" if args.format == "safetensors" else ".gguf"
        args.out = folder / f"synthetic-{args.arch}-{args.preset}-{args.type}{suffix}"
    return args


def listing() -> str:
    """Presets with their sizes at two types, and the types with what goes beside them."""
    lines = [f"{'arch':<10}{'preset':<8}{'layers':>7}{'Q4_0 GB':>9}{'Q8_0 GB':>9}  shapes of"]
    for name, arch in ARCHITECTURES.items():
        for preset, shape in arch.presets.items():
            sizes = "".join(f"{_size(arch, shape, dtype) / 1e9:>9.3f}" for dtype in ("Q4_0", "Q8_0"))
            layers = "fit" if shape.size else shape.letters["L"]
            lines.append(f"{name:<10}{preset:<8}{layers:>7}{sizes}  {shape.about}")
    lines.append(f"\n{'type':<10}{'layers':<9}{'embedding':<11}output (and embedding, where it serves as output)")
    for dtype, mix in MIXES.items():
        layers = f"{mix.layers}+{mix.more}" if mix.more else mix.layers
        lines.append(f"{dtype:<10}{layers:<11}{mix.embedding:<9}{mix.output}")
    return "\n".join(lines)


def _size(arch: Architecture, preset: Preset, dtype: str) -> int:
    mix = MIXES[dtype]
    return sum(tensor.nbytes for tensor in tensors(arch, preset, mix, layer_count(arch, preset, mix)))


if __name__ == "__main__":
    sys.exit(main())
