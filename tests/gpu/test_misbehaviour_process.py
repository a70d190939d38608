"""A server on the stand-in that is told to end, or whose runtime hangs or faults, while it loads: as its user sees it.

Looked at from outside: exit status, what it says, and that nothing is left: what the stand-in counts (in a file that
outlives the process), temporary files, processes. And that a load holds one copy of the weights at any moment.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from hip_double import LIVE, code_object, counted, library

from apu_engine.memory.budget import STAGING_RING
from apu_engine.memory.mapping import cached_bytes
from models import TinyModel, tiny_llama_gguf

SLACK = 48 << 20  # a process's own memory while it loads: imports, threads, what the stand-in keeps beside


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("kernels")
    code_object(folder)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A llama of some 200 MB that knows few words, on disk."""
    path: Path = tmp_path_factory.mktemp("large") / "large.gguf"
    made = tiny_llama_gguf(path, layers=3, D=1024, H=16, K=16, F=4096)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return made


class Server:
    """`apu-engine serve` on device hip, as a process of its own."""

    def __init__(self, folder: Path, kernels: Path, model: Path, *options: str, faults: str = "") -> None:
        self.folder, self.model = folder, model
        self.cache, self.temporary, self.counts = folder / "cache", folder / "tmp", folder / "counts"
        self.temporary.mkdir(exist_ok=True)
        self.counts.unlink(missing_ok=True)
        names = {
            "APU_HIP_LIBRARY": str(library()),
            "APU_KERNELS": str(kernels),
            "APU_HIP_DOUBLE": faults,
            "APU_HIP_DOUBLE_COUNTS": str(self.counts),
            "XDG_CACHE_HOME": str(self.cache),
            "TMPDIR": str(self.temporary),
        }
        command = [sys.executable, "-m", "apu_engine", "serve", str(model), "--device", "hip", "--ctx", "256"]
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options],
            env={**os.environ, **names},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def count(self, name: str) -> int:
        """What the stand-in counts now; 0 before it is loaded."""
        return counted(self.counts)[name]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.001)

    def opens(self) -> None:
        """Waits until it has the device."""
        self.until(lambda: self.count("streams") > 0)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.log()
        return line

    def ends(self, status: int) -> str:
        """Waits for it; nothing but its log may be left. Returns the log."""
        assert self.process.wait(60) == status, self.log()
        assert not list(self.temporary.iterdir())
        kept = {path.name for path in self.cache.rglob("*") if path.is_file()}
        assert kept <= {"probe.json", "probe.lock"}
        return self.log()

    def terminate(self) -> str:
        """SIGTERM, and everything is given back."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        log = self.ends(0)
        held = counted(self.counts)
        assert not any(held[name] for name in LIVE), held
        assert not psutil.wait_procs(children, 5)[1]
        return log

    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.close()


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, kernels: Path) -> Iterator[Start]:
    started: list[Server] = []

    def serve(model: TinyModel, *options: str, faults: str = "") -> Server:
        started.append(Server(tmp_path, kernels, model.path, *options, faults=faults))
        return started[-1]

    yield serve
    for server in started:
        server.close()


# ---------------------------------------------------------------- told to end


@pytest.mark.parametrize(
    ("memory", "moments"), [("auto", 3), ("registered --memory-way svm", 3), ("staged", 4)], ids=lambda v: str(v)[:8]
)
def test_the_end_at_any_moment_of_loading(
    start: Start, large: TinyModel, tiny_llama: TinyModel, memory: str, moments: int
) -> None:
    """Ten random moments between opening the device and being ready: in the probe, registering and staging."""
    model = tiny_llama if memory == "auto" else large
    options = ["--memory", *memory.split()]
    server = start(model, *options)
    server.opens()
    begin = time.monotonic()
    server.ready()
    span = time.monotonic() - begin
    server.terminate()
    for _ in range(moments):
        server = start(model, *options)
        server.opens()
        time.sleep(random.random() * span)
        server.terminate()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_end_in_the_midst_of_staging(start: Start, large: TinyModel, share: float) -> None:
    server = start(large, "--memory", "staged")
    server.until(lambda: server.count("copied_bytes") > share * large.path.stat().st_size)
    server.terminate()


def test_the_end_once_registered(start: Start, large: TinyModel) -> None:
    server = start(large, "--memory", "registered", "--memory-way", "register")
    server.until(lambda: server.count("registrations") > 0)
    server.terminate()


def test_the_end_in_the_midst_of_a_probe(start: Start, tiny_llama: TinyModel) -> None:
    """The way that was being tried is not held against it at the next start."""
    server = start(tiny_llama, faults="refuse=advise,lock,register")
    server.until(lambda: server.count("range_bytes") > 0)
    server.terminate()
    server = start(tiny_llama, faults="refuse=advise,lock,register")
    assert "in place (way A)" in server.ready()
    server.terminate()


# ---------------------------------------------------------------- hangs and faults


@pytest.mark.parametrize("copy", [1, 3])
def test_a_copy_that_hangs(start: Start, large: TinyModel, copy: int) -> None:
    """Ended by the watchdog, with a status that says to start it again."""
    server = start(large, "--memory", "staged", "--watchdog", "1", faults=f"copy_hang={copy}")
    log = server.ends(75)
    assert "no progress for 1 s while" in log and "can be started again" in log


def test_told_to_end_while_a_copy_hangs(start: Start, large: TinyModel) -> None:
    """The first signal waits for it, the second one does not."""
    server = start(large, "--memory", "staged", faults="copy_hang=1")
    server.until(lambda: server.count("copied_bytes") > 0)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: "a second signal ends at once" in server.log())
    server.process.send_signal(signal.SIGTERM)
    server.ends(128 + signal.SIGTERM)


def test_a_way_that_hangs(start: Start, tiny_llama: TinyModel) -> None:
    """The next start does not try it again, and says so."""
    server = start(tiny_llama, "--watchdog", "1", faults="hang=checksum")
    assert "no progress for 1 s while" in server.ends(75)
    server = start(tiny_llama)
    line = server.ready()
    assert "way A" not in line.partition("in place")[2][:12] or "staged" in line
    log = server.terminate()
    assert "did not survive" in line + log + json.dumps(probed(server))


def test_a_step_that_hangs(start: Start, tiny_llama: TinyModel) -> None:
    server = start(tiny_llama, "--memory", "staged", "--watchdog", "1", faults="hang=matvec_f32_r1")
    url = server.ready().rpartition("; ")[2]
    body = json.dumps({"prompt": [1, 5], "max_tokens": 4}).encode()
    with pytest.raises(OSError):
        urlopen(Request(url + "/v1/completions", body, {"Content-Type": "application/json"}), timeout=30)
    log = server.ends(75)
    assert "no progress for 1 s while running a step of " in log


@pytest.mark.parametrize("kernel", ["checksum", "plain_read"])
@pytest.mark.parametrize(("kind", "name"), [("fault", "IllegalAddress"), ("exception", "LaunchFailure")])
def test_a_device_that_faults(start: Start, tiny_llama: TinyModel, kind: str, name: str, kernel: str) -> None:
    """Nothing works on it any more, freeing neither: one line, and an end."""
    server = start(tiny_llama, faults=f"{kind}={kernel}")
    log = server.ends(1)
    assert f"hipError{name}" in log.splitlines()[-1] and log.splitlines()[-1].startswith("apu-engine: ")


def probed(server: Server) -> object:
    return json.loads(next(server.cache.rglob("probe.json")).read_text())


# ---------------------------------------------------------------- one copy


class Memory:
    """What a process holds, and the page cache of its model, at their most."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.fd = os.open(server.model, os.O_RDONLY)
        self.size = server.model.stat().st_size
        self.anonymous = self.resident = self.cached = 0

    def look(self) -> None:
        text = Path(f"/proc/{self.server.process.pid}/status").read_text()
        kinds = {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Rss")}
        self.anonymous = max(self.anonymous, kinds["RssAnon"])
        self.resident = max(self.resident, sum(kinds.values()))
        self.cached = max(self.cached, cached_bytes(self.fd, self.server.model, self.size) or 0)

    def watch(self) -> Memory:
        """Until it listens: loaded, or failed."""

        assert self.server.process.stdout is not None
        while not select.select([self.server.process.stdout], [], [], 0.002)[0]:
            self.look()
        return self


def drops(path: Path) -> bool:
    """Whether the file system keeps the file elsewhere than in memory."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    left = cached_bytes(fd, path, path.stat().st_size)
    os.close(fd)
    return left == 0


@pytest.mark.parametrize("faults", ["", "refuse=svm,advise,lock,register"])
def test_staged_is_one_copy_at_any_moment(start: Start, large: TinyModel, faults: str) -> None:
    """The copy and the ring, and no page of the file: not in the process, not in the page cache."""
    size = large.path.stat().st_size
    droppable = drops(large.path)
    idle = start(large, "--memory", "registered", "--memory-way", "svm", "--no-prefetch")
    idle.opens()
    own = Memory(idle)
    own.look()
    idle.terminate()
    drops(large.path)
    server = start(large, "--memory", "staged", faults=faults)
    server.opens()
    most = Memory(server).watch()
    assert most.anonymous - own.anonymous < size + SLACK
    assert most.resident - own.resident < size + STAGING_RING + SLACK
    assert most.cached < SLACK or not droppable
    assert server.count("most_device_bytes") < size + SLACK
    assert server.count("most_pinned_bytes") <= STAGING_RING + SLACK
    assert server.count("copied_bytes") - server.count("pageable_bytes") >= 0.9 * size
    assert server.count("pageable_bytes") < 1 << 20
    server.terminate()


@pytest.mark.parametrize("faults", ["", "refuse=svm,advise,lock"])
def test_in_place_is_no_copy(start: Start, large: TinyModel, faults: str) -> None:
    """Once the best way is known: a probe takes a slice of device memory to compare with, and gives it back."""
    size = large.path.stat().st_size
    server = start(large, faults=faults)
    assert "in place" in server.ready()
    assert server.count("most_device_bytes") < size + SLACK
    server.terminate()
    server = start(large, faults=faults)
    server.opens()
    most = Memory(server)
    most.look()
    begin = most.anonymous
    most.watch()
    assert most.anonymous - begin < SLACK and server.count("most_device_bytes") < SLACK
    assert server.count("range_bytes") > 0.9 * size
    assert server.count("copied_bytes") < 1 << 20
    server.terminate()
