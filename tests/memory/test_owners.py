"""What is told of a process beside smaps: who maps its files, what GPU drivers count, what a server says of itself."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from native_double import NativeDouble

from apu_engine.errors import ApuError
from apu_engine.memory import owners
from apu_engine.memory.footprint import footprint
from apu_engine.memory.machine import Machine
from apu_engine.memory.mapping import Mapping
from apu_engine.memory.owners import Engine, ask, driver_memory, sharing

MEMORY = {"strategy": "registered", "way": "svm", "weights": 5, "registered": 8, "device": 3, "kv": 2, "scratch": 1}


def test_sharing(tmp_path: Path) -> None:
    lines = {"7": "fd:01 42  /m/a.gguf", "12": "fd:01 42  /m/a.gguf", "13": "fd:01 420  /m/b.gguf"}
    for pid, line in lines.items():
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "maps").write_text(f"7f00-7f10 r--s 00000000 {line}\n")
    (tmp_path / "proc" / "14").mkdir()  # ended
    (tmp_path / "proc" / "self").mkdir()
    found = sharing(["fd:01 42", "fd:01 4"], Machine(tmp_path))
    assert found.pids == {"fd:01 42": (7, 12), "fd:01 4": ()} and found.hidden == 0


def test_sharing_of_a_real_mapping(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file):
        (item,) = footprint(files=[file]).files
        assert sharing([item.key]).pids == {item.key: (os.getpid(),)}


def test_mappings_of_others_are_counted_as_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)

    def denied(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", denied)
    assert sharing(["fd:01 42"], Machine(tmp_path)).hidden == 1


def test_driver_memory(tmp_path: Path) -> None:
    """A client once, whatever its descriptors; old and new names of fields; KFD's counters."""
    process = tmp_path / "proc" / "7"
    for folder in ("fd", "fdinfo"):
        (process / folder).mkdir(parents=True)
    amd = "drm-driver:\tamdgpu\ndrm-pdev:\t0000:c5:00.0\ndrm-client-id:\t9\ndrm-memory-gtt:\t4 MiB\n"
    files = {
        "3": ("/dev/dri/renderD128", amd + "drm-memory-vram:\t16 KiB\ndrm-memory-cpu:\t0 KiB\n"),
        "4": ("/dev/dri/renderD128", amd),
        "5": ("/dev/dri/card1", amd.replace("\t9", "\t10").replace("memory-gtt", "resident-gtt")),
        "6": ("/dev/null", "drm-memory-gtt:\t1 GiB\n"),
        "7": ("/dev/dri/renderD129", "pos: 0\n"),
    }
    for number, (target, text) in files.items():
        (process / "fd" / number).symlink_to(target)
        (process / "fdinfo" / number).write_text(text)
    kfd = tmp_path / "sys/class/kfd/kfd/proc/7"
    kfd.mkdir(parents=True)
    (kfd / "vram_51000").write_text("4096\n")
    drm, compute = driver_memory(7, Machine(tmp_path))
    assert (drm.gpu, drm.source, drm.kinds) == ("0000:c5:00.0", "drm amdgpu", {"gtt": 8 << 20, "vram": 16 << 10})
    assert (compute.gpu, compute.source, compute.kinds) == ("51000", "kfd", {"vram": 4096})
    assert driver_memory(8, Machine(tmp_path)) == ()


def test_what_an_engine_says_is_checked() -> None:
    assert Engine.read({**MEMORY, "copied": 0, "more": 1}) == Engine("registered", "svm", 5, 8, 3, 2, 1, 0)
    assert Engine.read(MEMORY) is None and Engine.read({**MEMORY, "copied": "much"}) is None


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    """What a server of this process says at /health."""
    said: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = said["raw"] if "raw" in said else json.dumps(said).encode()
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield said
        server.shutdown()
        thread.join()


def test_a_server_is_asked(answers: dict[str, Any]) -> None:
    answers["memory"] = {**MEMORY, "copied": 0}
    engine, why = ask(os.getpid())
    assert engine is not None and engine.registered == 8 and why == ""


@pytest.mark.parametrize("said", [{}, {"memory": 7}, {"raw": b"[1]"}, {"raw": b"\xff{"}])
def test_other_servers_are_no_engine(answers: dict[str, Any], said: dict[str, Any]) -> None:
    answers.update(said)
    engine, why = ask(os.getpid())
    assert engine is None and why.startswith("port ") and why.endswith(" does not tell")


def test_processes_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(os.getppid())[0] is None
    monkeypatch.setattr(owners, "_listening", lambda pid: [])
    assert ask(os.getpid()) == (None, "it listens on no port")
    monkeypatch.setattr(owners, "_listening", lambda pid: None)
    assert ask(os.getpid()) == (None, "its sockets may not be looked at")
    monkeypatch.setattr(owners, "_network", str)
    assert ask(os.getppid()) == (None, "it is in another network namespace")


def test_watching_ends_with_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from apu_engine.cli import footprint as verb
    from apu_engine.cli import main

    real, looks = verb._other, []

    def other(pid: int) -> verb.Report:
        looks.append(pid)
        if len(looks) == 3:
            raise ApuError(f"there is no process {pid}")
        return real(pid)

    monkeypatch.setattr(verb, "_other", other)
    monkeypatch.setattr(verb, "WATCH_SECONDS", 0.0)
    assert main(["footprint", "--pid", str(os.getpid()), "--watch", "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["pid"] for report in reports] == [os.getpid()] * 2
    assert all(report["engine"] is None and report["drivers"] == [] for report in reports)
    assert main(["footprint", "--watch"]) == 2 and "--watch needs --pid" in capsys.readouterr().err
