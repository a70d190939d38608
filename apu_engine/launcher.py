"""What `rocm_start_server.sh` does once everything is built: start, stop, status, restart.

A started server runs in its own session with its output in a log file. One PID file per port names the
process and the moment it was created, so that a recycled PID is never signalled; stopping is SIGTERM, a
deadline, then SIGKILL of that one process. Nothing is killed by name. Messages go to stderr, the ready lines
to stdout.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from apu_engine import catalog
from apu_engine.config import EngineConfig, specs
from apu_engine.errors import ApuError
from apu_engine.server.hints import curl_line

USAGE = """\
Usage: ./rocm_start_server.sh [MODEL] [serve flags]   start and wait until it is ready
       ./rocm_start_server.sh stop|status|restart [--port N]
  MODEL         a GGUF file, any shard of a split one, or a folder that holds one; without it a demo model
  --foreground  stay attached: output here, Ctrl-C stops
  --port N      port (default 8000); stop, status and restart act on the server of that port
  restart       keeps model and flags; flags given with it take the place of the old ones
  Every other flag goes to `apu-engine serve`; its --help lists them."""

STOP_DEADLINE_S = 30.0


@dataclass(slots=True)
class Running:
    """What the PID file keeps about a started server."""

    pid: int
    created: float  # process creation time as psutil gives it
    host: str
    port: int
    model: str
    log: str
    argv: list[str]

    def alive(self) -> bool:
        import psutil

        try:
            process = psutil.Process(self.pid)
            same = abs(float(process.create_time()) - self.created) < 1
            return same and bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except ApuError as error:
        print(f"rocm_start_server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    verb = args.pop(0) if args and args[0] in ("start", "stop", "status", "restart") else "start"
    foreground = "--foreground" in args
    args = [a for a in args if a != "--foreground"]
    port = _port(args)
    if verb == "stop":
        return _stop(port)
    if verb == "status":
        return _status(port)
    if verb == "restart":
        running = _read(port)
        if running is None:
            raise ApuError(f"no server was started on port {port}; start one with ./rocm_start_server.sh [MODEL]")
        _stop(port)
        return _start(_restart_args(args, running), port, foreground)
    return _start(args, port, foreground)


def _restart_args(args: list[str], running: Running) -> list[str]:
    """The old arguments, unless others than --port were given; the old model, unless another was."""
    model, flags = _split_model(args)
    flags = _without(flags, "--port")
    if model is None and not flags:
        flags = _without(_split_model(running.argv)[1], "--port")
    return [model or running.model, *flags, "--port", str(running.port)]


def _start(args: list[str], port: int, foreground: bool) -> int:
    running = _read(port)
    if running is not None and running.alive():
        raise ApuError(
            f"port {port} is served already (PID {running.pid}, {running.model}); "
            "use `restart`, `stop`, or another --port"
        )
    host = _option(args, "--host") or "127.0.0.1"
    _require_free_port(host, port)
    model, serve_args = _split_model(args)
    model = model or EngineConfig.resolve().model or _demo_model()
    from apu_engine.device import pick_device

    device, why = pick_device(_option(args, "--device") or "auto")
    _say(f"device: {device} ({why})")
    command = [sys.executable, "-m", "apu_engine", "serve", "-m", model, *serve_args]
    if foreground:
        _note(os.getpid(), host, port, model, "none (foreground)", args)
        os.execv(sys.executable, command)
    log = _state_dir() / f"server-{port}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    started = _note(process.pid, host, port, model, str(log), args)
    try:
        health = _wait_ready(process, started)
    except BaseException:
        _terminate(started)
        raise
    _print_ready(started, health)
    return 0


def _note(pid: int, host: str, port: int, model: str, log: str, args: list[str]) -> Running:
    """Writes the PID file; for this user alone, because the arguments may hold an API key."""
    import psutil

    started = Running(pid, psutil.Process(pid).create_time(), host, port, model, log, args)
    _pid_file(port).touch(mode=0o600)
    _pid_file(port).write_text(json.dumps(asdict(started)), "utf-8")
    return started


def _wait_ready(process: subprocess.Popen[bytes], server: Running) -> dict[str, Any]:
    said = ""
    while True:
        if process.poll() is not None:
            _pid_file(server.port).unlink(missing_ok=True)
            tail = Path(server.log).read_text("utf-8", "replace").strip().splitlines()[-8:]
            raise ApuError("the server ended while starting; its last lines:\n  " + "\n  ".join(tail))
        code, health = _health(server)
        if code == 200:
            return health
        if health.get("error") and health.get("status") == "error":
            raise ApuError(str(health["error"]))
        stage = _stage_line(health)
        if stage and stage != said:
            _say(stage)
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


def _print_ready(server: Running, health: dict[str, Any]) -> None:
    url = f"http://{_url_host(server.host)}:{server.port}"
    print(health.get("ready") or f"ready: {server.model}; {url}")
    key = _option(server.argv, "--api-key") or EngineConfig.resolve().api_key
    print(curl_line(url, health.get("chat", True), key))
    _say(f"PID {server.pid}, log {server.log}; stop with ./rocm_start_server.sh stop")


def _stop(port: int) -> int:
    running = _read(port)
    if running is None or not running.alive():
        _pid_file(port).unlink(missing_ok=True)
        _say(f"no server of ours runs on port {port}")
        return 0
    _terminate(running)
    _say(f"stopped PID {running.pid} (port {port})")
    return 0


def _terminate(server: Running) -> None:
    import psutil

    if server.alive():
        process = psutil.Process(server.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except psutil.TimeoutExpired:
            _say(f"PID {server.pid} did not end within {STOP_DEADLINE_S:g} s of SIGTERM; sending SIGKILL")
            process.kill()
            process.wait(5)
    _pid_file(server.port).unlink(missing_ok=True)


def _status(port: int) -> int:
    running = _read(port)
    if running is None or not running.alive():
        print(f"port {port}: not running")
        return 3
    code, health = _health(running)
    state = "ready" if code == 200 else str(health.get("status") or "not answering")
    print(f"port {port}: {state}, PID {running.pid}, {running.model}, log {running.log}")
    if health.get("ready"):
        print(health["ready"])
    return 0 if code == 200 else 4


def _health(server: Running) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of /health; (0, {}) when nothing answers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{_url_host(host)}:{server.port}/health", timeout=5) as answer:
            return answer.status, _json_object(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, _json_object(error.read())
    except OSError:
        return 0, {}


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _demo_model() -> str:
    from apu_engine.memory.budget import memory_available

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


def _split_model(args: list[str]) -> tuple[str | None, list[str]]:
    """(model, other arguments): what -m or --model names, or the first argument that is no flag and no flag's value."""
    takes_value = {flag for item in specs() if item.kind != "bool" for flag in item.flags}
    model: str | None = None
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("-m", "--model"):
            model = value if equals else next(words, None)
        elif word in takes_value:
            rest += [word, *(value for value in [next(words, None)] if value is not None)]
        elif model is None and not word.startswith("-"):
            model = word
        else:
            rest.append(word)
    return model, rest


def _without(args: list[str], name: str) -> list[str]:
    """`args` less the option `name` and its value."""
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word == name:
            next(words, None)
        elif not word.startswith(name + "="):
            kept.append(word)
    return kept


def _option(args: list[str], name: str) -> str | None:
    for i, arg in enumerate(args):
        if arg == name and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith(name + "="):
            return arg.partition("=")[2]
    return None


def _port(args: list[str]) -> int:
    text = _option(args, "--port") or str(EngineConfig.resolve().port)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ApuError(f"--port {text}: expected a number from 1 to 65535")
    return int(text)


def _require_free_port(host: str, port: int) -> None:
    if _port_is_free(host, port):
        return
    other = next((p for p in range(port + 1, min(port + 200, 65536)) if _port_is_free(host, p)), None)
    advice = f"; port {other} is free: add --port {other}" if other else ""
    raise ApuError(f"port {port} is in use by {_port_holder(port)}{advice}")


def _port_is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError as error:
            raise ApuError(f"port {port} needs privileges: choose one above 1023") from error
        except socket.gaierror as error:
            raise ApuError(f"--host {host}: {error.strerror}") from error
        except OSError:
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


def _read(port: int) -> Running | None:
    try:
        return Running(**json.loads(_pid_file(port).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _pid_file(port: int) -> Path:
    return _state_dir() / f"server-{port}.json"


def _state_dir() -> Path:
    root = catalog.project_root()
    folder = root / ".apu" if root and os.access(root, os.W_OK) else Path.home() / ".local/state/apu_engine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run() -> NoReturn:
    raise SystemExit(main())


if __name__ == "__main__":
    _run()
