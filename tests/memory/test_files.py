"""Files of noise: a signal leaves none behind, and those of processes that were killed are removed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from apu_engine.memory.files import noise_file

MIB = 1 << 20
# the main thread is in one long native call, as while a device works
HOLD = """
import hashlib, pathlib, sys
from apu_engine.memory.files import noise_file
with noise_file(pathlib.Path(sys.argv[1]), 1 << 20):
    print("there", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_sigterm_removes_the_file_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
            assert len(left(tmp_path)) == 1
            process.terminate()
            assert process.wait(20) == 143
        finally:
            process.kill()
    assert left(tmp_path) == []


def test_sigterm_is_as_before_afterwards(tmp_path: Path) -> None:
    threads = threading.active_count()
    with noise_file(tmp_path, MIB) as path:
        assert path.stat().st_size == MIB
    assert left(tmp_path) == [] and threading.active_count() == threads
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1


def test_what_was_left_behind(tmp_path: Path) -> None:
    for name in (".apu-engine-old.tmp", ".apu-engine-held.tmp", ".apu-engine-new.tmp", "model.tmp"):
        (tmp_path / name).touch()
        if "new" not in name:
            os.utime(tmp_path / name, (0, 0))
    with (tmp_path / ".apu-engine-held.tmp").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with noise_file(tmp_path, MIB):
            pass
    assert sorted(left(tmp_path)) == [".apu-engine-held.tmp", ".apu-engine-new.tmp", "model.tmp"]
