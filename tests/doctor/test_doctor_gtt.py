"""Who holds GTT: descriptors, shared clients, other users' processes, and what is left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from clinic import STOCK, check, copy, look, write

from apu_engine.doctor import gtt
from apu_engine.memory.machine import Machine

PCI = "0000:c5:00.0"
USED = "sys/class/drm/card1/device/mem_info_gtt_used"
GIB = 1 << 30


def process(root: Path, pid: int, name: str, fds: dict[int, tuple[str, int, int]], pci: str = PCI) -> None:
    """A process with `fds`: number -> (file, DRM client, GiB of GTT)."""
    write(root, f"proc/{pid}/comm", name + "\n")
    (root / f"proc/{pid}/fd").mkdir(parents=True)
    for number, (file, client, gib) in fds.items():
        (root / f"proc/{pid}/fd/{number}").symlink_to(file)
        write(
            root,
            f"proc/{pid}/fdinfo/{number}",
            f"pos:\t0\nflags:\t02100002\nmnt_id:\t24\nino:\t1037\ndrm-driver:\tamdgpu\ndrm-client-id:\t{client}\n"
            f"drm-pdev:\t{pci}\npasid:\t32771\ndrm-memory-vram:\t1024 KiB\ndrm-memory-gtt: \t{gib << 20} KiB\n"
            "drm-memory-cpu: \t0 KiB\ndrm-engine-gfx:\t23211 ns\n",
        )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy(STOCK, tmp_path)


def test_owned(root: Path, tmp_path: Path) -> None:
    process(root, 900, "llama-server", {5: ("/dev/dri/renderD128", 7, 20), 6: ("/dev/null", 8, 50)})
    process(root, 901, "helper", {3: ("/dev/dri/renderD128", 7, 20)})  # the same client, handed on
    process(root, 902, "gnome-shell", {9: ("/dev/dri/card1", 12, 1), 10: ("/dev/dri/renderD129", 13, 30)})
    write(root, "proc/902/fdinfo/10", (root / "proc/902/fdinfo/10").read_text().replace(PCI, "0000:01:00.0"))
    write(root, USED, str(21 * GIB + (500 << 20)))
    found = check(look(root, tmp_path), "gtt")
    assert found.verdict == "ok" and "llama-server (900) 20 GiB, gnome-shell (902) 1 GiB" in found.value
    assert found.data["unowned"] == 500 << 20
    assert found.data["owners"][0] == {"pid": 900, "name": "llama-server", "bytes": 20 * GIB}


def test_leaked(root: Path, tmp_path: Path) -> None:
    process(root, 900, "llama-server", {5: ("/dev/dri/renderD128", 7, 20)})
    write(root, USED, str(55 * GIB))
    found = check(look(root, tmp_path), "gtt")
    assert found.verdict == "bad" and found.value.startswith("35 GiB without an owner")
    assert found.remedy == ("sudo reboot",)


def test_other_users(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their descriptors cannot be read; KFD's counters can. What may be theirs is no certain leak."""
    process(root, 900, "python", {})
    process(root, 901, "Xorg", {})
    process(root, 902, "kworker/3:1", {})
    write(root, "proc/902/cmdline", "")
    write(root, "sys/class/kfd/kfd/proc/900/vram_43284", f"{30 * GIB}\n")
    write(root, "sys/class/kfd/kfd/proc/900/vram_1002", f"{9 * GIB}\n")  # of another GPU
    write(root, "sys/class/kfd/kfd/proc/900/pasid", "32771\n")
    real = os.scandir

    def scandir(path: Path) -> object:
        if str(path).endswith(("900/fd", "901/fd", "902/fd")):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    write(root, USED, str(31 * GIB))
    found = check(look(root, tmp_path), "gtt")
    assert found.verdict == "ok" and "python (900) 30 GiB" in found.value and found.data["unowned"] is None
    write(root, USED, str(40 * GIB))
    found = check(look(root, tmp_path), "gtt")
    assert found.verdict == "warn" and "or held by one of 1 processes of other users" in found.value
    assert found.remedy[0].startswith("to look at them too: sudo ") and found.remedy[-1] == "sudo reboot"


def test_a_deadline(root: Path, tmp_path: Path) -> None:
    for pid in range(900, 903):
        process(root, pid, "busy", {5: ("/dev/dri/renderD128", pid, 9)})
    assert not gtt.users(Machine(root), PCI, None, 0.0).finished
    write(root, USED, str(30 * GIB))
    found = check(look(root, tmp_path, deadline_s=0.0), "gtt")
    assert found.verdict == "info" and "was not looked up" in found.value


def test_this_process_is_looked_at() -> None:
    users = gtt.users(Machine(Path("/")), "", None, 5.0)
    assert users.finished and all(user.pid != os.getpid() for user in users.found)
