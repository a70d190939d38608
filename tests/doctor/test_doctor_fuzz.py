"""Whatever /proc and /sys hold, and whatever is missing, doctor ends with a whole report."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from clinic import ALL, STOCK, copy, look

from apu_engine.config import EngineConfig
from apu_engine.doctor import verdict_line
from apu_engine.doctor.report import TITLES
from apu_engine.memory.machine import Machine

JUNK = (
    b"",
    b"\n\n\n",
    b"\0" * 64,
    b"\xff\xfe\x80 \xc3(",
    b"9" * 5000,
    b"-1\n",
    b"0x\n",
    b"a b c: d - e\n" * 50,
    b"::: - - -\n",
    b"99999999999999999999999999\n",
)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def whole(root: Path, tmp_path: Path) -> None:
    report = look(root, tmp_path)
    assert [item.id for item in report.checks] == list(TITLES)[:24]
    json.dumps(report.as_dict())
    assert report.line().startswith("doctor: ")


@pytest.mark.parametrize("root", ALL, ids=lambda root: root.name)
def test_one_file_is_broken(root: Path, tmp_path: Path) -> None:
    machine = copy(root, tmp_path)
    rng = random.Random(1)
    for path in files(machine):
        content = path.read_bytes()
        broken = [rng.choice(JUNK), content[: rng.randrange(len(content) + 1)], rng.randbytes(len(content))]
        path.write_bytes(rng.choice(broken))
        if path.relative_to(machine).parts[0] != "dev":
            whole(machine, tmp_path)
        path.write_bytes(content)


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_all_files_are_junk(junk: bytes, tmp_path: Path) -> None:
    for root in ALL:
        machine = copy(root, tmp_path)
        for path in files(machine):
            path.write_bytes(junk)
        whole(machine, tmp_path)


def test_parts_are_broken(tmp_path: Path) -> None:
    """A tenth of the files broken, a tenth missing, some a folder."""
    for seed in range(12):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        machine = copy(rng.choice(ALL), folder)
        for path in files(machine):
            luck = rng.random()
            if luck < 0.1:
                path.write_bytes(rng.choice(JUNK))
            elif luck < 0.2:
                path.unlink()
            elif luck < 0.25:
                path.unlink()
                path.mkdir()
        whole(machine, tmp_path)


def test_unreadable_properties_name_the_kind_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: Machine) -> int:
        raise RuntimeError("the kernel says no")

    monkeypatch.setattr(Machine, "memory_total", property(fail))
    report = look(STOCK, tmp_path)
    found = next(item for item in report.checks if item.id == "memory")
    assert (found.verdict, found.value) == ("info", "could not look: RuntimeError: the kernel says no")
    assert len(report.checks) == 24


def test_a_start_never_fails_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("apu_engine.doctor.examine", fail)
    assert verdict_line(EngineConfig()) == "doctor: could not look: RuntimeError: no"
