#!/usr/bin/env python3
"""Compares our speed with llama.cpp's on the same files: its llama-bench and `apu-engine bench` take turns.

    scripts/peer_bench.py --peer llama-bench --model A.gguf [--model B.gguf] -p 512 -n 128 -d 0 --pairs 5

Every test (a model, pp or tg, a depth) is run `pairs` times by both, one process at a time, and who begins changes from
pair to pair: what the machine does meanwhile meets both alike, and a pair's ratio is the figure that lasts. The files'
pages are cached before. A run in which other processes took CPU time, or the hypervisor did, is discarded and repeated;
how many were is shown. Exit status: 0 measured, 1 a program failed or printed nonsense, 2 it could not be started.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from apu_engine.cli import standard_streams
from apu_engine.cli.bench import Case, cases
from apu_engine.errors import ApuError, ConfigError

OURS = (sys.executable, "-m", "apu_engine")
NAME = "apu_engine"
READ_BYTES = 8 << 20
SLACK_SECONDS = 0.03  # what ticks of 10 ms may be wrong by
FIRST_TOKEN = re.compile(r"process start to first token (\d+) ms")


def main(argv: Sequence[str] | None = None) -> int:
    standard_streams()
    try:
        args = parse(argv)
        report = measure(args)
    except ApuError as error:
        print(f"peer_bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, indent=2) if args.output == "json" else markdown(report), flush=True)
    if args.save:  # after the print: a disk that filled meanwhile costs no results
        try:
            Path(args.save).write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            print(f"peer_bench: --save: {args.save} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--peer", required=True, metavar="PATH", help="llama-bench")
    parser.add_argument("--peer-name", default="llama.cpp", metavar="NAME", help="in the output (default %(default)s)")
    parser.add_argument("--peer-args", default="", metavar="ARGS", help='more of its options, such as "-fa 1"')
    parser.add_argument("--our-args", default="", metavar="ARGS", help="more options of apu-engine bench")
    parser.add_argument("--model", "-m", action="append", required=True, metavar="FILE", help="GGUF file; may repeat")
    parser.add_argument("-p", "--n-prompt", type=numbers, default=[512], metavar="N,...", help="prompts (default 512)")
    parser.add_argument("-n", "--n-gen", type=numbers, default=[128], metavar="N,...", help="tokens (default 128)")
    parser.add_argument("-d", "--n-depth", type=numbers, default=[0], metavar="N,...", help="depths (default 0)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="of both (default: as each chooses)")
    parser.add_argument("-r", "--repetitions", type=int, default=1, metavar="N", help="per run (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each (default %(default)s)")
    parser.add_argument(
        "--starts", type=int, default=0, metavar="N", help="starts to time to our first token (0: none)"
    )
    parser.add_argument(
        "--noise", type=float, default=5.0, metavar="PERCENT",
        help="of all cores' time: a run is discarded when others took more (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--retries", type=int, default=3, metavar="N", help="per run (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="per run (default %(default)s)")
    parser.add_argument("--output", "-o", choices=("md", "json"), default="md", help="what is printed (default md)")
    parser.add_argument("--save", metavar="FILE", help="write the JSON there as well, for scripts/plot_benchmarks.py")
    parser.add_argument("--quiet", "-q", action="store_true", help="no line per run on standard error")
    args = parser.parse_args(argv)
    for name, least in (("pairs", 1), ("repetitions", 1), ("retries", 0), ("noise", 0), ("starts", 0), ("threads", 0)):
        if not least <= getattr(args, name) < math.inf:
            raise ConfigError(f"--{name}: expected at least {least}, found {getattr(args, name)}", name)
    if not 0 < args.timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"--timeout: expected seconds above 0, found {args.timeout:g}", "timeout")
    for name in ("peer_args", "our_args"):
        try:
            setattr(args, name, shlex.split(getattr(args, name)))
        except ValueError as error:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: cannot be split into options: {error}", name) from None
    if args.peer_name == NAME:
        raise ConfigError(f"--peer-name: {NAME} is our own name; choose another", "peer_name")
    if args.save:
        _check_target(Path(args.save))
    args.tests = cases(args.n_prompt, args.n_gen, args.n_depth)
    return args


def _check_target(path: Path) -> None:
    """Whether results can be written there, which is to be known before an hour of measuring."""
    problem = ""
    if path.is_dir():
        problem = "is a folder; name a file"
    elif not path.parent.is_dir():
        problem = f"the folder {path.parent} does not exist; make it or name another"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "may not be written; name another"
    if problem:
        raise ConfigError(f"--save: {path}: {problem}", "save")


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if any(number < 0 for number in found):
        raise ValueError
    return found


# ---------------------------------------------------------------- one run, and who else used the CPU


class CpuTimes(NamedTuple):
    """Seconds since boot over all cores: of programs and the kernel, and taken by the hypervisor."""

    busy: float
    steal: float

    @classmethod
    def now(cls, path: str = "/proc/stat") -> CpuTimes | None:
        """None where the kernel does not count."""
        try:
            name, *ticks = Path(path).read_text().split("\n", 1)[0].split()
            user, nice, system, _, _, irq, softirq, steal = (int(tick) for tick in ticks[:8])
        except (OSError, ValueError):
            return None
        if name != "cpu":
            return None
        hz = os.sysconf("SC_CLK_TCK")
        return cls((user + nice + system + irq + softirq) / hz, steal / hz)


def noise(before: CpuTimes | None, after: CpuTimes | None, own: float, seconds: float, cores: int) -> float:
    """The share of `cores` that was others' for `seconds`, in percent; `own` CPU seconds were ours and the child's."""
    if before is None or after is None or seconds <= 0:
        return 0.0
    others = max(after.busy - before.busy - own, 0.0) + max(after.steal - before.steal, 0.0)
    return 100 * max(others - SLACK_SECONDS, 0.0) / (seconds * cores)


@dataclass(frozen=True)
class Output:
    """What a finished program printed, and how much of the machine others used meanwhile."""

    out: str
    err: str
    noise: float


def execute(command: Sequence[str], timeout: float) -> Output:
    """Runs a program to its end. Raises ConfigError when it cannot be started, ApuError when it fails.

    It has a process group of its own: when it is late or we are interrupted, its children end with it, else they would
    take CPU time from the runs that follow.
    """
    cores = os.cpu_count() or 1
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        before, start, own = CpuTimes.now(), time.monotonic(), _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF))
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"{command[0]}: cannot be started: {error.strerror}", "peer") from None

        def end() -> None:  # not process.kill, which may reap the child before wait4 does
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        late = threading.Timer(timeout, end)
        late.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            end()
            process.wait()
            raise
        finally:
            late.cancel()
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        own = _cpu_seconds(resource.getrusage(resource.RUSAGE_SELF)) - own + _cpu_seconds(usage)
        share = noise(before, CpuTimes.now(), own, seconds, cores)
        printed, complaints = _text(out), _text(err)
    if process.returncode:
        raise ApuError(_failure(command, process.returncode, complaints or printed, seconds >= timeout, timeout))
    return Output(printed, complaints, share)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _cpu_seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _failure(command: Sequence[str], status: int, text: str, late: bool, timeout: float) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else "; it printed nothing"
    if late:
        how = f"was still running after {timeout:g} s (--timeout)"
    else:
        how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
    return f"`{shlex.join(command)}` {how}{last}"


@dataclass
class Guard:
    """Repeats what others disturbed: at most `retries` times, then the least disturbed run has to do."""

    percent: float
    retries: int
    note: Callable[[str], None]
    discarded: int = 0
    kept_noisy: int = 0

    def run(self, name: str, command: Sequence[str], timeout: float) -> Output:
        runs: list[Output] = []
        while True:
            runs.append(execute(command, timeout))
            if runs[-1].noise <= self.percent:
                self.discarded += len(runs) - 1
                return runs[-1]
            self.note(f"{name}: others took {runs[-1].noise:.1f}% of the CPU time")
            if len(runs) > self.retries:
                self.discarded += len(runs) - 1
                self.kept_noisy += 1
                return min(runs, key=lambda run: run.noise)


# ---------------------------------------------------------------- the two programs


def results(command: Sequence[str], text: str) -> Iterator[dict[str, Any]]:
    """The result objects in llama-bench's json (an array) or jsonl."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            found = None
    rows = found if isinstance(found, list) else [found]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ApuError(f"`{shlex.join(command)}` printed no JSON results; it begins with {text.strip()[:80]!r}")
    yield from rows


def result_of(command: Sequence[str], text: str, test: Case) -> dict[str, Any]:
    """The row of one test; its `avg_ts` is a positive number."""
    rows = list(results(command, text))
    for row in rows:
        if (row.get("n_prompt"), row.get("n_gen"), row.get("n_depth", 0)) == test:
            rate = row.get("avg_ts")
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
                raise ApuError(f"`{shlex.join(command)}`: avg_ts: expected a positive number, found {rate!r}")
            return row
    expected = f"n_prompt {test.n_prompt}, n_gen {test.n_gen}, n_depth {test.n_depth}"
    raise ApuError(f"`{shlex.join(command)}` printed no result for {expected}, but {len(rows)} others")


def bench_command(
    program: Sequence[str], model: str, test: Case, args: argparse.Namespace, more: list[str]
) -> list[str]:
    """The command line of one test; both programs understand the same flags."""
    command = [*program, "-m", model, "-p", str(test.n_prompt), "-n", str(test.n_gen), "-r", str(args.repetitions)]
    command += ["-d", str(test.n_depth)] if test.n_depth else []
    command += ["-t", str(args.threads)] if args.threads else []
    return [*command, "-o", "json", *more]


# ---------------------------------------------------------------- pairs


@dataclass
class Pairs:
    """Runs of one test, in pairs."""

    model: str
    test: Case
    peer: list[dict[str, Any]] = field(default_factory=list)
    ours: list[dict[str, Any]] = field(default_factory=list)
    guards: dict[str, Guard] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        peer, ours = ([float(row["avg_ts"]) for row in rows] for rows in (self.peer, self.ours))
        ratios = [b / a for a, b in zip(peer, ours, strict=True)]
        row: dict[str, Any] = {
            "model": self.model,
            "model_type": self.ours[0].get("model_type"),
            "test": self.test.name,
            **self.test._asdict(),
            "peer_ts": peer,
            "our_ts": ours,
            "ratios": [round(ratio, 4) for ratio in ratios],
            "peer_median_ts": median(peer),
            "our_median_ts": median(ours),
            "median_ratio": round(median(ratios), 4),
            "discarded": {name: guard.discarded for name, guard in self.guards.items()},
            "kept_noisy": {name: guard.kept_noisy for name, guard in self.guards.items()},
        }
        if self.test.n_gen:
            limits = [float(run["read_limit_gb_s"]) for run in self.ours]
            size = int(self.ours[0]["decode_bytes"])
            row["decode_bytes"] = size
            row["read_limit_gb_s"] = median(limits)
            row["our_share_of_limit"] = median(float(run["share_of_limit"]) for run in self.ours)
            # Of the limit in the run beside it; the file's own bytes, also where the peer reads a repacked copy.
            row["peer_share_of_limit"] = round(
                median(rate * size / 1e9 / limit for rate, limit in zip(peer, limits, strict=True)), 4
            )
        return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, as JSON-ready data."""
    from apu_engine.weights.opening import open_model

    def note(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    if not os.access(args.peer, os.X_OK) or not Path(args.peer).is_file():
        raise ConfigError(f"--peer: expected llama-bench, an executable file, found {args.peer}", "peer")
    peer = str(Path(args.peer).resolve())
    files = {model: open_model(model).files for model in args.model}
    if CpuTimes.now() is None:
        note("/proc/stat tells nothing about the CPU: no run will be discarded")
    reports, starts = [], []
    for model, parts in files.items():
        for part in parts:
            cache(part)
        for test in args.tests:
            pairs = Pairs(model, test)
            for name in (args.peer_name, NAME):
                pairs.guards[name] = Guard(args.noise, args.retries, note)
            sides = (
                (args.peer_name, pairs.peer, bench_command([peer], model, test, args, args.peer_args)),
                (NAME, pairs.ours, bench_command([*OURS, "bench"], model, test, args, args.our_args)),
            )
            for number in range(args.pairs):
                for name, rows, command in sides if number % 2 == 0 else sides[::-1]:
                    output = pairs.guards[name].run(name, command, args.timeout)
                    rows.append(result_of(command, output.out, test))
                    note(f"{Path(model).name} {test.name}, {name}: {rows[-1]['avg_ts']:.2f} t/s")
            reports.append(pairs.report())
        if args.starts:
            starts.append(time_starts(model, args, note))
    return {
        "peer": args.peer_name,
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "noise_percent": args.noise,
        "tests": reports,
        "depths": depths(reports),
        "starts": starts,
    }


def cache(path: Path) -> None:
    """Reads a file once, so that its pages are in the page cache for both."""
    buffer = bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _processor() -> str:
    match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else "cpu"


def time_starts(model: str, args: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds from the start of our process to the first token of an answer, with the file cached."""
    command = [*OURS, "chat", "-m", model, "-p", "Hello", "-n", "1", "--timings"]
    command += ["-t", str(args.threads)] if args.threads else []
    guard, found = Guard(args.noise, args.retries, note), []
    for _ in range(args.starts):
        match = FIRST_TOKEN.search(guard.run(NAME, command, args.timeout).err)
        if match is None:
            raise ApuError(f"`{shlex.join(command)}` printed no time to the first token")
        found.append(int(match[1]))
    note(f"{Path(model).name} start to first token: {median(found):.0f} ms")
    return {
        "model": model,
        "milliseconds": found,
        "median_milliseconds": median(found),
        "discarded": guard.discarded,
        "kept_noisy": guard.kept_noisy,
    }


def depths(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each keeps of its speed at depth 0, per model, test and depth."""
    flat = {(r["model"], r["n_prompt"], r["n_gen"]): r for r in reports if not r["n_depth"]}
    out = []
    for row in reports:
        base = flat.get((row["model"], row["n_prompt"], row["n_gen"]))
        if row["n_depth"] and base is not None:
            kept = {
                f"{who}_kept": round(row[f"{who}_median_ts"] / base[f"{who}_median_ts"], 4) for who in ("peer", "our")
            }
            out.append({"model": row["model"], "test": row["test"], **kept})
    return out


# ---------------------------------------------------------------- output


def markdown(report: dict[str, Any]) -> str:
    """Tables for docs/benchmarks.md."""
    peer = report["peer"]
    out = [
        f"| Model | Test | {peer}, t/s | {NAME}, t/s | ratio of each pair | median ratio | MB/token | read limit, GB/s "
        f"| {peer} reaches | {NAME} reaches | discarded |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["tests"]:
        decodes = "decode_bytes" in row
        cells = (
            f"{Path(row['model']).stem} ({row['model_type']})",
            row["test"],
            f"{row['peer_median_ts']:.1f}",
            f"{row['our_median_ts']:.1f}",
            " ".join(f"{ratio:.2f}" for ratio in row["ratios"]),
            f"**{row['median_ratio']:.2f}**",
            f"{row['decode_bytes'] / 1e6:.1f}" if decodes else "",
            f"{row['read_limit_gb_s']:.1f}" if decodes else "",
            f"{row['peer_share_of_limit']:.0%}" if decodes else "",
            f"{row['our_share_of_limit']:.0%}" if decodes else "",
            _noisy(sum(row["discarded"].values()), sum(row["kept_noisy"].values())),
        )
        out.append("| " + " | ".join(cells) + " |")
    for row in report["depths"]:
        out += ["", f"{Path(row['model']).stem}, {row['test']} keeps of depth 0: {peer} {row['peer_kept']:.0%}, "
                    f"{NAME} {row['our_kept']:.0%}"]  # fmt: skip
    for row in report["starts"]:
        times = " ".join(map(str, row["milliseconds"]))
        out += ["", f"{Path(row['model']).stem}, process start to first token: median {row['median_milliseconds']:.0f} "
                    f"ms ({times})"]  # fmt: skip
    kept = [count for row in report["tests"] for count in row["kept_noisy"].values()]
    if sum(kept) + sum(row["kept_noisy"] for row in report["starts"]):
        limit = f"{report['noise_percent']:g}% of the CPU time"
        out += ["", f"Where noisy runs were kept, others took more than {limit} in every attempt: not to be quoted."]
    return "\n".join(out)


def _noisy(discarded: int, kept: int) -> str:
    return f"{discarded}, {kept} noisy kept" if kept else str(discarded)


if __name__ == "__main__":
    sys.exit(main())
