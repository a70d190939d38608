#!/usr/bin/env python3
"""Writes docs/models.md: which architecture runs from which format on which backend, on what evidence, and what
well-known models need of memory.

    scripts/support_matrix.py             # writes the page
    scripts/support_matrix.py --check     # exit status 1 where the page is not what would be written

Rows come from the registries (arch.ARCHITECTURES, weights.families.FAMILIES), tiers from the tables that the tests
iterate over, and from RUNS, the one thing written by hand: what scripts/gpu_verify.sh or the tests with APU_TEST_DEVICE
ran on a card. Memory is what `apu-engine show` says of a header at true shapes (scripts/synthesize.py).
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synthesis.architectures import ARCHITECTURES, MIXES, metadata, tensors
from synthesize import header

from apu_engine import arch
from apu_engine.config import EngineConfig
from apu_engine.engine.context import Fit, fit
from apu_engine.memory.budget import estimates
from apu_engine.memory.limits import preset
from apu_engine.options import format_size
from apu_engine.weights.families import FAMILIES
from apu_engine.weights.opening import open_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
CTX = 32_768
MACHINES = ("strix-halo-128", "strix-halo-128-tuned", "strix-halo-96", "strix-halo-64")
NOT_RUN, TESTED, COMPILED, SIMULATED = "not run", "tested", "compiled", "simulated"
NVIDIA, AMD = "run on NVIDIA", "reported on AMD"

# What ran on an NVIDIA H200, by architecture: whole published files, or the tests' tiny models. From GGUF files.
RUNS: dict[str, str] = {
    "llama": "",
    "gemma3": "",
    "qwen3": "",
    "qwen3moe": "",
    "deepseek2": "tiny models",
    "deepseek4": "tiny models, and V4 Flash's shapes with random weights",
}
REPORTS: dict[str, str] = {}  # by architecture: reports of scripts/gpu_verify.sh from AMD hardware


@dataclass(frozen=True, slots=True)
class Known:
    """A well-known file as a preset of scripts/synthesize.py: its shapes, and types as quantisers mix them."""

    title: str
    architecture: str
    preset: str
    types: str


KNOWN = (
    Known("Llama 3.1 8B, Q4_K_M", "llama", "8b", "Q4_K_M"),
    Known("Qwen3-8B, BF16", "qwen3", "8b", "BF16"),
    Known("Qwen3-30B-A3B, Q4_K_M", "qwen3moe", "30b", "Q4_K_M"),
    Known("gpt-oss-20b, MXFP4", "gpt-oss", "20b", "MXFP4"),
    Known("gpt-oss-120b, MXFP4", "gpt-oss", "120b", "MXFP4"),
    Known("GLM 4.5-Air, Q4_K", "glm4moe", "4.5-air", "Q4_K"),
    Known("DeepSeek V2-Lite, Q8_0", "deepseek2", "v2-lite", "Q8_0"),
    Known("DeepSeek V3, Q2_K", "deepseek2", "v3", "Q2_K"),
    Known("DeepSeek V3, BF16", "deepseek2", "v3", "BF16"),
    Known("DeepSeek V4 Flash, Q2 (IQ2_XXS, Q2_K, Q8_0)", "deepseek4", "v4-flash-q2", "Q4_0"),
)

HEAD = """# Models

Written by `scripts/support_matrix.py` from the registries and the tests; a test compares. The other side, which types
of weights run where, is in the [README](../README.md#what-works).

Tiers: **tested** (the CPU backend, by tests against transformers on tiny random models, 1e-4 in any logit),
**compiled** (the ops' kernels build for gfx1151, gfx1150, gfx110x, gfx120x and gfx90a; the machine code is checked),
**simulated** (the same kernels and host code run on the CPU through a stand-in for AMD's runtime, against the CPU
backend), **run on NVIDIA** (the same sources on an H200), **reported on AMD** (a user's report; {reports}).

| architecture | format | CPU | AMD GPU (HIP) | NVIDIA GPU |
| --- | --- | --- | --- | --- |
"""
MEMORY = """
## Memory

Needs at {ctx:,} tokens, KV cache in F16, as `apu-engine show --ctx {ctx} --machine NAME` tells from a file's header.
File: tensors of these shapes and types, the pages that are mapped. In place they are all of the weights there is;
staged, the same bytes are allocated on the GPU. On the machines: `in place` needs no copy, `staged` fits as one copy
too, and `+N GiB` says what is missing in place (weights, KV cache, scratch and a runtime's 256 MiB against the tightest
limit). Nothing of this was measured on those machines.

| model | architecture | file | KV cache | scratch | {machines} |
| --- | --- | ---: | ---: | ---: |{lines}
"""
TAIL = """
The CPU backend needs KV cache and scratch as memory of its own; weights are file pages there, which the kernel can
read again.{absent}
"""


NOT_YET = ("gemma4", "qwen3next", "qwen35", "qwen35moe")  # told until they are registered


def keys_of(path: str, name: str) -> frozenset[str]:
    """What the dictionary or list `name` of a test module spells out; read, not imported: that may need torch."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        value = node.value
        if isinstance(target, ast.Name) and target.id == name and isinstance(value, (ast.Dict, ast.List)):
            found = value.keys if isinstance(value, ast.Dict) else value.elts
            return frozenset(str(item.value) for item in found if isinstance(item, ast.Constant))
    raise LookupError(f"{path}: has no dictionary or list {name}")


def rows() -> Iterator[tuple[str, ...]]:
    """Architecture, format, tiers of each backend."""
    files = keys_of("tests/gpu/test_plan_models.py", "MODELS")  # on the CPU, and on the stand-in against it
    folders = keys_of("tests/folders.py", "KINDS")
    folders_on_gpu = keys_of("tests/gpu/test_folders_on_gpu.py", "KINDS")
    for name in arch.ARCHITECTURES:
        yield (
            name,
            "GGUF",
            TESTED if name in files else NOT_RUN,
            _tiers((COMPILED, SIMULATED) if name in files else (COMPILED,), REPORTS.get(name), AMD),
            _tiers((), RUNS.get(name), NVIDIA) or NOT_RUN,
        )
        families = {id(family): family for family in FAMILIES.values() if family.architecture == name}
        for family in families.values():
            kinds = [kind for kind, other in FAMILIES.items() if other is family]
            yield (
                "",
                f"folder, {', '.join(f'`{kind}`' for kind in kinds)}",
                TESTED if folders.intersection(kinds) else NOT_RUN,
                _tiers((COMPILED, SIMULATED) if folders_on_gpu.intersection(kinds) else (COMPILED,), None, AMD),
                NOT_RUN,
            )


def _tiers(found: tuple[str, ...], note: str | None, last: str) -> str:
    """`note` None: it did not run there."""
    more = () if note is None else (f"{last}, {note}" if note else last,)
    return ", ".join((*found, *more))


def fitted(known: Known, machine: str) -> Fit:
    """What loading would find, from a header without tensor data."""
    architecture = ARCHITECTURES[known.architecture]
    sizes = architecture.presets[known.preset]
    layers, mix = sizes.letters["L"], MIXES[known.types]
    table = tensors(architecture, sizes, mix, layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(header(metadata(known.architecture, known.title, sizes, mix, layers), table))
        model = open_model(path, whole=False)
        config = EngineConfig(ctx=CTX, force=True)
        return fit(config, model, None, ("registered", "staged"), preset(machine))


@cache
def memory_row(known: Known) -> str:
    first = fitted(known, MACHINES[0])
    return "".join(
        f"| {cell} "
        for cell in (
            known.title,
            known.architecture,
            format_size(first.needs.weights),
            format_size(first.needs.kv),
            format_size(first.needs.scratch),
            *(_verdict(first, machine) for machine in MACHINES),
        )
    )


def _verdict(found: Fit, machine: str) -> str:
    in_place, staged = estimates(("registered", "staged"), found.needs, preset(machine))
    if not in_place.fits:
        return f"+{format_size(max(demand.needed - demand.available for demand in in_place.missing))}"
    return "in place, staged" if staged.fits else "in place"


def page() -> str:
    absent = [name for name in NOT_YET if name not in arch.ARCHITECTURES]
    head = HEAD.format(reports="none yet" if not REPORTS else f"{len(REPORTS)} so far")
    matrix = "".join(f"| {' | '.join(cells)} |\n" for cells in rows())
    body = "".join(f"{memory_row(known)}|\n" for known in KNOWN)
    memory = MEMORY.format(ctx=CTX, machines=" | ".join(MACHINES), lines=" --- |" * len(MACHINES))
    return head + matrix + memory + body + TAIL.format(absent=f" Not there yet: {', '.join(absent)}." if absent else "")


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/models.md.")
    parser.add_argument("--check", action="store_true", help="only compare the page")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE}: is out of date; run scripts/support_matrix.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
