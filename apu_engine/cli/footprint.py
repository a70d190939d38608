"""`apu-engine footprint`: which memory a process holds: mapped weights, copies, what a GPU reads in place or holds.

Of every process the kernel tells mappings, and drivers their counters; of itself and of a server the engine adds what
only it knows. Nothing is guessed: what nobody tells is said to be unknown.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apu_engine.cli.app import add, with_config
from apu_engine.config import EngineConfig
from apu_engine.errors import ApuError, ConfigError

if TYPE_CHECKING:
    from apu_engine.memory.footprint import Footprint
    from apu_engine.memory.owners import DriverMemory, Engine, Sharing

WATCH_SECONDS = 1.0


@with_config("model", "engine", "output", exclude=("queue", "max_tokens", "log_level", "timings"), model_argument=True)
def footprint(
    config: EngineConfig,
    pid: Annotated[
        int | None, typer.Option("--pid", metavar="PID", help="A running process, such as a server.", min=1)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="With --pid: again every second, until it ends or Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON in bytes instead of a table.")] = False,
) -> None:
    """Show the memory of a running process (--pid), or of a model that is loaded for this and run once (-m).

    Of each model file: resident pages are in memory now; Pss counts a page that n processes map as 1/n; private
    pages are mapped by no other process, which is no copy. Dirty and copied should be 0: no weight exists twice.
    Below stand what a GPU reads in place (registered), what it holds itself (device), KV cache and scratch.
    """
    if pid is not None:
        _watch(pid, as_json) if watch else _print(_other(pid), as_json)
    elif watch:
        raise ConfigError("--watch needs --pid: the process to look at", "watch")
    elif config.model:
        _print(_own(config), as_json)
    else:
        raise ConfigError("nothing to look at; try `apu-engine footprint --pid PID` or `-m MODEL.gguf`", "pid")


class Report:
    """A process's memory as kernel, drivers and engine tell it; `unknown` says why the engine does not."""

    def __init__(self, now: Footprint, engine: Engine | None, unknown: str = "") -> None:
        from apu_engine.memory.owners import driver_memory, sharing

        self.now = now
        self.engine = engine
        self.unknown = unknown
        self.sharing: Sharing = sharing(item.key for item in now.files if item.key)
        self.drivers: tuple[DriverMemory, ...] = driver_memory(now.pid)

    def as_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = self.now.as_dict()
        for fields, item in zip(body["files"], self.now.files, strict=True):
            fields["processes"] = list(self.sharing.pids.get(item.key, ()))
        body["processes_hidden"] = self.sharing.hidden
        body["drivers"] = [asdict(item) for item in self.drivers]
        body["engine"] = None if self.engine is None else asdict(self.engine)
        return body

    def text(self) -> str:
        """The table, then a line for each that tells something."""
        from apu_engine.options import format_size

        hidden = "+" if self.sharing.hidden else ""
        lines = [self.now.table({key: f"{len(pids)}{hidden}" for key, pids in self.sharing.pids.items()})]
        if self.sharing.hidden:
            lines.append(f"+: not counting those whose mappings this user may not read ({self.sharing.hidden})")
        for item in self.drivers:
            kinds = ", ".join(f"{kind} {format_size(size)}" for kind, size in item.kinds.items()) or "nothing"
            lines.append(f"GPU {item.gpu} ({item.source}): {kinds}")
        lines.append(f"engine: {self._engine_line()}")
        return "\n".join(lines)

    def _engine_line(self) -> str:
        from apu_engine.options import format_size

        if self.engine is None:
            return f"registered, device, KV cache and scratch are unknown: {self.unknown}"
        engine, way = self.engine, f", way {self.engine.way}" if self.engine.way else ""
        sizes = [("registered", engine.registered), ("device", engine.device), ("KV", engine.kv)]
        sizes += [("scratch", engine.scratch)] + ([("made", engine.made)] if engine.made else [])
        told = ", ".join(f"{name} {format_size(size)}" for name, size in sizes)
        return f"weights {format_size(engine.weights)} ({engine.strategy}{way}), {told}"


def _own(config: EngineConfig) -> Report:
    from apu_engine.engine.llm import LLM
    from apu_engine.memory.owners import Engine

    with LLM.from_config(config) as llm:
        llm.generate([0], 2, ignore_eos=True)  # one pass, so that every weight was read
        return Report(llm.footprint(), Engine.read(llm.memory_report))


def _other(pid: int) -> Report:
    from apu_engine.memory import footprint as memory
    from apu_engine.memory.owners import ask

    now = memory.footprint(pid, memory.weight_files(pid))
    return Report(now, *ask(pid))


def _print(report: Report, as_json: bool) -> None:
    print(json.dumps(report.as_dict()) if as_json else report.text(), flush=True)


def _watch(pid: int, as_json: bool) -> None:
    """Prints until the process ends; the first look may fail, as without --watch."""
    report = _other(pid)
    while True:
        if not as_json:
            clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
            print(clear + time.strftime("%H:%M:%S"))
        _print(report, as_json)
        time.sleep(WATCH_SECONDS)
        try:
            report = _other(pid)
        except ApuError:
            return


def register(app: typer.Typer) -> None:
    add(app, "footprint", footprint, short_help="Show the memory of a process or model.")
