"""`apu-engine bench`: prefill and decode speed, with field names and test names as llama-bench has them.

A prompt test times `n_prompt` tokens read in steps of `n_batch` rows, a generation test `n_gen` single-row
steps; both after `n_depth` tokens of context that are not timed. Every step includes drawing a token where
one is due. One run of each test warms up; the mean and the sample standard deviation are over `-r` further
runs.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apu_engine.cli.app import require_model, with_config
from apu_engine.config import EngineConfig, spec
from apu_engine.errors import ConfigError

if TYPE_CHECKING:
    from apu_engine.engine.load import Runtime

FORMATS = ("md", "json", "jsonl", "csv")
_SHARED = ("queue", "max_tokens", "log_level", "timings", "threads", "batch", "parallel", "ctx")


@with_config("model", "engine", "output", exclude=_SHARED, model_argument=True)
def bench(
    config: EngineConfig,
    n_prompt: Annotated[
        str, typer.Option("--n-prompt", "-p", metavar="N,...", help="Prompt lengths; 0: none.")
    ] = "512",
    n_gen: Annotated[str, typer.Option("--n-gen", "-n", metavar="N,...", help="Tokens to generate; 0: none.")] = "128",
    n_depth: Annotated[
        str, typer.Option("--n-depth", "-d", metavar="N,...", help="Tokens of context before the test.")
    ] = "0",
    threads: Annotated[
        str | None, typer.Option("--threads", "-t", metavar="N,...", help="CPU workers. [APU_THREADS]")
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", metavar="N,...", help="Rows of one step. [APU_BATCH]")
    ] = None,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, max=1000, metavar="N", help="Timed runs.")
    ] = 5,
    output: Annotated[str, typer.Option("--output", "-o", metavar="|".join(FORMATS), help="Format.")] = "md",
) -> None:
    """Measure prefill and decode speed. Lists (-p 128,512) run every combination.

    Tests: pp512 reads a prompt of 512 tokens, tg128 generates 128, @ d256 follows 256 tokens of context.
    """
    require_model(config, "bench")
    if output not in FORMATS:
        raise ConfigError(f"--output: expected one of {', '.join(FORMATS)}, found {output!r}", "output")
    prompts, gens, depths = (_numbers(flag, text) for flag, text in (("-p", n_prompt), ("-n", n_gen), ("-d", n_depth)))
    tests = [(p, 0, d) for p, d in product(prompts, depths) if p]
    tests += [(0, n, d) for n, d in product(gens, depths) if n]
    if not tests:
        raise ConfigError("nothing to measure: -p and -n are both 0", "n_prompt")
    writer = _Writer(output)
    settings = product(_option_values("threads", threads, config.threads), _option_values("batch", batch, config.batch))
    longest = max(p + n + d for p, n, d in tests)
    for workers, rows in settings:
        chosen = replace(config, threads=workers, batch=rows, ctx=max(longest, 128), parallel=1)
        for result in _run(chosen, tests, repetitions):
            writer.add(result)
    writer.end()


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if any(number < 0 or number > 1 << 24 for number in numbers):
        raise ConfigError(f"{flag}: expected integers of at least 0, separated by commas, found {text!r}", flag)
    return numbers


def _option_values(name: str, text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    return [spec(name).check(part, "flag") for part in text.split(",")]


def _run(config: EngineConfig, tests: Sequence[tuple[int, int, int]], repetitions: int) -> Iterator[dict[str, Any]]:
    from apu_engine.engine.load import load

    runtime = load(config)
    try:
        for n_prompt, n_gen, n_depth in tests:
            _measure(runtime, n_prompt, min(n_gen, 16), n_depth)
            seconds = [_measure(runtime, n_prompt, n_gen, n_depth) for _ in range(repetitions)]
            yield _result(runtime, n_prompt, n_gen, n_depth, seconds)
    finally:
        runtime.close()


def _measure(runtime: Runtime, n_prompt: int, n_gen: int, n_depth: int) -> float:
    """Seconds for one run of a test, the engine's scheduler and runner driven from this thread."""
    import numpy as np

    from apu_engine.engine.job import Job, SamplingParams
    from apu_engine.engine.pages import PagePool
    from apu_engine.engine.runner import PlanRunner
    from apu_engine.engine.scheduler import Scheduler
    from apu_engine.engine.sequence import Sequence as Running

    runner = PlanRunner(runtime.loaded)
    scheduler = Scheduler(PagePool(runner.groups), 1, runner.max_rows, runner.max_outputs)
    rng = np.random.default_rng(n_depth)
    tokens = rng.integers(0, runner.vocabulary, max(n_depth + n_prompt, 1)).astype(np.int32)
    job = Job(
        tokens[: max(n_depth, 1)].tolist(), SamplingParams(temperature=0), n_gen + 1, frozenset(), lambda *_: None
    )
    reserved = scheduler.reserve(n_depth + n_prompt + n_gen)
    assert reserved is not None, "the context was made for the longest test"
    sequence = Running(job, 0.0, scheduler.pool.tables(), reserved)
    scheduler.add(sequence)

    def step() -> None:
        chunks = scheduler.next_step()
        runner.submit(chunks)
        for event in runner.wait():
            sequence.last_token = event.token
        sequence.position += chunks[0].count

    while n_depth and sequence.in_prefill:
        step()
    if n_prompt:
        sequence.prompt = tokens
    start = time.perf_counter()
    while n_prompt and sequence.in_prefill:
        step()
    for _ in range(n_gen):
        step()
    return time.perf_counter() - start


def _result(runtime: Runtime, n_prompt: int, n_gen: int, n_depth: int, seconds: list[float]) -> dict[str, Any]:
    from apu_engine import __version__

    rates = [(n_prompt + n_gen) / s for s in seconds]
    nanoseconds = [round(s * 1e9) for s in seconds]
    several = len(seconds) > 1
    props, loaded, model = runtime.device.props, runtime.loaded, runtime.model
    from apu_engine.arch import resolve_kv_type

    kv_type = resolve_kv_type(model, runtime.config.kv_type)
    return {
        "engine": "apu_engine",
        "build_number": __version__,
        "backends": props.kind,
        "cpu_info" if props.kind == "cpu" else "gpu_info": props.name,
        "isa": props.arch,
        "model_filename": str(model.path),
        "model_type": _model_type(runtime),
        "model_size": model.weight_bytes,
        "model_n_params": sum(tensor.elements for tensor in model.tensors.values()),
        "n_batch": loaded.options.max_rows,
        "n_ubatch": loaded.options.max_rows,
        "n_threads": props.threads,
        "type_k": kv_type,
        "type_v": kv_type,
        "precision": runtime.config.precision,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(statistics.mean(nanoseconds)),
        "stddev_ns": round(statistics.stdev(nanoseconds)) if several else 0,
        "avg_ts": round(statistics.mean(rates), 6),
        "stddev_ts": round(statistics.stdev(rates), 6) if several else 0.0,
        "samples_ns": nanoseconds,
        "samples_ts": [round(rate, 6) for rate in rates],
    }


def _model_type(runtime: Runtime) -> str:
    """`llama Q4_1`: the architecture and the type that holds most of the weights."""
    sizes: dict[str, int] = {}
    for tensor in runtime.model.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.nbytes
    return f"{runtime.model.architecture} {max(sizes, key=lambda name: sizes[name])}"


class _Writer:
    """Prints results as they come, or at the end for one JSON array."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._results: list[dict[str, Any]] = []

    def add(self, result: dict[str, Any]) -> None:
        self._results.append(result)
        first = len(self._results) == 1
        if self._form == "jsonl":
            print(json.dumps(result), flush=True)
        elif self._form == "csv":
            if first:
                print(_csv_line(result.keys()), flush=True)
            print(_csv_line(result.values()), flush=True)
        elif self._form == "md":
            if first:
                print("| model | size | params | backend | threads | batch | test | t/s |", flush=True)
                print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |", flush=True)
            print(_markdown_line(result), flush=True)

    def end(self) -> None:
        if self._form == "json":
            json.dump(self._results, sys.stdout, indent=2)
            print()


def _csv_line(values: Any) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        [json.dumps(value) if isinstance(value, list) else value for value in values]
    )
    return line.getvalue()


def _markdown_line(result: dict[str, Any]) -> str:
    test = f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}"
    if result["n_depth"]:
        test += f" @ d{result['n_depth']}"
    cells = (
        f"{Path(result['model_filename']).stem} ({result['model_type']})",
        f"{result['model_size'] / 2**20:.1f} MiB",
        f"{result['model_n_params'] / 1e6:.1f} M",
        f"{result['backends']} {result['isa']}",
        result["n_threads"],
        result["n_batch"],
        test,
        f"{result['avg_ts']:.2f} ± {result['stddev_ts']:.2f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)
