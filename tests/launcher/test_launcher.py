"""The launcher as a user meets it: a real server process started, asked, restarted and stopped; ports and PID files.

State lives in a folder of the test's own; the model is a tiny random one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from apu_engine import catalog, launcher, pidfiles
from apu_engine.errors import ApuError
from models import TinyModel


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pidfiles, "state_dir", lambda: tmp_path)
    return tmp_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    yield number
    launcher.main(["stop", "--port", str(number)])


def test_start_ask_restart_stop(
    tiny_llama: TinyModel, port: int, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--port", str(port), "--ctx", "64"]
    assert launcher.main([str(tiny_llama.path), *flags]) == 0
    out, err = capsys.readouterr()
    assert "mapped, copied 0, anonymous 0; ctx 64" in out and f"http://127.0.0.1:{port}" in out
    assert f"curl http://127.0.0.1:{port}/v1/" in out
    assert f"stop with ./rocm_start_server.sh stop --port {port}" in err
    assert "device: cpu" in err and "doctor: " in err
    first = json.loads((state / f"server-{port}.json").read_text())["pid"]

    assert launcher.main(["status", "--port", str(port)]) == 0
    assert f"port {port}: ready, PID {first}" in capsys.readouterr().out
    assert launcher.main([str(tiny_llama.path), *flags]) == 1
    assert "is served already" in capsys.readouterr().err

    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"prompt": [5, 6, 7], "max_tokens": 4}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.load(answer)["usage"]["prompt_tokens"] == 3

    assert launcher.main(["status", "--port", str(free_port())]) == 3
    assert f"servers run on: --port {port}" in "".join(capsys.readouterr())
    assert launcher.main(["restart", str(state / "gone.gguf"), "--port", str(port)]) == 1
    assert "gone.gguf: does not exist" in capsys.readouterr().err and psutil.pid_exists(first)

    assert launcher.main(["restart", "--port", str(port)]) == 0
    record = json.loads((state / f"server-{port}.json").read_text())
    assert record["model"] == str(tiny_llama.path) and "--ctx=64" in record["argv"]
    assert "ctx 64" in capsys.readouterr().out
    second = json.loads((state / f"server-{port}.json").read_text())["pid"]
    assert second != first and not psutil.pid_exists(first)
    assert launcher.main(["stop", "--port", str(port)]) == 0
    assert not psutil.pid_exists(second) and not (state / f"server-{port}.json").exists()
    assert launcher.main(["status", "--port", str(port)]) == 3


def test_busy_port_names_its_holder_and_a_free_one(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        assert launcher.main([str(tiny_llama.path), "--port", str(taken)]) == 1
    err = capsys.readouterr().err
    assert f"port {taken} is in use by" in err and f"PID {os.getpid()}" in err and "--port" in err.split("free")[1]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b"GGUF\x03\x00", "truncated"), (b"<html>not a model", "HTML")]
)
def test_a_broken_model_ends_with_its_message(
    content: bytes, message: str, tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    assert launcher.main([str(bad), "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert "bad.gguf" in err and "Traceback" not in err
    assert not (tmp_path / f"server-{port}.json").exists()


def test_a_model_that_does_not_fit_ends_with_78(
    tiny_llama: TinyModel, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--port", str(port), "--ctx", "16777216", "--parallel", "256", "--device", "cpu"]
    assert launcher.main([str(tiny_llama.path), *flags]) == 78
    assert "ctx 16777216 needs" in capsys.readouterr().err


def test_an_unusable_gpu_stops_a_named_model_and_not_the_demo(
    tiny_llama: TinyModel, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[1] / "fixtures/machines/container-no-devices"  # a GPU in /sys, nothing in /dev
    monkeypatch.setenv("APU_SYSROOT", str(root))
    flags = ["--port", str(port), "--ctx", "64"]
    assert launcher.main([str(tiny_llama.path), *flags]) == 78
    err = capsys.readouterr().err
    assert "gfx1151 is present, but /dev/kfd is absent: start the container with --device /dev/kfd" in err
    assert launcher.main([str(tiny_llama.path), *flags, "--device", "cpu"]) == 0
    assert launcher.main(["stop", "--port", str(port)]) == 0
    capsys.readouterr()

    monkeypatch.setattr(launcher, "_demo_model", lambda: str(tiny_llama.path))
    assert launcher.main(flags) == 0
    err = capsys.readouterr().err
    assert "THE GPU IS NOT USED: gfx1151 is present, but /dev/kfd is absent" in err
    assert "device: cpu (as asked)" in err


def test_a_recycled_pid_is_never_signalled(state: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = launcher.Running(bystander.pid, 1.0, "127.0.0.1", port, "m", "log", [])
        (state / f"server-{port}.json").write_text(json.dumps(asdict(record)))
        assert launcher.main(["stop", "--port", str(port)]) == 0
        assert "no server of ours" in capsys.readouterr().err
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_server_that_ignores_sigterm_is_killed_after_the_deadline(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    stubborn = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    created = psutil.Process(stubborn.pid).create_time()
    record = launcher.Running(stubborn.pid, created, "127.0.0.1", 1, "m", "log", [])
    (state / "server-1.json").write_text(json.dumps(asdict(record)))
    monkeypatch.setattr(launcher, "STOP_DEADLINE_S", 0.2)
    assert launcher.main(["stop", "--port", "1"]) == 0
    assert not psutil.pid_exists(stubborn.pid)  # reaped by the launcher, whose child it is here
    assert "SIGKILL" in capsys.readouterr().err


RECORD = {"pid": 1, "created": 1.0, "host": "127.0.0.1", "port": 1, "model": "m", "log": "l", "argv": []}


@pytest.mark.parametrize(
    "change",
    [
        {"pid": -5},
        {"pid": 10**30},
        {"pid": "x"},
        {"pid": True},
        {"created": None},
        {"created": "now"},
        {"host": 5},
        {"model": []},
        {"argv": 7},
        {"argv": [1]},
        {"extra": 1},
    ],
)
def test_a_damaged_pid_file_is_no_server(
    change: dict[str, object], state: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in (json.dumps(RECORD | change), json.dumps([RECORD | change]), json.dumps(change), "{", "\0"):
        (state / f"server-{port}.json").write_text(content)
        assert launcher.main(["status", "--port", str(port)]) == 3
        assert launcher.main(["restart", "--port", str(port)]) == 1
        assert launcher.main(["stop", "--port", str(port)]) == 0
        assert not (state / f"server-{port}.json").exists()
    assert "no server was started" in capsys.readouterr().err


def test_a_start_that_fails_leaves_no_server_behind(
    tiny_llama: TinyModel, state: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / f"server-{port}.json").mkdir()  # the PID file cannot be written
    assert launcher.main([str(tiny_llama.path), "--port", str(port), "-c", "64"]) == 1
    assert f"server-{port}.json" in capsys.readouterr().err
    assert not [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (state / f"server-{port}.json").rmdir()


def test_an_interrupted_start_leaves_no_server_behind(tiny_llama: TinyModel, state: Path, port: int) -> None:
    code = (
        "import pathlib, sys; from apu_engine import launcher, pidfiles; state = pathlib.Path(sys.argv.pop(1))\n"
        "pidfiles.state_dir = lambda: state; launcher._health = lambda server: (0, {}); launcher._run()"
    )
    command = [sys.executable, "-c", code, str(state), str(tiny_llama.path), "--port", str(port), "-c", "64"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    file = state / f"server-{port}.json"
    for _ in range(200):
        if file.exists():
            break
        time.sleep(0.05)
    server = json.loads(file.read_text())["pid"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not file.exists() and not psutil.pid_exists(server)


def test_a_start_goes_on_when_nobody_reads_its_messages(
    tiny_llama: TinyModel, port: int, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf:
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Deaf())
        assert launcher.main([str(tiny_llama.path), "--port", str(port), "-c", "64"]) == 0
    assert launcher.main(["status", "--port", str(port)]) == 0


def test_one_start_at_a_time(tiny_llama: TinyModel, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with launcher._lock(port):
        assert launcher.main([str(tiny_llama.path), "--port", str(port)]) == 1
    assert "another start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stop", "8001"], "nothing else, found 8001"),
        (["status", "--ctx", "5"], "nothing else, found --ctx 5"),
        (["stop", "--foreground"], "nothing else"),
        (["--port"], "--port: needs a value"),
        (["--port="], "--port: expected"),
        (["--port", "0"], "from 1 to 65535"),
        (["m.gguf", "--pin=1"], "--pin: takes no value"),
        (["m.gguf", "other.gguf"], "expected one model"),
        (["m.gguf", "--ctx", "many"], "--ctx: expected"),
        (["m.gguf", "--system", "x"], "unknown option --system"),
        (["stpo"], "stpo: does not exist"),
        (["-dash.gguf"], "unknown option -dash.gguf"),
        (["m.gguf", "--host", "203.0.113.1"], "--host 203.0.113.1: "),
        (["m.gguf", "--host", "x" * 300], "--host xxx"),
    ],
)
def test_bad_command_lines_start_nothing(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = [] if "--port" in args or "--port=" in args else ["--port", str(free_port())]
    found = args if args[0] in ("stop", "status") else [*args, *port]
    assert launcher.main(found) == (
        1 if message in ("stpo: does not exist", "--host 203.0.113.1: ", "--host xxx") else 2
    )
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_options_are_read_as_serve_reads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APU_HOST", "127.0.0.2")
    given = ["--ctx", "1", "-c512", "--pin", "--no-pin", "--no-prefetch", "-np", "2", "--", "-dash\n'.gguf"]
    request = launcher.Request.parse(given)
    assert request.model == str(tmp_path / "-dash\n'.gguf")
    assert request.flags == ["--ctx=512", "--no-pin", "--no-prefetch", "--parallel=2"]
    assert request.config.host == "127.0.0.2" and request.config.parallel == 2
    again = launcher.Request.parse([*request.flags, f"--model={request.model}", "--ctx", "64", "other.gguf"])
    assert again.model == str(tmp_path / "other.gguf") and again.flags[0] == "--ctx=64"
    assert launcher.Request.parse(["--host", "::1", "m.gguf"]).model == str(tmp_path / "m.gguf")


def test_foreground_is_known_to_status_and_stops_with_sigterm(
    tiny_llama: TinyModel, port: int, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys; from pathlib import Path; from apu_engine import launcher, pidfiles\n"
        "folder = Path(sys.argv.pop(1)); pidfiles.state_dir = lambda: folder; launcher.main()"
    )
    command = [sys.executable, "-c", code, str(state), str(tiny_llama.path), "--foreground", "--port", str(port)]
    process = subprocess.Popen([*command, "-c", "64"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert f"http://127.0.0.1:{port}" in process.stdout.readline()
    assert launcher.main(["status", "--port", str(port)]) == 0
    assert f"PID {process.pid}" in capsys.readouterr().out
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert time.monotonic() - started < 5
    process.stdout.close()


def test_bad_port_and_unknown_flag(tiny_llama: TinyModel, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--port", "70000"]) == 2
    assert "70000" in capsys.readouterr().err
    assert launcher.main([str(tiny_llama.path), "--port", str(port), "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


ARGV = ["--ctx=64", "--model=/old.gguf"]
RUNNING = launcher.Running(1, 1.0, "127.0.0.1", 9000, "/old.gguf", "log", ARGV)


@pytest.mark.parametrize(
    ("given", "model", "flags"),
    [
        ([], "/old.gguf", ["--ctx=64", "--port=9000"]),
        (["--port", "9000"], "/old.gguf", ["--ctx=64", "--port=9000"]),
        (["--port=9000", "--ctx", "128"], "/old.gguf", ["--port=9000", "--ctx=128"]),
        (["/new.gguf"], "/new.gguf", ["--port=9000"]),
        (["-m", "/new.gguf", "--mlock"], "/new.gguf", ["--mlock", "--port=9000"]),
    ],
)
def test_restart_keeps_what_is_not_given_anew(given: list[str], model: str, flags: list[str]) -> None:
    request = launcher._restarted(launcher.Request.parse(given), RUNNING)
    assert (request.model, request.flags, request.port) == (model, flags, 9000)


@pytest.mark.parametrize(
    "args",
    ["m.gguf --port 9 --mlock", "--port 9 m.gguf --mlock", "--mlock m.gguf --port 9", "--port 9 -m m.gguf --mlock"],
)
def test_the_model_is_found_among_flags(args: str) -> None:
    request = launcher.Request.parse(args.split())
    assert request.model == str(Path("m.gguf").absolute()) and sorted(request.flags) == ["--mlock", "--port=9"]


def test_an_api_key_is_in_the_curl_line_and_its_file_is_private(
    tiny_llama: TinyModel, port: int, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main([str(tiny_llama.path), "--port", str(port), "--ctx", "64", "--api-key", "se cret"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("curl"))
    assert "Authorization: Bearer se cret" in shlex.split(line)
    assert (state / f"server-{port}.json").stat().st_mode & 0o077 == 0


def test_an_installed_package_is_taken_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_model-1.0.dist-info").mkdir()
    (tmp_path / "some_model-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n"
    )
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model/m.gguf").write_bytes(b"GGUF weights")
    entry = catalog.CatalogEntry(
        *("x", "X", "x.gguf", 12, 1, "none", True),
        sha256=hashlib.sha256(b"GGUF weights").hexdigest(),
        members=(("some-model", "1.0", "some_model/m.gguf"),),
    )
    monkeypatch.setattr(catalog, "load_catalog", lambda: {"x": entry})
    monkeypatch.setattr(catalog, "models_dir", lambda: tmp_path / "models")
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert catalog.fetch("x", lambda _: None).read_bytes() == b"GGUF weights"


def test_catalog_entries_and_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = catalog.load_catalog()
    assert entries[catalog.DEMO].members and len(entries[catalog.DEMO].sha256) == 64
    sizes = [e.bytes for e in catalog.fitting(24 * 10**9)]
    assert sizes == sorted(sizes, reverse=True) and all(s < 24 * 10**9 for s in sizes)
    with pytest.raises(ApuError, match="not a model that can be fetched"):
        catalog.fetch("no-such-model")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    hub = tmp_path / ".cache/huggingface/hub/models--x/snapshots/1"
    blobs = tmp_path / ".ollama/models/blobs"
    hub.mkdir(parents=True)
    blobs.mkdir(parents=True)
    (blobs / "sha256-aa").write_bytes(b"GGUF" + bytes(100))
    (blobs / "sha256-bb").write_bytes(b"{}")
    (hub / "linked.gguf").symlink_to(blobs / "sha256-aa")
    (hub / "broken.gguf").symlink_to(tmp_path / "gone")
    found = [p for p in catalog.discover() if tmp_path in p.parents]
    assert len(found) == 1  # one file, however many names it has


def test_a_user_without_a_home_folder_is_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ApuError, match="set HOME"):
        catalog.discover()
