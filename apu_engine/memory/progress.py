"""Shows Progress reports to a person: a bar on a terminal, plain lines in logs and pipes.

rich takes a tenth of a second to import, as long as a small warm model takes to load: it is imported only
when a stage has run for a third of a second on a terminal. Every stage ends with one plain line in either
case.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from apu_engine.memory.mapping import Progress
from apu_engine.options import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_BAR_AFTER = 0.3  # seconds


def describe(report: Progress) -> str:
    """One report as a line: `readahead 34% of 75.3 GiB, 2.31 GiB/s, 23 s left`."""
    percent = 100 * report.done_bytes // report.total_bytes if report.total_bytes else 100
    line = f"{report.stage} {percent}% of {format_size(report.total_bytes)}, {report.gib_per_s:.2f} GiB/s"
    return line if report.eta_s is None else f"{line}, {report.eta_s:.0f} s left"


class ProgressPrinter:
    """A callback for Progress reports and a context manager that tidies up the terminal.

    `interval` is the time in seconds between plain lines.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 2.0) -> None:
        self._stream = stream or sys.stderr
        self._interval = interval
        self._stage = ""
        self._start = self._last = 0.0
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, report: Progress) -> None:
        now = time.monotonic()
        if report.stage != self._stage:
            self.close()
            self._stage, self._start, self._last = report.stage, now, now
        if report.done_bytes >= report.total_bytes:
            self.close()
            if self._stage:
                size = format_size(report.total_bytes)
                self._write(f"{report.stage}: {size}, {report.gib_per_s:.2f} GiB/s")
            self._stage = ""
        elif self._stream.isatty():
            if now - self._start >= _BAR_AFTER:
                self._draw(report)
        elif now - self._last >= self._interval:
            self._last = now
            self._write(describe(report))

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def _draw(self, report: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=report.total_bytes)
        assert self._task is not None
        self._bar.update(self._task, completed=report.done_bytes, description=describe(report))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
