#!/usr/bin/env python3
"""Draws what scripts/peer_bench.py saved: one bar per test, our speed as a multiple of the peer's.

    scripts/plot_benchmarks.py RESULTS.json [MORE.json ...] [-o docs/benchmarks.svg]

A bar is the median of the pairs' ratios, the dots are the pairs, the line at 1 is parity. The same data gives the same
bytes, so that a changed picture means changed figures. Needs matplotlib: `pip install -e .[plot]`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apu_engine.cli import standard_streams
from apu_engine.errors import ApuError, ConfigError

PREFILL, DECODE, PARITY = "#5b8db8", "#d9812e", "#555555"
MAX_RATIO = 1e6
OUTPUT = Path(__file__).parents[1] / "docs" / "benchmarks.svg"


def main(argv: Sequence[str] | None = None) -> int:
    standard_streams()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json", help="of peer_bench.py --save")
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT, help="SVG or PNG (default docs/benchmarks.svg)")
    args = parser.parse_args(argv)
    try:
        draw([read(path) for path in args.results], args.output)
    except ApuError as error:
        print(f"plot_benchmarks: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def read(path: Path) -> dict[str, Any]:
    """A report of peer_bench. Raises ApuError naming the file when it is none."""
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise ApuError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ApuError(f"{path}: expected the JSON of peer_bench.py --save: {error}") from None
    try:
        texts = [report["peer"], report["cpu"]]
        texts += [row[key] for row in report["tests"] for key in ("model", "test")]
        ratios = [
            ratio for row in report["tests"] for ratio in (row["median_ratio"], min(row["ratios"]), *row["ratios"])
        ]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"expected text, found {text!r}")
        for ratio in ratios:
            if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < MAX_RATIO:
                raise ValueError(f"expected a ratio above 0 and below {MAX_RATIO:g}, found {ratio!r}")
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ApuError(f"{path}: expected the JSON of peer_bench.py --save with peer, cpu and tests ({what})") from None
    if not ratios:
        raise ApuError(f"{path}: has no tests; run peer_bench.py --save again")
    return report  # type: ignore[no-any-return]


def draw(reports: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes the picture; tests in the order of the reports, the first on top."""
    if output.suffix not in (".svg", ".png"):  # matplotlib would write to another name
        raise ConfigError(f"--output: {output}: expected a name that ends in .svg or .png", "output")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("matplotlib is not installed; try `pip install -e .[plot]`", "plot") from None
    matplotlib.use("svg" if output.suffix == ".svg" else "agg")
    matplotlib.rcParams.update({"svg.hashsalt": "apu_engine", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = [row for report in reports for row in report["tests"]]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.9 + 0.27 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        color = PREFILL if row["test"].startswith("pp") else DECODE
        axes.barh(place, row["median_ratio"], height=0.62, color=color)
        axes.plot(row["ratios"], [place] * len(row["ratios"]), ".", color="black", markersize=3, alpha=0.55)
        edge = max(row["median_ratio"], *row["ratios"])
        axes.annotate(
            f"{row['median_ratio']:.2f}", (edge, place), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=PARITY, linewidth=1.2, linestyle="--")
    axes.set_yticks(range(len(rows)), [f"{Path(row['model']).stem}  {row['test']}" for row in rows])
    axes.set_xlim(0, 1.12 * max(1.0, *(ratio for row in rows for ratio in row["ratios"])))
    axes.invert_yaxis()
    axes.set_xlabel(f"speed of apu_engine / speed of {reports[0]['peer']}, {reports[0]['cpu']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        handles=[
            Patch(color=PREFILL, label="prefill"),
            Patch(color=DECODE, label="decode"),
            Line2D([], [], color=PARITY, linestyle="--", label="parity"),
        ],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
    )
    try:
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ApuError(f"{output}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
