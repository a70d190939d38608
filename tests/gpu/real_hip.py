"""AMD's real HIP runtime and its headers, as the distribution packages them, unpacked into build/hip-runtime.

Nothing is installed and no rights are needed: `apt-get download`, then dpkg-deb. Done once; later runs need no network.
`python tests/gpu/real_hip.py` does it ahead of the tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from shim import locked

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "hip-runtime"
_HEADERS = ("libamdhip64-dev", "libhsa-runtime-dev")
_COMPLETE = f"complete-{'-'.join(_HEADERS)}"
_SYSTEM = re.compile(r"libc6|libgcc-s1|libstdc\+\+6|gcc-\d+-base")  # every system has them


class Unavailable(Exception):
    """The packages could not be fetched; says why."""


def fetch() -> Path:
    """The folder with the unpacked packages. Raises Unavailable."""
    with locked(FOLDER / _COMPLETE):
        if not (FOLDER / _COMPLETE).exists():
            _fetch()
    return FOLDER


def _fetch() -> None:
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is missing: the real HIP runtime is taken from Debian's or Ubuntu's packages")
    options: list[str] = []
    if not _runtimes(options):  # lists of our own, since those of the system are root's and may never have been fetched
        lists = FOLDER / "apt"
        (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        options = ["-o", f"Dir::State::Lists={lists / 'lists'}", "-o", f"Dir::Cache={lists}"]
        _run(["apt-get", *options, "update"])
    runtimes = _runtimes(options)
    if not runtimes:
        raise Unavailable(
            "apt knows no package libamdhip64-N; is Debian's main or Ubuntu's universe among its sources?"
        )
    runtime = max(runtimes, key=lambda name: int(name.rpartition("-")[2]))
    depends = ["apt-cache", *options, "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts"]
    listed = _run([*depends, "--no-breaks", "--no-replaces", "--no-enhances", runtime])
    packages = {name for name in re.findall(r"^(\w[^\s:]*)$", listed, flags=re.M) if not _SYSTEM.fullmatch(name)}
    archives = FOLDER / "archives"
    shutil.rmtree(archives, ignore_errors=True)  # of an attempt that was interrupted
    archives.mkdir(parents=True)
    _run(["apt-get", *options, "download", *sorted(packages), *_HEADERS], archives)
    for archive in archives.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(FOLDER)])
    shutil.rmtree(archives)
    (FOLDER / _COMPLETE).touch()


def _runtimes(options: list[str]) -> list[str]:
    names = _run(["apt-cache", *options, "pkgnames", "libamdhip64-"]).split()
    return [name for name in names if re.fullmatch(r"libamdhip64-\d+", name)]


def _run(command: list[str], folder: Path = ROOT) -> str:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if run.returncode:
        raise Unavailable(f"{' '.join(command)}: {run.stderr.strip() or run.stdout.strip()}")
    return run.stdout


def library() -> Path:
    """The runtime's shared object."""
    found = sorted(fetch().glob("usr/lib/*/libamdhip64.so.?"))
    if not found:
        raise Unavailable(f"no libamdhip64.so in {FOLDER}")
    return found[-1]


def environment() -> dict[str, str]:
    """For a process that opens it: where its own dependencies are; devices of this machine are hidden."""
    folders = sorted({str(path.parent) for path in fetch().glob("**/lib/*/lib*.so.*")})
    hidden = {"HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders), "APU_HIP_LIBRARY": str(library()), **hidden}


if __name__ == "__main__":
    print(library())
