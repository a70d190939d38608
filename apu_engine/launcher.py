"""What `rocm_start_server.sh` does once everything is built: start, stop, status, restart.

All options are checked before anything happens. A started server runs in its own session with its output in
a log file; a start that fails or is interrupted takes its server with it. One PID file per port names the
process and the moment it was created, so that a recycled PID is never signalled; stopping is SIGTERM, a
deadline, then SIGKILL of that one process. Nothing is killed by name. Messages go to stderr, the ready lines
to stdout.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from apu_engine import catalog, pidfiles
from apu_engine.config import EngineConfig, specs
from apu_engine.errors import ApuError, ConfigError, GpuError
from apu_engine.options import Spec
from apu_engine.pidfiles import Running
from apu_engine.server.hints import curl_line

if TYPE_CHECKING:
    import psutil

    from apu_engine.device import Choice

USAGE = """\
Usage: ./rocm_start_server.sh [MODEL] [serve flags]   start and wait until it is ready
       ./rocm_start_server.sh stop|status [--port N]
       ./rocm_start_server.sh restart [--port N] [MODEL] [serve flags]
  MODEL         a GGUF file, any shard of a split one, a folder that holds one, or a folder of safetensors;
                without it a demo model
  --foreground  stay attached: output here, Ctrl-C stops
  --port N      port (default 8000); stop, status and restart act on the server of that port
  restart       keeps model and flags; flags given with it take the place of the old ones
  status        exits with 0 when ready, 3 when not running, 4 when running but not ready
  Every other flag goes to `apu-engine serve`; its --help lists them."""

STOP_DEADLINE_S = 30.0


class Ended(ApuError):
    """The server ended while it was starting. Its exit status is ours then."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.exit_status = status


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except (ApuError, OSError) as error:
        print(f"rocm_start_server: {error}", file=sys.stderr)
        return error.exit_status if isinstance(error, ApuError) else 1
    except KeyboardInterrupt:
        return 130


def _dispatch(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    verb = args.pop(0) if args and args[0] in ("start", "stop", "status", "restart") else "start"
    foreground = "--foreground" in args
    request = Request.parse([a for a in args if a != "--foreground"])
    if verb == "start":
        return _start(request, foreground)
    port = request.port
    if verb in ("stop", "status"):
        if foreground or request.named - {"port"}:
            raise ConfigError(f"{verb} takes --port N and nothing else, found {' '.join(args)}")
        return _stop(port) if verb == "stop" else _status(port)
    running = pidfiles.read(port)
    if running is None:
        raise ApuError(
            f"no server was started on port {port}, or it was stopped; start one with ./rocm_start_server.sh [MODEL]"
            + _others(port)
        )
    request = _restarted(request, running)  # refused, if at all, while the old server still runs
    _require_model(request)
    _stop(port)
    return _start(request, foreground)


def _require_model(request: Request) -> None:
    """Refuses a mistyped path or command before anything is started or stopped."""
    if request.model and not Path(request.model).exists():
        raise ApuError(f"{request.model}: does not exist; expected a model's path, or stop, status or restart")


def _restarted(request: Request, running: Running) -> Request:
    """The old model, unless another is named; the old flags, unless others than --port are given."""
    args = running.argv
    if request.named - {"port"}:
        model = request.model if "model" in request.named else running.model
        args = [*request.flags, f"--model={model}"]
    return Request.parse([*args, f"--port={running.port}"])


@dataclass(slots=True)
class Request:
    """A command line, checked: what the server would make of it, and the flags to hand on, without the model."""

    config: EngineConfig
    model: str | None  # absolute, so that a restart from another folder finds it
    flags: list[str]
    named: set[str]

    @property
    def port(self) -> int:
        if not self.config.port:
            raise ConfigError("--port 0: expected a number from 1 to 65535")
        return self.config.port

    @classmethod
    def parse(cls, args: Sequence[str]) -> Request:
        """Raises ConfigError for an unknown flag, a bad or missing value, or a second model."""
        known = {flag: item for item in specs() if item.name != "system" for flag in item.flags}
        given: dict[str, Any] = {}
        models: list[str] = []
        rest = deque(args)
        while rest:
            arg = rest.popleft()
            if arg == "--":
                models += rest
                break
            if not arg.startswith("-") or arg == "-":
                models.append(arg)
                continue
            item, value = _flag(arg, known, rest)
            given[item.name] = (
                str(Path(value).absolute()) if item.kind == "path" and isinstance(value, str) and value else value
            )
        if len(models) > 1:
            raise ConfigError(f"expected one model, found {' '.join(models)}")
        if models:
            given["model"] = str(Path(models[0]).absolute()) if models[0] else ""
        config = EngineConfig.resolve(given, "flag")
        flags = [_written(known, name, value) for name, value in given.items() if name != "model"]
        model = str(Path(config.model).absolute()) if config.model else None
        return cls(config, model, flags, set(given))


def _flag(arg: str, known: dict[str, Spec], rest: deque[str]) -> tuple[Spec, str | bool]:
    """The option that `arg` names and its value, which may be the next of `rest`."""
    name, equals, value = arg.partition("=")
    off = name.startswith("--no-")
    if item := known.get(f"--{name[5:]}" if off else name):
        if item.kind == "bool":
            if equals:
                raise ConfigError(f"{name}: takes no value, found {value}")
            return item, not off
        if not off:
            if not equals and not rest:
                raise ConfigError(f"{name}: needs a value, {item.expected}")
            return item, value if equals else rest.popleft()
    if not arg.startswith("--") and (item := known.get(arg[:2])) and item.kind != "bool":  # -c512
        return item, arg[2:]
    raise ConfigError(f"unknown option {name}; .venv/bin/apu-engine serve --help lists all")


def _written(known: dict[str, Spec], name: str, value: str | bool) -> str:
    flag = next(f for f, item in known.items() if item.name == name and f.startswith("--"))
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"{flag}={value}"


def _start(request: Request, foreground: bool) -> int:
    with _lock(request.port):
        return _start_alone(request, foreground)


def _start_alone(request: Request, foreground: bool) -> int:
    host, port = request.config.host, request.port
    running = pidfiles.read(port)
    if running is not None and running.alive():
        raise ApuError(
            f"port {port} is served already (PID {running.pid}, {running.model}); "
            f"use `restart{_port_flag(port)}`, `stop{_port_flag(port)}`, or another --port"
        )
    _require_free_port(host, port)
    _require_model(request)
    from apu_engine.device import pick_device
    from apu_engine.doctor import verdict_line

    if not foreground:  # where the server says it on the same screen
        _say(verdict_line(replace(request.config, model=request.model)))
    try:
        device = pick_device(request.config.device, request.config.kernels)
    except GpuError as error:
        if request.model or request.config.device != "auto":
            raise
        device, request = _demo_on_the_cpu(request, error)
    model = request.model or _demo_model()
    _say(f"device: {device.name} ({device.reason})")
    command = [sys.executable, "-m", "apu_engine", "serve", f"--model={model}", *request.flags]
    argv = [*request.flags, f"--model={model}"]
    import psutil

    if foreground:
        created = psutil.Process().create_time()
        pidfiles.write(Running(os.getpid(), created, host, port, model, "none (foreground)", argv))
        os.execv(sys.executable, command)
    log = pidfiles.state_dir() / f"server-{port}.log"
    with log.open("ab") as out:
        before = out.tell()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    child = psutil.Process(process.pid)
    try:
        started = Running(process.pid, child.create_time(), host, port, model, str(log), argv)
        pidfiles.write(started)
        health = _wait_ready(process, started, before)
    except BaseException:
        _end(child)
        with contextlib.suppress(OSError):
            pidfiles.path(port).unlink(missing_ok=True)
        raise
    _print_ready(started, health, request.config.api_key)
    return 0


@contextlib.contextmanager
def _lock(port: int) -> Iterator[None]:
    """One start per port at a time: two would both find the port free."""
    with (pidfiles.state_dir() / f"server-{port}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ApuError(f"another start on port {port} is in progress; wait for it, or `stop` it") from None
        yield


def _wait_ready(process: subprocess.Popen[bytes], server: Running, log_start: int) -> dict[str, Any]:
    said = ""
    while True:
        if process.poll() is not None:
            tail = Path(server.log).read_bytes()[log_start:].decode("utf-8", "replace").strip().splitlines()[-8:]
            status = process.returncode if process.returncode > 0 else 1
            raise Ended("the server ended while starting; its last lines:\n  " + "\n  ".join(tail), status)
        code, health = _health(server)
        if code == 200:
            return health
        if health.get("error") and health.get("status") == "error":
            raise ApuError(str(health["error"]))
        stage = _stage_line(health)
        if stage and stage != said:
            _say(f"loading: {stage}")
            said = stage
        time.sleep(0.1)


def _stage_line(health: dict[str, Any]) -> str:
    progress = health.get("progress") or {}
    stage = str(progress.get("stage") or health.get("stage") or "")
    total = float(progress.get("total_bytes") or 0)
    if not stage or not total:
        return stage
    done = float(progress.get("done_bytes") or 0)
    return f"{stage} {10 * int(10 * done / total)}%"


def _print_ready(server: Running, health: dict[str, Any], key: str | None) -> None:
    url = f"http://{_url_host(server.host)}:{server.port}"
    print(health.get("ready") or f"ready: {server.model}; {url}")
    print(curl_line(url, health.get("chat", True), key))
    _say(f"PID {server.pid}, log {server.log}; stop with ./rocm_start_server.sh stop{_port_flag(server.port)}")


def _stop(port: int) -> int:
    running = pidfiles.read(port)
    if running is None or not running.alive():
        pidfiles.path(port).unlink(missing_ok=True)
        _say(f"no server of ours runs on port {port}{_others(port)}")
        return 0
    _terminate(running)
    _say(f"stopped PID {running.pid} (port {port})")
    return 0


def _terminate(server: Running) -> None:
    import psutil

    if server.alive():
        _end(psutil.Process(server.pid))
    pidfiles.path(server.port).unlink(missing_ok=True)


def _end(process: psutil.Process) -> None:
    import psutil

    try:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except psutil.TimeoutExpired:
            _say(f"PID {process.pid} did not end within {STOP_DEADLINE_S:g} s of SIGTERM; sending SIGKILL")
            process.kill()
            process.wait(5)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied:
        raise ApuError(f"PID {process.pid} belongs to another user; stop it as that user") from None
    except psutil.TimeoutExpired:
        raise ApuError(f"PID {process.pid} does not end, even after SIGKILL; the kernel holds it") from None


def _status(port: int) -> int:
    running = pidfiles.read(port)
    if running is None or not running.alive():
        print(f"port {port}: not running{_others(port)}")
        return 3
    code, health = _health(running)
    state = "ready" if code == 200 else str(health.get("status") or "not answering")
    print(f"port {port}: {state}, PID {running.pid}, {running.model}, log {running.log}")
    if health.get("ready"):
        print(health["ready"])
    return 0 if code == 200 else 4


def _others(port: int) -> str:
    """Where else a server runs, for a command that found none on `port`."""
    numbers = (file.stem.removeprefix("server-") for file in pidfiles.state_dir().glob("server-*.json"))
    ports = sorted(int(number) for number in numbers if number.isascii() and number.isdigit())
    running = [n for n in ports if n != port and (server := pidfiles.read(n)) is not None and server.alive()]
    return f"; servers run on: {', '.join(f'--port {n}' for n in running)}" if running else ""


def _port_flag(port: int) -> str:
    return "" if port == EngineConfig().port else f" --port {port}"


def _health(server: Running) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of /health; (0, {}) when nothing answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{_url_host(host)}:{server.port}/health", timeout=5) as answer:
            return answer.status, _json_object(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _json_object(error.read())
    except (OSError, http.client.HTTPException):  # nothing there, or no HTTP server
        return 0, {}


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _demo_on_the_cpu(request: Request, error: GpuError) -> tuple[Choice, Request]:
    """The demo shows that all works, so it goes on, and says aloud what a model that was named would not get past."""
    from apu_engine.device import pick_device

    bar = "=" * 100
    _say(f"\n{bar}\nTHE GPU IS NOT USED: {error}")
    _say(f"The demo model runs on the CPU instead; a model that you name would stop here.\n{bar}")
    changed = replace(request, config=replace(request.config, device="cpu"), flags=[*request.flags, "--device=cpu"])
    return pick_device("cpu"), changed


def _demo_model() -> str:
    from .memory.budget import memory_available

    path = catalog.fetch(catalog.DEMO, _say)
    available = memory_available()
    larger = [e for e in catalog.fitting(available) if e.chat and e.name != catalog.DEMO][:3]
    _say("no model named: serving the demo model SmolLM2 135M, which is tiny: it shows that all works")
    if larger:
        _say(f"this machine could hold ({available / 1e9:.0f} GB available), for example:")
        for entry in larger:
            _say(f"  {entry.title} ({entry.bytes / 1e9:.1f} GB) from {entry.origin}")
    found = [p for p in catalog.discover() if p.parent != catalog.models_dir()]
    if found:
        _say("GGUF files found on this machine; start one with ./rocm_start_server.sh FILE:")
        for file in found:
            _say(f"  {file} ({file.stat().st_size / 1e9:.1f} GB)")
    return str(path)


def _require_free_port(host: str, port: int) -> None:
    if _port_is_free(host, port):
        return
    other = next((p for p in range(port + 1, min(port + 200, 65536)) if _port_is_free(host, p)), None)
    advice = f"; port {other} is free: add --port {other}" if other else ""
    raise ApuError(f"port {port} is in use by {_port_holder(port)}{advice}")


def _port_is_free(host: str, port: int) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no host name"
        raise ApuError(f"--host {host[:80]}: {reason}") from error
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError as error:
            raise ApuError(f"port {port} needs privileges: choose one above 1023") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ApuError(f"--host {host}: {error.strerror}") from error
            return False
    return True


def _port_holder(port: int) -> str:
    import psutil

    try:
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port and link.pid:
                process = psutil.Process(link.pid)
                return f"{process.name()} (PID {link.pid}, user {process.username()})"
    except psutil.Error:
        pass
    return "a process that this user may not see"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # whoever read along is gone: no reason to give up a start
        print(text, file=sys.stderr, flush=True)


def _run() -> NoReturn:
    from apu_engine.cli import standard_streams

    standard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    raise SystemExit(main())


if __name__ == "__main__":
    _run()
