"""`apu-engine doctor`: what stands in the way of a fast, safe run on this machine, and what to do about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from apu_engine.cli.app import add, with_config
from apu_engine.config import EngineConfig, specs

if TYPE_CHECKING:
    from apu_engine.doctor.report import Report

_OPTIONS = ("model", "device", "kernels", "debug")
_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "bad": "bold red", "absent": "dim"}
_EXCLUDED = tuple(spec.name for spec in specs() if spec.name not in _OPTIONS)


@with_config("model", "output", exclude=_EXCLUDED, model_argument=True)
def doctor(
    config: EngineConfig,
    full: Annotated[bool, typer.Option("--full", help="Measure too: bandwidth, graphs, memory strategies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> int:
    """Check this machine: processor, kernel, GPU, driver, firmware, memory limits, disk, and a model if one is named.

    Each check has a verdict (ok, info, warn, bad, absent) and, where something can be better, the exact remedy.
    The exit status is 1 when something is bad, else 0. docs/doctor.md explains every check.
    """
    from apu_engine.device import kind_and_index
    from apu_engine.doctor import examine, request_of
    from apu_engine.memory.machine import Machine

    kind_and_index(config.device)
    report = examine(Machine(), request_of(config, full))
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        show(report)
    return int(report.verdict == "bad")


def show(report: Report) -> None:
    """A table of values, then the remedies, unwrapped so that they can be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group, checks in report.groups:
        table.add_row(Text(group, "bold"))
        for check in checks:
            table.add_row(Text(f"  {check.title}"), Text(check.verdict, _STYLES[check.verdict]), Text(check.value))
    console.print(table)
    for verdict, title in (("bad", "To repair"), ("warn", "To improve"), ("info", "Possible")):
        todo = [check for check in report.checks if check.verdict == verdict and check.remedy]
        if todo:
            console.print(Text(f"\n{title}", "bold"))
        for remedy in dict.fromkeys(check.remedy for check in todo):
            names = ", ".join(check.title for check in todo if check.remedy == remedy)
            console.print(Text(f"  {names}", _STYLES[verdict]))
            for line in remedy:
                console.print(Text(f"    {line}"), soft_wrap=True)
    console.print()
    console.print(Text(report.line()), soft_wrap=True)


def register(app: typer.Typer) -> None:
    add(app, "doctor", doctor, short_help="Check this machine and say what to do.")
