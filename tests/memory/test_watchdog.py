"""A process that makes no progress says what it was doing, cleans up and ends; one that does is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from apu_engine import pidfiles
from apu_engine.memory import watchdog as module
from apu_engine.memory.watchdog import STATUS, Watchdog


class Ending:
    """In the place of os._exit."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.over = threading.Event()

    def __call__(self, status: int) -> None:
        self.status = status
        self.over.set()


def test_what_hangs_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    ending, cleaned = Ending(), threading.Event()
    dog = Watchdog(0.05, (cleaned.set,), ending)
    with dog.during("loading m.gguf") as task:
        task.beat("registering part 3 of 81")
        assert ending.over.wait(5)
    assert ending.status == STATUS and cleaned.is_set()
    err = capfd.readouterr().err
    assert "apu_engine: no progress for 0.05 s while registering part 3 of 81; this process ends with status 75" in err
    assert "test_what_hangs_is_reported" in err  # every thread's stack


def test_cleaning_up_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.05)
    release, ending = threading.Event(), Ending()

    def fail() -> None:
        raise OSError

    with Watchdog(0.02, (fail, release.wait), ending).during("working"):  # type: ignore[arg-type]
        assert ending.over.wait(5)
    release.set()


def test_progress_and_idleness_are_no_hang() -> None:
    ending = Ending()
    dog = Watchdog(1.0, (), ending)
    with dog.during(lambda: "running a step") as task:
        for _ in range(24):
            time.sleep(0.05)
            task.beat()
    time.sleep(1.1)  # idle for longer than the limit
    with dog.during("another"):
        pass
    dog.close()
    dog.close()
    assert ending.status is None
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog" and thread is dog._thread]


def test_reading_pages_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a model larger than memory may take minutes on a slow disk."""
    ending, faults = Ending(), 0

    def more() -> int:
        nonlocal faults
        faults += module.FAULTS
        return faults if faults < 10 * module.FAULTS else 10 * module.FAULTS

    monkeypatch.setattr(module, "_major_faults", more)
    begin = time.monotonic()
    with Watchdog(0.04, (), ending).during("reading"):
        assert ending.over.wait(5)
    assert time.monotonic() - begin > 8 * 0.04


def test_off() -> None:
    dog = Watchdog()
    with dog.during("anything") as task:
        task.beat()
    assert dog._thread is None
    dog.close()


@pytest.mark.alone
def test_the_cost_of_a_step() -> None:
    """Decode steps take milliseconds: watching one takes microseconds."""
    dog = Watchdog(60, (), Ending())
    best = 1.0
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(1000):
            with dog.during("a step"):
                pass
        best = min(best, (time.perf_counter() - begin) / 1000)
    dog.close()
    assert best < 100e-6


HANGS = """
import ctypes, subprocess, sys
from apu_engine.memory.watchdog import Watchdog
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
with Watchdog(0.3).during("waiting for a device that does not answer"):
    ctypes.CDLL(None).pause()
"""


def test_a_native_call_that_hangs(tmp_path: Path) -> None:
    """The process ends all the same, with its children and its PID file; another server's file stays."""
    state = pidfiles.state_dir()
    other = state / "server-64998.json"
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    file = state / "server-64999.json"
    record = {
        "pid": process.pid,
        "created": 1.0,
        "host": "h",
        "port": 64999,
        "model": "m",
        "log": "l",
        "argv": [],
    }
    try:
        file.write_text(json.dumps(record))
        other.write_text(json.dumps({**record, "pid": os.getpid(), "port": 64998}))
        out, err = process.communicate(timeout=60)
        assert process.returncode == STATUS
        assert "while waiting for a device that does not answer" in err
        assert not psutil.pid_exists(int(out)) or psutil.Process(int(out)).status() == psutil.STATUS_ZOMBIE
        assert not file.exists() and other.exists()
    finally:
        process.kill()
        file.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
