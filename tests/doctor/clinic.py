"""Machines to examine: the fixtures, copies of them that can be changed, and users with other rights."""

from __future__ import annotations

import shutil
from pathlib import Path

from apu_engine.access import Rights
from apu_engine.doctor import examine
from apu_engine.doctor.context import Request
from apu_engine.doctor.report import Check, Report
from apu_engine.memory.machine import Machine

MACHINES = Path(__file__).parents[1] / "fixtures" / "machines"
STOCK, TUNED, POINT, CONTAINER = (
    MACHINES / name
    for name in ("strix-halo-128-stock", "strix-halo-128-tuned", "strix-point-32", "container-no-devices")
)
ALL = (STOCK, TUNED, POINT, CONTAINER)
RENDER = {STOCK: 992, TUNED: 105, POINT: 989, CONTAINER: 992}


class Someone(Rights):
    """A user called `user` whose devices belong to group `owner`."""

    def __init__(self, owner: int, allowed: bool = True) -> None:
        self._owner, self._allowed = owner, allowed

    def may_use(self, path: Path) -> bool:
        return self._allowed

    def owner(self, path: Path) -> int:
        return self._owner

    @property
    def user(self) -> str:
        return "user"


def kernels(folder: Path) -> Path:
    """A folder that looks as if the kernels of both Strix chips were built."""
    found = folder / "kernels"
    found.mkdir(exist_ok=True)
    for target in ("gfx1151", "gfx1150"):
        (found / f"{target}.co").touch()
    return found


def look(root: Path, tmp_path: Path, rights: Rights | None = None, **request: object) -> Report:
    """The report of a machine with kernels built and rights given."""
    asked = Request(**{"folder": Path("/home/user/models"), "kernels": kernels(tmp_path), **request})  # type: ignore[arg-type]
    return examine(Machine(root), asked, rights or Someone(RENDER.get(root, 992)))


def check(report: Report, id_: str) -> Check:
    return next(item for item in report.checks if item.id == id_)


def verdicts(report: Report) -> dict[str, str]:
    return {item.id: item.verdict for item in report.checks}


def copy(root: Path, tmp_path: Path) -> Path:
    """A machine that can be changed."""
    target = tmp_path / root.name
    shutil.copytree(root, target)
    return target


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
