#!/usr/bin/env python3
"""Shows, from /proc, that a model's weights exist once: as clean, shared pages of its file.

    scripts/memory_footprint.py [MODEL]       load, generate, check; the demo model when none is named
    scripts/memory_footprint.py --pid PID     inspect a running server or any process that has mapped a model

Checked: the files are mapped read-only and shared, without a dirty or copied page, and hold the weights; anonymous
memory grew (baseline: interpreter, tokenizer and thread pool up, nothing mapped) by no more than KV cache, scratch
and the larger of 5% of the weights and 8 MiB; a second process that loads the same file adds no file pages (Pss).
On a GPU (--device cuda:0, hip) KV cache and scratch are the device's: anonymous memory stays flat but for 64 MiB of the
runtime's. Weights in place: as above, and device memory holds none of them. Weights staged: device memory holds
exactly one copy, and no page of the files is mapped or cached.
Exit status: 0 all hold, 1 a check failed (the mapping at fault is named), 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apu_engine.cli import standard_streams
from apu_engine.errors import ApuError
from apu_engine.memory.budget import memory_available
from apu_engine.memory.copies import check_copies
from apu_engine.memory.footprint import (
    GPU_GROWTH_FLOOR,
    GROWTH_FLOOR,
    Baseline,
    Finding,
    Footprint,
    check_device,
    check_dropped,
    check_files,
    check_growth,
    check_sharing,
    footprint,
    weight_files,
    write_back,
)
from apu_engine.options import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apu_engine import LLM
    from apu_engine._native import Device

PROMPT = "The page cache holds the pages of files that were read, so that"


def main(argv: list[str] | None = None) -> int:
    standard_streams()
    args = parse(argv)
    try:
        if args.hold:
            return hold(args)
        report = inspect(args.pid) if args.pid is not None else measure(args)
    except ApuError as error:
        print(f"memory_footprint: {error}", file=sys.stderr)
        return 2
    show(report, args.json)
    return 0 if all(finding.ok for finding in report["findings"]) else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", help="model file, shard or folder (default: the demo model)")
    parser.add_argument("--pid", type=int, help="inspect this process instead of loading a model")
    parser.add_argument("--ctx", type=int, default=512, help="context length (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of the pool (default: as the engine chooses)")
    parser.add_argument("--device", default="cpu", help="device: cpu, hip[:N], cuda[:N] (default %(default)s)")
    parser.add_argument("--memory", default="auto", help="memory strategy on a GPU (default %(default)s)")
    parser.add_argument("--copy-weights", action="store_true", help="force the copy that must be noticed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)  # the second process
    return parser.parse_args(argv)


# ---------------------------------------------------------------- a model of our own


@dataclass(frozen=True, slots=True)
class Before:
    """Memory when the device was open and nothing mapped; `device_free` of a GPU's own."""

    anonymous: Baseline
    device_free: int


@contextmanager
def generated(args: argparse.Namespace) -> Iterator[tuple[LLM, Before, Device]]:
    """The model after it has generated, what was before it was mapped, and the device that tells its free memory."""
    from apu_engine import LLM
    from apu_engine.device import open_device

    before: list[Before] = []

    with open_device(args.device, threads=1)[0] as device:

        def on_stage(stage: str) -> None:
            if stage == "pool":
                before.append(Before(Baseline.take(), device.free_memory()))

        llm = LLM(
            args.model,
            device=args.device,
            ctx=args.ctx,
            threads=args.threads,
            memory=args.memory,
            on_stage=on_stage,
            copy_weights=args.copy_weights,
        )
        with llm:
            prompt: Any = PROMPT if llm.runtime.tokenizer else list(range(8))
            llm.generate(prompt, max_tokens=args.tokens, temperature=0, ignore_eos=True)
            yield llm, before[0], device


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load, generate, and check this process and a second one."""
    if args.model is None:
        from apu_engine.catalog import DEMO, fetch

        args.model = str(fetch(DEMO, lambda line: print(line, file=sys.stderr)))
    fits = sum(file.stat().st_size for file in files_of(args.model)) <= memory_available()
    write_back(files_of(args.model))  # dirty pages cannot be dropped
    with generated(args) as (llm, before, device):
        files = list(llm.runtime.model.files)
        memory = llm.memory_report
        weights, held = memory["weights"], memory["kv"] + memory["scratch"]
        used = before.device_free - device.free_memory()
        write_back(files)
        alone = footprint(files=files)
        processes = [alone]
        on_gpu, staged = device.props.kind != "cpu", memory["strategy"] == "staged"
        findings = check_dropped(alone, weights) if staged else check_files(alone, weights if fits else None)
        expected, floor = (0, GPU_GROWTH_FLOOR) if on_gpu else (held, GROWTH_FLOOR)
        findings.append(check_growth(alone, before.anonymous, expected, weights, floor))
        if max(expected, floor if on_gpu else 0) > weights:
            what = f"the {format_size(floor)} that the runtime may take" if on_gpu else "KV and scratch"
            size, remedy = ("", "a larger model") if on_gpu else (f" ({format_size(expected)})", "a smaller --ctx")
            findings.append(Finding(False, f"{what}{size} could hide a copy of the weights; use {remedy}"))
        if on_gpu:
            findings += check_device(used, weights, memory["device"] - held, held)
        if not staged:  # a second process has a copy of its own then
            with second_process(args) as pid:
                processes += [footprint(files=files), footprint(pid, files)]
            beside = check_files(processes[2])
            findings += [replace(found, text=f"second process: {found.text}") for found in beside]
            findings += check_sharing(processes[1:])
    return {"model": args.model, "memory": memory, "processes": processes, "findings": findings}


def files_of(model: str) -> tuple[Path, ...]:
    from apu_engine.weights.opening import open_model

    return open_model(model).files


@contextmanager
def second_process(args: argparse.Namespace) -> Iterator[int]:
    """Another process that has loaded the same model and generated, as long as the block runs."""
    command = [sys.executable, __file__, "--hold", args.model, "--ctx", str(args.ctx), "--tokens", str(args.tokens)]
    command += ["--device", args.device, "--memory", args.memory]
    command += ["--threads", str(args.threads)] if args.threads else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            if process.stdout.readline() != "ready\n":
                raise ApuError("the second process failed to load the model; its error is above")
            yield process.pid
        finally:
            process.stdin.close()


def hold(args: argparse.Namespace) -> int:
    with generated(args):
        print("ready", flush=True)
        sys.stdin.read()
    return 0


# ---------------------------------------------------------------- a process of someone else


def inspect(pid: int) -> dict[str, Any]:
    """Check a running process. Its baseline is unknown, so copies are looked for by content."""
    files = weight_files(pid)
    if not files:
        raise ApuError(f"process {pid} has mapped no .gguf or .safetensors file")
    write_back(file for file in files if Path(file).exists())
    process = footprint(pid, files)
    findings = check_files(process)
    gone = [file for file in files if not Path(file).exists()]
    findings += check_copies(process, [file for file in files if file not in gone])
    findings += [Finding(True, f"{file}: deleted or replaced, so not searched for") for file in gone]
    return {"pid": pid, "processes": [process], "findings": findings}


# ---------------------------------------------------------------- output


def show(report: dict[str, Any], as_json: bool) -> None:
    processes: list[Footprint] = report["processes"]
    findings: list[Finding] = report["findings"]
    ok = all(finding.ok for finding in findings)
    if as_json:
        body = {
            **report,
            "processes": [process.as_dict() for process in processes],
            "findings": [asdict(finding) for finding in findings],
            "ok": ok,
        }
        print(json.dumps(body, indent=2))
        return
    titles = ["this process", "this process, beside a second one", "the second process"]
    for title, process in zip(titles if "model" in report else [f"process {report['pid']}"], processes, strict=False):
        print(f"{title}\n{process.table()}\n")
    if "memory" in report and report["memory"]["device"]:
        memory = report["memory"]
        print(f"weights {memory['strategy']}{f' ({way})' if (way := memory['way']) else ''}\n")
    for finding in findings:
        print(("ok    " if finding.ok else "FAIL  ") + finding.text)
    print("the weights exist once" if ok else "the weights do not exist once: see FAIL above")


if __name__ == "__main__":
    sys.exit(main())
