#!/usr/bin/env python3
"""Verifies a GPU against the CPU backend: kernel tests, whole models, kernel speed; one table and one report.

Run scripts/gpu_verify.sh, which builds first; this is its second half. On every model it compares, over the same text:

    logits       largest difference and mean KL divergence (CPU to GPU) of a prompt read many rows at a time
    rows         the same of 1 and of 8 rows a step
    greedy       200 tokens; where the two first differ, how far apart the CPU's best two logits are there
    accuracy     mean KL divergence of the default precision from the CPU's exact logits, beside the CPU's own
    graph        graphs against kernels launched one by one: the same bits
    again        the same prompt once more: the same bits

The first three are in precision "exact". In the default precision activations are rounded to int8 again and again, and
a difference in the last bit of a sum moves some of them to the next integer: any two orders of summation, of two levels
of the CPU too, end as far from each other as each is from float. There `accuracy` says whether the GPU is as good.

The report is JSON. It holds the GPU's name, target and driver, versions, and the figures; no host or user name, no
serial number, no path. Models are named by their files' names. Exit status: 0 all hold, 1 something failed, 2 it could
not be run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_bench
import numpy as np
from numpy.typing import NDArray

from apu_engine import LLM, __version__
from apu_engine.catalog import fetch
from apu_engine.errors import ApuError

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("smollm2-135m-instruct", "gemma3-270m")  # of the catalog
TEXT = ROOT / "tests" / "data" / "prose.txt"
TESTS = (
    "test_kernel_api.py", "test_plan_ops.py", "test_plan_models.py", "test_latent_on_gpu.py", "test_streams_on_gpu.py",
    "test_compress_on_gpu.py", "test_index_on_gpu.py", "test_sparse_attention_on_gpu.py", "test_deepseek4_on_gpu.py",
    "test_submissions.py", "test_step_kernels.py", "test_memory_on_gpu.py",
)  # fmt: skip
FULL, QUICK = (256, 200), (64, 40)  # tokens read, tokens generated
MOST_KL = 1e-4
MOST_LOSS = 1.25  # of the CPU's divergence in the default precision
STATES = {True: "ok", False: "FAILED", None: "not run"}
Logits = NDArray[np.float32]


@dataclass
class Check:
    """One line of the table; `ok` is None for what was not run."""

    name: str
    ok: bool | None
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        with gpu_bench.open_gpu(args.device) as device:
            props = device.props
            bench = None if args.no_bench else gpu_bench.measure(device, args.quick)
    except ApuError as error:
        print(f"gpu_verify: {error}", file=sys.stderr)
        return 2
    name = args.device if args.device != "auto" else props.kind
    print(f"{props.kind} {props.name} ({props.arch})")
    checks = [] if args.no_tests else [kernel_tests(props.kind, args.quick)]
    figures: dict[str, Any] = {}
    for path in args.model or small_models(checks):
        try:
            found, figures[path.name] = model_checks(path, name, args.quick)
        except ApuError as error:
            found = [Check(path.name, False, scrub(str(error)))]
        checks += found
    if not figures:
        checks.append(Check("models", False, "none; give --model FILE"))
    for check in checks:
        print(f"{STATES[check.ok]:9}{check.name:40}{check.detail}")
    if bench:
        gpu_bench.print_report(bench)
    report = make_report(props, checks, figures, bench)
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    print(f"report: {args.report.name}")
    return 1 if any(check.ok is False for check in checks) else 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="hip[:N], cuda[:N] or auto (default)")
    parser.add_argument("--model", type=Path, action="append", metavar="FILE", help="a GGUF file; may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, tests and benchmarks")
    parser.add_argument("--no-tests", action="store_true", help="leave the kernel tests out")
    parser.add_argument("--no-bench", action="store_true", help="leave the benchmark out")
    parser.add_argument("--report", type=Path, default=Path("gpu_report.json"), help="default %(default)s")
    return parser.parse_args(argv)


def small_models(checks: list[Check]) -> list[Path]:
    """The small models of the catalog, fetched where they are missing; those that cannot be had are noted."""
    paths = []
    for name in MODELS:
        try:
            paths.append(fetch(name))
        except ApuError as error:
            checks.append(Check(name, None, scrub(str(error))))
    return paths


def kernel_tests(kind: str, quick: bool) -> Check:
    """The tests that run on a device, on this one."""
    if any(importlib.util.find_spec(module) is None for module in ("pytest", "pytest_timeout", "gguf")):
        return Check("kernel tests", None, "pytest, pytest-timeout and gguf are not installed")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "1200"]
    command += [str(ROOT / "tests" / "gpu" / test) for test in (TESTS[:1] if quick else TESTS)]
    environment = {**os.environ, "APU_TEST_DEVICE": kind}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    failed = [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("FAILED", "ERROR"))]
    if not summary:
        counted = sum(line.count(".") for line in lines if re.fullmatch(r"[.sx]+\s+\[ *\d+%\]", line))
        summary = f"{counted} passed" if done.returncode == 0 else f"pytest ended with status {done.returncode}"
    return Check("kernel tests", done.returncode == 0, "; ".join([summary.strip("= "), *failed[:5]]))


def model_checks(path: Path, device: str, quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Everything about one model."""
    tokens, greedy = QUICK if quick else FULL
    name = path.stem[:24]
    options: dict[str, Any] = {"ctx": tokens + greedy + 64}

    exact = {**options, "precision": "exact"}

    with LLM(path, device="cpu", **exact) as cpu:
        ids = cpu.tokenize(TEXT.read_text("utf-8"))[:tokens]
        expected = cpu.logits(ids)
        expected_tokens = generate(cpu, ids[:16], greedy)
    with LLM(path, device="cpu", **options) as cpu:
        own_kl = mean_kl(expected, cpu.logits(ids))
    with LLM(path, device=device, **exact) as gpu:
        found, tokens_found = gpu.logits(ids), generate(gpu, ids[:16], greedy)
    by_rows = {}
    for rows in (1, 8):
        with LLM(path, device=device, batch=rows, **exact) as gpu:
            by_rows[rows] = gpu.logits(ids)
    with LLM(path, device=device, **options) as gpu:
        first, again = gpu.logits(ids), gpu.logits(ids)
        first_tokens, again_tokens = generate(gpu, ids[:16], greedy), generate(gpu, ids[:16], greedy)
    with LLM(path, device=device, graph=False, **options) as gpu:
        eager, eager_tokens = gpu.logits(ids), generate(gpu, ids[:16], greedy)

    kl, default_kl = mean_kl(expected, found), mean_kl(expected, first)
    largest = float(np.abs(expected - found).max())
    figures: dict[str, Any] = {
        "tokens": len(ids),
        "largest_logit_difference": largest,
        "mean_kl": kl,
        "rows": {rows: float(np.abs(expected - logits).max()) for rows, logits in by_rows.items()},
        "rows_kl": {rows: mean_kl(expected, logits) for rows, logits in by_rows.items()},
        "default_kl": default_kl,
        "default_kl_of_cpu": own_kl,
    }
    same = first_difference(expected_tokens, tokens_found)
    figures["greedy_equal"] = same
    detail = f"{same} of {len(expected_tokens)} tokens equal"
    close = True
    if same < len(expected_tokens):
        with LLM(path, device="cpu", **exact) as cpu:
            last = cpu.logits([*ids[:16], *expected_tokens[:same]])[-1]
        best = np.sort(last)[-2:]
        gap = float(best[1] - best[0])
        figures["greedy_gap"] = gap
        close = gap < 2 * max(largest, *figures["rows"].values())
        detail += f", then the best two are {gap:.3g} apart"
    bound = " and ".join(f"{rows}: {difference:.3g}" for rows, difference in figures["rows"].items())
    good = default_kl < MOST_LOSS * own_kl + MOST_KL
    graphs = equal(first, eager) and first_tokens == eager_tokens
    checks = [
        Check(f"{name}: logits", kl < MOST_KL, f"largest difference {largest:.3g}, mean KL {kl:.2g}"),
        Check(f"{name}: rows", max(figures["rows_kl"].values()) < MOST_KL, f"largest difference of {bound}"),
        Check(f"{name}: greedy", close, detail),
        Check(f"{name}: accuracy", good, f"mean KL of int8 {default_kl:.2g}, the CPU's {own_kl:.2g}"),
        Check(f"{name}: graph", graphs, "graphs and eager: same bits"),
        Check(f"{name}: again", equal(first, again) and first_tokens == again_tokens, "run to run: same bits"),
    ]
    for check in checks[4:]:
        if not check.ok:
            check.detail = check.detail.replace("same bits", "DIFFERENT bits")
    return checks, figures


def generate(llm: LLM, prompt: Sequence[int], count: int) -> list[int]:
    return list(llm.generate(prompt, count, temperature=0, ignore_eos=True).tokens)


def equal(a: Logits, b: Logits) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens agree from the start on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def mean_kl(expected: Logits, found: Logits) -> float:
    """Mean over positions of KL(expected || found), in nats."""
    total = 0.0
    for a, b in zip(expected, found, strict=True):
        p, q = log_softmax(a), log_softmax(b)
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(expected)


def log_softmax(row: Logits) -> NDArray[np.float64]:
    wide = row.astype(np.float64)
    wide -= wide.max()
    out: NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return out


def scrub(text: str) -> str:
    """Without folders of paths."""
    return re.sub(r"(?<![\w.])~?(?:/[\w.@+-]+)+/", "", text)


def make_report(props: Any, checks: Sequence[Check], figures: dict[str, Any], bench: Any) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "apu_engine": __version__,
        "commit": commit or None,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "device": {
            "kind": props.kind,
            "name": props.name,
            "arch": props.arch,
            "integrated": props.integrated,
            "wave_size": props.wave_size,
            "memory_gib": round(props.memory_bytes / (1 << 30), 1),
            "driver": props.driver_version,
        },
        "checks": [{**asdict(check), "detail": scrub(check.detail)} for check in checks],
        "models": figures,
        "bench": None if bench is None else {key: bench[key] for key in ("plain_read_gb_per_s", "figures")},
    }


if __name__ == "__main__":
    sys.exit(main())
