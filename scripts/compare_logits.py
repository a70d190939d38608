#!/usr/bin/env python3
"""Measures how far logits are from float32's on a text: KL divergence and argmax agreement.

    scripts/compare_logits.py MODEL [--text FILE] [--tokens N]      MODEL: a GGUF file or a name of the catalog
    scripts/compare_logits.py MODEL --kv-type q8_0                  another type of the KV cache as well
    scripts/compare_logits.py MODEL --write-ids ids.i32             token ids (T) int32, for another engine
    scripts/compare_logits.py MODEL --peer llama.cpp=logits.f32     its logits (T, V) float32, compared as well

The oracle is transformers' model in float32 on the dequantised weights (tests/quality/accuracy.py), so this needs a
checkout with the `test` extra, which `./build.sh --test` installs. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apu_engine._native import Device
from apu_engine.arch import KV_TYPES
from apu_engine.catalog import fetch, load_catalog
from apu_engine.errors import ApuError
from apu_engine.text.tokenizer import Tokenizer
from apu_engine.weights.opening import open_model

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> int:
    args = arguments()
    path = fetch(args.model) if args.model in load_catalog() else Path(args.model)
    model = open_model(path)
    ids = Tokenizer.from_metadata(model.metadata, str(path)).encode(args.text.read_text("utf-8"))[: args.tokens]
    if not ids:
        raise ApuError(f"{args.text}: no tokens; expected text")
    if args.write_ids:
        np.array(ids, "<i4").tofile(args.write_ids)
        print(f"{len(ids)} token ids written to {args.write_ids}")
        return 0
    vocabulary = model.tensors["token_embd.weight"].shape[0]
    peers = {name: read_logits(Path(file), len(ids), vocabulary) for name, file in args.peer}

    sys.path[:0] = [str(TESTS), str(TESTS / "arch"), str(TESTS / "quality")]
    try:
        from accuracy import VARIANTS, compare
    except ImportError as error:
        raise ApuError(f"{error}; the oracle needs the test extra: .venv/bin/pip install -e '.[test]'") from None

    with Device("cpu", threads=args.threads) as device:
        variants = VARIANTS | {f"{kv_type} cache": {"kv_type": kv_type} for kv_type in args.kv_type}
        found = compare(path, ids, device, variants, peers)
    print(f"{path.name}, {len(ids)} tokens of {args.text.name}")
    print(f"{'':12}{'mean KL':>12}{'+-':>12}{'argmax':>9}")
    for name, result in found.items():
        print(f"{name:12}{result.mean_kl:12.3g}{result.error:12.2g}{result.argmax:9.2%}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="GGUF file (llama or gemma3), or a name of models/catalog.toml")
    parser.add_argument("--text", type=Path, default=TESTS / "data" / "prose.txt", help="text (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of it, at most (default %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="threads (default: as the engine chooses)")
    parser.add_argument(
        "--kv-type", choices=KV_TYPES, action="append", default=[], help="measure the default with this cache too"
    )
    parser.add_argument("--write-ids", metavar="FILE", help="write the token ids and stop")
    parser.add_argument(
        "--peer", type=pair, action="append", default=[], metavar="NAME=FILE", help="logits of another engine"
    )
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens: expected at least 1, found {args.tokens}")
    return args


def pair(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, found {text!r}")
    return name, file


def read_logits(path: Path, rows: int, vocabulary: int) -> NDArray[np.float32]:
    """(rows, V) float32, mapped."""
    expected = rows * vocabulary * 4
    if path.stat().st_size != expected:
        raise ApuError(
            f"{path}: expected {expected:,} bytes, {rows} rows of {vocabulary:,} float32 logits, "
            f"found {path.stat().st_size:,}; make it from the ids that --write-ids gives"
        )
    return np.memmap(path, "<f4", "r", shape=(rows, vocabulary))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ApuError, OSError, ValueError) as error:
        sys.exit(f"compare_logits: {error}")
