"""Ends a process whose load or step makes no progress, so that whoever supervises it can start it again.

A GPU can hang at 100% busy with nothing in the kernel's log, and a native call that hangs cannot be interrupted. So a
thread of its own watches: whoever works says what it is doing (`during`) and that it goes on (`Task.beat`). When that
stops for the time allowed, the report says what hung, every thread's stack goes to standard error, the children and the
PID file are cleaned up, and the process ends with status 75 (try again). Reading pages counts as progress: a model
larger than memory is slow on the CPU, not stuck. While nothing is being done the thread sleeps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

STATUS = 75  # EX_TEMPFAIL
FAULTS = 64  # major page faults in one period that count as progress
CLEANUP_SECONDS = 5.0
MEASURING_SECONDS = 60.0  # without progress, for what measures a device
_CHILD_SECONDS = 2.0

Cleanup = Callable[[], None]
What = str | Callable[[], str]  # a function is asked when it is stuck


class Task:
    """What one thread is doing."""

    __slots__ = ("last", "what")

    def __init__(self, what: What) -> None:
        self.what = what
        self.last = time.monotonic()

    def beat(self, what: What | None = None) -> None:
        """It goes on, with `what` from now."""
        if what is not None:
            self.what = what
        self.last = time.monotonic()


class Watchdog:
    """Watches from the first `during` on; `seconds` 0 watches nothing. `cleanup` None is children and PID file."""

    def __init__(
        self,
        seconds: float = 0.0,
        cleanup: Sequence[Cleanup] | None = None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.seconds = seconds
        self._cleanup = (end_children, forget_server) if cleanup is None else cleanup
        self._end = end
        self._tasks: list[Task] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._idle = True
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @contextmanager
    def during(self, what: What) -> Iterator[Task]:
        """What the calling thread is doing, until the block ends; it counts as stuck unless it beats."""
        task = Task(what)
        if not self.seconds or self._closed.is_set():
            yield task
            return
        with self._lock:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()
        if self._idle:
            self._work.set()
        try:
            yield task
        finally:
            with self._lock:
                self._tasks.remove(task)

    def close(self) -> None:
        """Ends the thread. Harmless twice, and after a fork, where the thread is the parent's."""
        self._closed.set()
        self._work.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pid == os.getpid():
            thread.join(1.0)

    def _watch(self) -> None:
        faults = _major_faults()
        while not self._closed.is_set():
            with self._lock:
                self._idle = not self._tasks
            if self._idle:
                self._work.wait()
                self._work.clear()
                continue
            self._closed.wait(min(self.seconds / 4, 5.0))
            now = time.monotonic()
            with self._lock:
                task = min(self._tasks, key=lambda task: task.last, default=None)
                stuck = task is not None and now - task.last >= self.seconds
            if task is None or not stuck or self._closed.is_set():
                continue
            count = _major_faults()
            if count - faults >= FAULTS:
                task.last, faults = now, count
                continue
            self._report(task)
            self._finish()
            return

    def _report(self, task: Task) -> None:
        what = task.what if isinstance(task.what, str) else task.what()
        text = (
            f"apu_engine: no progress for {self.seconds:g} s while {what}; this process ends with status {STATUS} "
            "so that it can be started again (--watchdog sets the time, 0 turns this off)\n"
        )
        with contextlib.suppress(OSError):  # not through logging, whose locks the stuck thread may hold
            os.write(2, text.encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)

    def _finish(self) -> None:
        """Cleans up, for at most CLEANUP_SECONDS, and ends the process."""

        def clean() -> None:
            for action in self._cleanup:
                with contextlib.suppress(Exception):
                    action()

        worker = threading.Thread(target=clean, name="watchdog cleanup", daemon=True)
        worker.start()
        worker.join(CLEANUP_SECONDS)
        self._end(STATUS)


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def end_children() -> None:
    """Terminates this process's children, and kills those that stay."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for number, wait in (("terminate", _CHILD_SECONDS), ("kill", _CHILD_SECONDS)):
        for child in children:
            with contextlib.suppress(psutil.Error):
                getattr(child, number)()
        _, children = psutil.wait_procs(children, wait)


def forget_server() -> None:
    """Removes the PID file that names this process, where rocm_start_server.sh wrote one."""
    from apu_engine import pidfiles

    pidfiles.forget(os.getpid())
