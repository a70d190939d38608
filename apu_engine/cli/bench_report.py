"""What `apu-engine bench` prints: a result per test as md, csv, json or jsonl, profiles included.

Names are llama-bench's where it has them. Its own are: `decode_bytes` that a drawn token reads (weights and KV
cache), `decode_gb_s`, `read_limit_gb_s`, and `share_of_limit`, the median over runs of one by the other; they are
null for prompts, whose weights serve many rows at once. Times of day are UTC, GB are 1e9 bytes.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apu_engine.cli.bench import Case

if TYPE_CHECKING:
    from apu_engine.cli.bench_measure import Sample
    from apu_engine.engine.load import Runtime


def result(runtime: Runtime, test: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    """One row of the output."""
    from apu_engine import __version__
    from apu_engine.arch import resolve_kv_type
    from apu_engine.cli.bench_measure import profile_lines

    n_prompt, n_gen, n_depth = test
    rates = [(n_prompt + n_gen) / sample.seconds for sample in samples]
    nanoseconds = [round(sample.seconds * 1e9) for sample in samples]
    several = len(samples) > 1
    props, loaded, model = runtime.device.props, runtime.loaded, runtime.model
    kv_type = resolve_kv_type(model, runtime.config.kv_type)
    row = {
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
        **_bandwidth(runtime, test, samples, rates),
    }
    if samples[0].nanoseconds is not None:
        row["profile"] = [line.as_dict() for line in profile_lines(loaded.plan.spec, test, samples)]
    return row


def _bandwidth(runtime: Runtime, test: Case, samples: Sequence[Sample], rates: Sequence[float]) -> dict[str, Any]:
    """Bytes per token and the share of the read limit; for prompts the limit alone."""
    from apu_engine.cli.bench_measure import token_bytes

    limits = [sample.read_limit / 1e9 for sample in samples]
    row: dict[str, Any] = {
        "decode_weight_bytes": None,
        "decode_kv_bytes": None,
        "decode_bytes": None,
        "decode_gb_s": None,
        "read_limit_gb_s": round(statistics.median(limits), 3),
        "share_of_limit": None,
        "samples_read_limit_gb_s": [round(limit, 3) for limit in limits],
    }
    if test.n_gen:
        weights, kv = token_bytes(runtime.loaded.plan.spec, test)
        read = [rate * (weights + kv) / 1e9 for rate in rates]
        row["decode_weight_bytes"], row["decode_kv_bytes"], row["decode_bytes"] = weights, kv, weights + kv
        row["decode_gb_s"] = round(statistics.mean(read), 3)
        shares = [each / limit for each, limit in zip(read, limits, strict=True)]
        row["share_of_limit"] = round(statistics.median(shares), 4)
    return row


def _model_type(runtime: Runtime) -> str:
    """`llama Q4_1`: the architecture and the type that holds most of the weights."""
    sizes: dict[str, int] = {}
    for tensor in runtime.model.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.nbytes
    return f"{runtime.model.architecture} {max(sizes, key=lambda name: sizes[name])}"


class Writer:
    """Prints results as they come, or at the end for one JSON array; md has profiles below the table."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._results: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Prints a test's result, or keeps it where the form is one array."""
        self._results.append(row)
        first = len(self._results) == 1
        if self._form == "jsonl":
            print(json.dumps(row), flush=True)
        elif self._form == "csv":
            if first:
                print(_csv_line(row.keys()), flush=True)
            print(_csv_line(row.values()), flush=True)
        elif self._form == "md":
            if first:
                print(_table_head(_COLUMNS), flush=True)
            print(_table_line(_cells(row)), flush=True)

    def end(self) -> None:
        """Prints what is left when all tests are done."""
        if self._form == "json":
            json.dump(self._results, sys.stdout, indent=2)
            print()
        if self._form == "md":
            for row in self._results:
                if "profile" in row:
                    print(f"\n{_profile_text(row)}")


_COLUMNS = {  # title -> alignment to the right
    **{"model": False, "size": True, "params": True, "backend": False, "threads": True, "batch": True, "test": True},
    **{"t/s": True, "MB/token": True, "GB/s": True, "read limit GB/s": True, "of limit": True},
}
_PROFILE_COLUMNS = {
    **{
        "ops of": False,
        "op": False,
        "types": False,
        "ops": True,
        "ms": True,
        "of time": True,
        "MB": True,
        "GB/s": True,
    },
    **{"of limit": True, "Gop/s": True},
}


def _csv_line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        [json.dumps(value) if isinstance(value, list) else value for value in values]
    )
    return line.getvalue()


def _table_head(columns: dict[str, bool]) -> str:
    return f"{_table_line(columns)}\n{_table_line('---:' if right else '---' for right in columns.values())}"


def _table_line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _test_of(row: dict[str, Any]) -> Case:
    return Case(row["n_prompt"], row["n_gen"], row["n_depth"])


def _cells(row: dict[str, Any]) -> tuple[Any, ...]:
    decodes = row["decode_bytes"] is not None
    return (
        f"{Path(row['model_filename']).stem} ({row['model_type']})",
        f"{row['model_size'] / 2**20:.1f} MiB",
        f"{row['model_n_params'] / 1e6:.1f} M",
        f"{row['backends']} {row['isa']}",
        row["n_threads"],
        row["n_batch"],
        _test_of(row).name,
        f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        f"{row['decode_bytes'] / 1e6:.1f}" if decodes else "",
        f"{row['decode_gb_s']:.1f}" if decodes else "",
        f"{row['read_limit_gb_s']:.1f}",
        f"{row['share_of_limit']:.0%}" if decodes else "",
    )


def _profile_text(row: dict[str, Any]) -> str:
    """A table of one test's profile, and its sums below it."""
    from apu_engine.cli.bench_measure import ALL_ELSE, ALL_MATRICES

    test = _test_of(row)
    per = "prompt" if test.n_prompt else "token"
    head = (
        f"{Path(row['model_filename']).stem}, {test.name}, {row['n_threads']} threads, batch {row['n_batch']}: "
        f"per {per}, read limit {row['read_limit_gb_s']:.1f} GB/s"
    )
    sums = [line for line in row["profile"] if line["family"] in (ALL_MATRICES, ALL_ELSE)]
    lines = [_profile_cells(line) for line in row["profile"] if line not in sums]
    out = [head, "", _table_head(_PROFILE_COLUMNS), *map(_table_line, lines), ""]
    for line in sums:
        text = f"{line['family']}{' of ' * bool(line['types'])}{line['types']}: {line['ms']:.3f} ms"
        text += f" ({line['share']:.1%} of the time)"
        if line["family"] == ALL_MATRICES:
            text += f", {line['bytes'] / 1e6:.1f} MB, {line['gb_s']:.1f} GB/s, "
            text += f"{line['share_of_limit']:.0%} of the read limit, {line['gop_s']:.0f} Gop/s"
        out.append(text)
    return "\n".join(out)


def _profile_cells(line: dict[str, Any]) -> tuple[Any, ...]:
    moved = line["bytes"] > 0
    return (
        line["family"],
        line["op"],
        line["types"],
        line["ops"] or "",
        f"{line['ms']:.3f}",
        f"{line['share']:.1%}",
        f"{line['bytes'] / 1e6:.2f}" if moved else "",
        f"{line['gb_s']:.1f}" if moved else "",
        f"{line['share_of_limit']:.0%}" if moved else "",
        f"{line['gop_s']:.0f}" if line["gop_s"] else "",
    )
