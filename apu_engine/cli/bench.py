"""`apu-engine bench`: prefill and decode speed, with field names and test names as llama-bench has them.

A prompt test times `n_prompt` tokens read in steps of `n_batch` rows, a generation test `n_gen` single-row
steps; both after `n_depth` tokens of context that are not timed: they are read, or random rows with `--fill`.
Every step includes drawing a token where one is due. One run of each test warms up; the mean and the sample
standard deviation are over `-r` further runs. bench_measure.py has the runs and the read limit beside them,
bench_report.py what is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, NamedTuple

import typer

from apu_engine.cli.app import add, require_model, with_config
from apu_engine.config import EngineConfig, spec
from apu_engine.errors import ConfigError

FORMATS = ("md", "json", "jsonl", "csv")


class Case(NamedTuple):
    """`n_prompt` tokens read or `n_gen` drawn, after `n_depth` tokens of context."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """`pp512`, `tg128 @ d256`."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


def cases(prompts: Sequence[int], gens: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """Every combination, prompts first; zeros are none. Raises ConfigError when nothing is left."""
    found = [Case(p, 0, d) for p, d in product(prompts, depths) if p]
    found += [Case(0, n, d) for n, d in product(gens, depths) if n]
    if not found:
        raise ConfigError("nothing to measure: -p and -n are both 0", "n_prompt")
    return found


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
    profile: Annotated[bool, typer.Option("--profile", help="Time per kind of op as well.")] = False,
    fill: Annotated[
        bool, typer.Option("--fill", help="Fill the context of -d with random rows instead of reading tokens.")
    ] = False,
    output: Annotated[str, typer.Option("--output", "-o", metavar="|".join(FORMATS), help="Format.")] = "md",
) -> None:
    """Measure prefill and decode speed. Lists (-p 128,512) run every combination.

    Tests: pp512 reads a prompt of 512 tokens, tg128 generates 128, @ d256 follows 256 tokens of context. Beside
    generation stand the bytes read per token and the read limit: plain reads of the weights around every run.
    """
    require_model(config, "bench")
    if output not in FORMATS:
        raise ConfigError(f"--output: expected one of {', '.join(FORMATS)}, found {output!r}", "output")
    tests = cases(*(_numbers(flag, text) for flag, text in (("-p", n_prompt), ("-n", n_gen), ("-d", n_depth))))
    from apu_engine.cli.bench_report import Writer

    writer = Writer(output)
    settings = product(_option_values("threads", threads, config.threads), _option_values("batch", batch, config.batch))
    longest = max(map(sum, tests))
    for workers, rows in settings:
        chosen = replace(config, threads=workers, batch=rows, ctx=max(longest, 128), parallel=1)
        for row in _run(chosen, tests, repetitions, profile, fill):
            writer.add(row)
    writer.end()


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    plain = all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts)  # int() takes more than that
    numbers = [int(part) for part in parts] if plain else []
    if not numbers or max(numbers) > 1 << 24:
        raise ConfigError(f"{flag}: expected integers of at least 0, separated by commas, found {text!r}", flag)
    return numbers


def _option_values(name: str, text: str | None, default: int) -> list[int]:
    if text is None:
        return [default]
    return [spec(name).check(part, "flag") for part in text.split(",")]


def _run(
    config: EngineConfig, tests: Sequence[Case], repetitions: int, profile: bool, fill: bool
) -> Iterator[dict[str, Any]]:
    from apu_engine.cli.bench_measure import ReadLimit, measure
    from apu_engine.cli.bench_report import result
    from apu_engine.engine.load import load

    runtime = load(config)
    try:
        limit = ReadLimit(runtime.device, runtime.loaded.plan.spec, [item.address for item in runtime.weights.placed])
        for test in tests:
            measure(runtime, test._replace(n_gen=min(test.n_gen, 16)), limit, fill=fill)
            samples = [measure(runtime, test, limit, profile, fill) for _ in range(repetitions)]
            yield result(runtime, test, samples)
    finally:
        runtime.close()


def register(app: typer.Typer) -> None:
    add(app, "bench", bench)
