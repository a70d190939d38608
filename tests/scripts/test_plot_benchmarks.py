"""The plot shows every test with its ratio, is the same each time, and wrong input is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_benchmarks.py"
REPORT: dict[str, Any] = {
    "peer": "llama.cpp",
    "cpu": "Some CPU",
    "tests": [
        {"model": "a/tiny.gguf", "test": "pp512", "ratios": [2.0, 2.5, 2.25], "median_ratio": 2.25},
        {"model": "a/tiny.gguf", "test": "tg128 @ d64", "ratios": [0.8, 0.9, 0.75], "median_ratio": 0.8},
    ],
}


def plot(*args: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def of(**fields: object) -> str:
    """A report whose second test has other fields."""
    first, second = REPORT["tests"]
    return json.dumps(REPORT | {"tests": [first, second | fields]})


def test_the_picture_names_tests_ratios_and_machine(tmp_path: Path) -> None:
    results, first, second = tmp_path / "results.json", tmp_path / "a.svg", tmp_path / "b.svg"
    results.write_text(json.dumps(REPORT))
    for output in (first, second):
        done = plot(results, "-o", output)
        assert done.returncode == 0 and done.stdout == done.stderr == ""
    text = first.read_text()
    for words in ("tiny  pp512", "tiny  tg128 @ d64", "2.25", "0.80", "llama.cpp", "Some CPU", "parity"):
        assert f"{words}" in text
    assert text == second.read_text() and len(text) < 60_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "expected the JSON of peer_bench.py --save"),
        ("[]", "with peer, cpu and tests"),
        ('{"peer": "x", "cpu": "y", "tests": [{"model": "m"}]}', "KeyError: 'test'"),
        ('{"peer": "x", "cpu": "y", "tests": []}', "has no tests"),
        ("[" * 200_000, "expected the JSON of peer_bench.py --save"),
        (of(test=3), "TypeError: expected text, found 3"),
        (of(ratios=[]), "ValueError: "),
        (of(ratios=["2"]), "ratio above 0 and below 1e+06, found '2'"),
        (of(ratios=[1e308]), "ratio above 0 and below 1e+06, found 1e+308"),
        (of(median_ratio=float("nan")), "found nan"),
        (of(median_ratio=-1), "found -1"),
    ],
)
def test_what_is_no_result_of_peer_bench(tmp_path: Path, text: str | None, words: str) -> None:
    results = tmp_path / "results.json"
    if text is not None:
        results.write_text(text)
    done = plot(results, "-o", tmp_path / "a.svg")
    assert done.returncode == 1 and done.stderr.startswith(f"plot_benchmarks: {results}: ")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps(REPORT))
    done = plot(results, "-o", tmp_path / "absent" / "a.svg")
    assert done.returncode == 1 and "a.svg: cannot be written" in done.stderr
    for output in (tmp_path, tmp_path / "name", tmp_path / "name.json"):  # matplotlib would add .png to the first two
        done = plot(results, "-o", output)
        assert done.returncode == 2 and "expected a name that ends in .svg or .png" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
