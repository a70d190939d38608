"""What smaps does not say of a process: who else maps its files, what a GPU's driver holds for it, and what it says.

Processes are told apart by what /proc shows of them: a file by device and inode in `maps`, GPU memory by DRM's fdinfo
and KFD's counters. What an engine knows of itself (registered bytes, KV cache, scratch, its copy on the device) the
kernel cannot tell: a server answers that at /health, which needs no key.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from apu_engine.memory.fdinfo import drm_files, pids, size
from apu_engine.memory.machine import Machine

_SECONDS = 2.0  # for an answer
_ANSWER = 1 << 20


# ---------------------------------------------------------------- sharing


@dataclass(frozen=True, slots=True)
class Sharing:
    """Processes that map each file, by the file's key (`fd:01 42`: device and inode as maps writes them)."""

    pids: Mapping[str, tuple[int, ...]]
    hidden: int  # processes whose mappings may not be read


def sharing(keys: Iterable[str], machine: Machine | None = None) -> Sharing:
    """Looks through the mappings of all processes."""
    proc = (machine or Machine()).path("proc")
    found: dict[str, list[int]] = {key: [] for key in keys}
    hidden = 0
    for pid in pids(proc):
        try:
            text = (proc / str(pid) / "maps").read_text(errors="surrogateescape") if found else ""
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # it ended
            continue
        for key in found:
            if f" {key} " in text:
                found[key].append(pid)
    return Sharing({key: tuple(sorted(own)) for key, own in found.items()}, hidden)


# ---------------------------------------------------------------- GPU drivers


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """What a driver counts for a process on one GPU. `kinds`: "vram", "gtt", ... -> bytes."""

    gpu: str  # PCI address, or KFD's number of it
    source: str  # "drm amdgpu", "kfd"
    kinds: dict[str, int]


def driver_memory(pid: int, machine: Machine | None = None) -> tuple[DriverMemory, ...]:
    """By each GPU: DRM's fdinfo, resident bytes by kind, then KFD's counters. Empty where there is neither, or where
    the process may not be looked at.
    """
    machine = machine or Machine()
    clients: dict[tuple[str, str], dict[str, int]] = {}
    for fields in _clients(machine.path(f"proc/{pid}")):
        key = (fields.get("drm-pdev", "?"), fields.get("drm-driver", "?"))
        kinds = clients.setdefault(key, {})
        for kind, held in _kinds(fields).items():
            kinds[kind] = kinds.get(kind, 0) + held
    found = [DriverMemory(gpu, f"drm {driver}", kinds) for (gpu, driver), kinds in sorted(clients.items())]
    folder = machine.path(f"sys/class/kfd/kfd/proc/{pid}")
    with contextlib.suppress(OSError):
        for name in sorted(path.name for path in folder.iterdir()):
            if match := re.fullmatch(r"vram_(\d+)", name):
                held = machine.number(f"sys/class/kfd/kfd/proc/{pid}/{name}") or 0
                found.append(DriverMemory(match[1], "kfd", {"vram": held}))
    return tuple(found)


def _clients(process: Path) -> Iterator[dict[str, str]]:
    """Fields of each DRM client of a process; one that has several descriptors is given once."""
    seen: set[tuple[str, str]] = set()
    with contextlib.suppress(PermissionError):
        for fields in drm_files(process):
            client = (fields.get("drm-pdev", ""), fields["drm-client-id"])
            if client not in seen:
                seen.add(client)
                yield fields


def _kinds(fields: dict[str, str]) -> dict[str, int]:
    """Bytes by kind of memory: drm-resident-KIND, in older kernels drm-memory-KIND."""
    found: dict[str, int] = {}
    for prefix in ("drm-memory-", "drm-resident-"):
        for name, value in fields.items():
            held = size(value)
            if name.startswith(prefix) and held is not None:
                found[name.removeprefix(prefix)] = held
    return {kind: held for kind, held in found.items() if held}


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine says of its memory, in bytes: LLM.memory, and of a server the same at /health.

    `registered` of file pages that the GPU reads in place, `device` of a GPU's own memory (weights that were copied, KV
    cache and scratch). On the CPU KV cache and scratch are part of anonymous memory. `made` of small tensors that no
    file holds as they are needed, such as norms of 16 bits in float32.
    """

    strategy: str
    way: str | None
    weights: int
    registered: int
    device: int
    kv: int
    scratch: int
    copied: int
    made: int = 0

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Engine | None:
        """From JSON's object; None for something else."""
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(fields, cls)
        return None


def ask(pid: int) -> tuple[Engine | None, str]:
    """What a server says of itself; else None, and why.

    Asks at the ports that process `pid` listens on, if it shares this process's network.
    """
    if _network(pid) != _network(os.getpid()):
        return None, "it is in another network namespace"
    places = _listening(pid)
    if places is None:
        return None, "its sockets may not be looked at"
    why = "it listens on no port"
    for host, port in places:
        why = f"port {port} does not tell"
        if (found := _health(host, port)) is not None:
            return found, ""
    return None, why


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def _listening(pid: int) -> list[tuple[str, int]] | None:
    import psutil

    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return None
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    found = {(local.get(s.laddr.ip, s.laddr.ip), s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}
    return sorted(found, key=lambda place: place[1])


def _health(host: str, port: int) -> Engine | None:
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/health")
        answer = msgspec.json.decode(connection.getresponse().read(_ANSWER))
    except (OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError):
        return None
    finally:
        connection.close()
    fields = answer.get("memory") if isinstance(answer, dict) else None
    return Engine.read(fields) if isinstance(fields, dict) else None
