"""PID files of started servers: one per port, with the process, the moment it was created, and how it was started.

rocm_start_server.sh writes and reads them; a server that ends itself removes its own. A process counts as the server
only with the same moment of creation, so that a recycled PID is never taken for it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from apu_engine import catalog


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


_FIELDS = {"pid": int, "created": float, "host": str, "port": int, "model": str, "log": str, "argv": list}


def read(port: int) -> Running | None:
    """What the PID file says; None without one, or when it is damaged."""
    try:
        found = json.loads(path(port).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != _FIELDS.keys():
        return None
    if any(type(found[name]) is not kind for name, kind in _FIELDS.items()):
        return None
    if not 0 < found["pid"] < 1 << 31 or not all(isinstance(arg, str) for arg in found["argv"]):
        return None
    return Running(**found)


def write(server: Running) -> None:
    """Whole or not at all, and for this user alone, because the arguments may hold an API key."""
    file = path(server.port)
    partial = file.with_suffix(".new")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(server)), "utf-8")
    partial.replace(file)


def forget(pid: int) -> None:
    """Removes the PID files that name process `pid`: for a server that ends itself."""
    for file in state_dir().glob("server-*.json"):
        number = file.stem.removeprefix("server-")
        if number.isascii() and number.isdigit() and (server := read(int(number))) is not None and server.pid == pid:
            file.unlink(missing_ok=True)


def path(port: int) -> Path:
    """The PID file of a port."""
    return state_dir() / f"server-{port}.json"


def state_dir() -> Path:
    """The folder of PID files, logs and locks; it is made where it is missing."""
    root = catalog.project_root()
    folder = root / ".apu" if root and os.access(root, os.W_OK) else catalog.home() / ".local/state/apu_engine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
