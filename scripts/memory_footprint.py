#!/usr/bin/env python3
"""Shows, from /proc, that a model's weights exist once: as clean, shared pages of its file.

    scripts/memory_footprint.py [MODEL]       load, generate, check; the demo model when none is named
    scripts/memory_footprint.py --pid PID     inspect a running server or any process that has mapped a model

Checked: the files are mapped read-only and shared, without a dirty or copied page, and hold the weights; anonymous
memory grew (baseline: interpreter, tokenizer and thread pool up, nothing mapped) by no more than KV cache, scratch
and the larger of 5% of the weights and 8 MiB; a second process that loads the same file adds no file pages (Pss).
Exit status: 0 all hold, 1 a check failed (the mapping at fault is named), 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apu_engine.cli import standard_streams
from apu_engine.errors import ApuError
from apu_engine.memory.budget import human_bytes, memory_available
from apu_engine.memory.copies import check_copies
from apu_engine.memory.footprint import (
    Baseline,
    Finding,
    Footprint,
    check_files,
    check_growth,
    check_sharing,
    footprint,
    weight_files,
    write_back,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apu_engine import LLM

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
    parser.add_argument("--device", default="cpu", help="device (default %(default)s)")
    parser.add_argument("--copy-weights", action="store_true", help="force the copy that must be noticed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)  # the second process
    return parser.parse_args(argv)


# ---------------------------------------------------------------- a model of our own


@contextmanager
def generated(args: argparse.Namespace) -> Iterator[tuple[LLM, Baseline]]:
    """The model after it has generated, and the baseline from before it was mapped."""
    from apu_engine import LLM

    baselines: list[Baseline] = []

    def on_stage(stage: str) -> None:
        if stage == "pool":
            baselines.append(Baseline.take())

    llm = LLM(
        args.model,
        device=args.device,
        ctx=args.ctx,
        threads=args.threads,
        on_stage=on_stage,
        copy_weights=args.copy_weights,
    )
    with llm:
        prompt: Any = PROMPT if llm.runtime.tokenizer else list(range(8))
        llm.generate(prompt, max_tokens=args.tokens, temperature=0, ignore_eos=True)
        yield llm, baselines[0]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Load, generate, and check this process and a second one."""
    if args.model is None:
        from apu_engine.catalog import DEMO, fetch

        args.model = str(fetch(DEMO, lambda line: print(line, file=sys.stderr)))
    fits = sum(file.stat().st_size for file in files_of(args.model)) <= memory_available()
    with generated(args) as (llm, baseline):
        files = list(llm.runtime.model.files)
        memory = llm.memory
        write_back(files)
        alone = footprint(files=files)
        expected = memory["kv"] + memory["scratch"]
        findings = check_files(alone, memory["weights"] if fits else None)
        findings.append(check_growth(alone, baseline, expected, memory["weights"]))
        if expected > memory["weights"]:
            text = f"KV and scratch ({human_bytes(expected)}) could hide a copy of the weights; use a smaller --ctx"
            findings.append(Finding(False, text))
        with second_process(args) as pid:
            together = [footprint(files=files), footprint(pid, files)]
        findings += [replace(found, text=f"second process: {found.text}") for found in check_files(together[1])]
        findings += check_sharing(together)
    return {"model": args.model, "memory": memory, "processes": [alone, *together], "findings": findings}


def files_of(model: str) -> tuple[Path, ...]:
    from apu_engine.weights.gguf import open_model

    return open_model(model).files


@contextmanager
def second_process(args: argparse.Namespace) -> Iterator[int]:
    """Another process that has loaded the same model and generated, as long as the block runs."""
    command = [sys.executable, __file__, "--hold", args.model, "--ctx", str(args.ctx), "--tokens", str(args.tokens)]
    command += ["--device", args.device]
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
    for title, process in zip(titles if "model" in report else [f"process {report['pid']}"], processes, strict=True):
        print(f"{title}\n{process.table()}\n")
    for finding in findings:
        print(("ok    " if finding.ok else "FAIL  ") + finding.text)
    print("the weights exist once" if ok else "the weights do not exist once: see FAIL above")


if __name__ == "__main__":
    sys.exit(main())
