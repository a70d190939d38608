"""What a process really holds, from /proc/PID/smaps_rollup and smaps: the proof that weights exist once.

Weights in the page cache show up as clean pages of a read-only shared file mapping; Rss counts a page in
every process, Pss divides it among the processes that map it. A copy shows up as anonymous or shared-memory
pages. Everything here is in bytes. Nothing is counted by the engine itself: only what the kernel says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from apu_engine.errors import ApuError
from apu_engine.memory.files import file_system
from apu_engine.memory.mapping import cached_bytes
from apu_engine.options import format_size

_HEAD = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<perms>[rwxsp-]{4}) "
    r"[0-9a-f]+ (?P<device>\S+) (?P<inode>\d+) *(?P<path>.*)"
)
_DELETED = " (deleted)"
_WEIGHT_SUFFIXES = (".gguf", ".safetensors")
_SHARED_MEMORY = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV")
GROWTH_SHARE = 0.05  # of the weights, and
GROWTH_FLOOR = 8 << 20  # at least this: what anonymous memory may grow by beyond KV and scratch
GPU_GROWTH_FLOOR = 64 << 20  # with a GPU: its runtime keeps graphs, queues and pinned buffers of steps
DEVICE_FLOOR = 256 << 20  # what a driver may take of a GPU's memory beside what was allocated: code, graphs, pools
RESIDENT_SHARE = 0.9  # of the weights must be resident file pages after a forward pass


@dataclass(frozen=True, slots=True)
class FileMapping:
    """All mappings of one file in one process, summed. `permissions` holds each kind met, such as "r--s"."""

    path: str
    permissions: tuple[str, ...]
    mapped: int
    rss: int
    pss: int
    shared_clean: int
    shared_dirty: int
    private_clean: int
    private_dirty: int
    anonymous: int
    locked: int
    key: str = ""  # device and inode, as maps writes them

    @property
    def dirty(self) -> int:
        return self.shared_dirty + self.private_dirty


@dataclass(frozen=True, slots=True)
class Region:
    """One address range that holds anonymous or shared-memory pages."""

    start: int
    end: int
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.start:#x}-{self.end:#x} {self.name or 'anonymous'}"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one process. `anonymous` counts swapped pages too; `shmem` is its share of shared memory."""

    pid: int
    rss: int
    pss: int
    anonymous: int
    shmem: int
    locked: int
    files: tuple[FileMapping, ...]
    regions: tuple[Region, ...] = field(repr=False)

    @property
    def copies(self) -> int:
        """Bytes in which a copy of a file could hide: anonymous and shared memory."""
        return self.anonymous + self.shmem

    def as_dict(self) -> dict[str, object]:
        """For JSON; without the address ranges."""
        found = {key: value for key, value in asdict(self).items() if key not in ("regions", "files")}
        files = [{key: value for key, value in asdict(item).items() if key != "key"} for item in self.files]
        return {**found, "files": files}

    def table(self, shared: dict[str, str] | None = None) -> str:
        """For people: one line per file, then the totals. `shared` says of a file's key how many processes map it."""
        titles = ("mapped", "resident", "Pss", "private", "dirty", "copied", "locked")
        rows = [[*titles, *(["processes"] if shared is not None else [])]]
        for item in self.files:
            sizes = (item.mapped, item.rss, item.pss, item.private_clean, item.dirty, item.anonymous, item.locked)
            rows.append([*map(format_size, sizes), *([shared.get(item.key, "0")] if shared is not None else [])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        names = [f"{item.path} ({', '.join(item.permissions) or 'not mapped'})" for item in self.files]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), name])
            for row, name in zip(rows, ["file", *names], strict=True)
        ]
        lines.append(
            f"process {self.pid}: anonymous {format_size(self.anonymous)}, "
            f"shared memory {format_size(self.shmem)}, locked {format_size(self.locked)}, "
            f"resident {format_size(self.rss)}, Pss {format_size(self.pss)}"
        )
        return "\n".join(lines)


def footprint(pid: int | None = None, files: Iterable[str | os.PathLike[str]] | None = None) -> Footprint:
    """Measure process `pid` (default: this one). `files` picks the mapped files to report, None all of them.

    A picked file that is not mapped is reported with zeros. Raises ApuError when /proc cannot be read.
    """
    number = os.getpid() if pid is None else pid
    totals = _fields(_read(number, "smaps_rollup").splitlines()[1:])
    sums: dict[str, dict[str, int]] = {}
    permissions: dict[str, set[str]] = {}
    keys: dict[str, str] = {}
    picked = None if files is None else _identities(files)
    regions: list[Region] = []
    shmem = 0
    for head, sizes in _vmas(_read(number, "smaps")):
        name = head["path"]
        shared_memory = name.startswith(_SHARED_MEMORY) and not name.endswith(_WEIGHT_SUFFIXES)
        if head["inode"] != "0" and not shared_memory:
            path = _file_name(name, int(head["inode"]), picked)
            if path is not None:
                total = sums.setdefault(path, {})
                for key, value in sizes.items():
                    total[key] = total.get(key, 0) + value
                permissions.setdefault(path, set()).add(head["perms"])
                keys[path] = f"{head['device']} {head['inode']}"
        held = (sizes.get("Pss", 0) if shared_memory else sizes.get("Anonymous", 0)) + sizes.get("Swap", 0)
        shmem += sizes.get("Pss", 0) if shared_memory else 0
        if held:
            regions.append(Region(int(head["start"], 16), int(head["end"], 16), name, held))
    names = sums if picked is None else picked
    return Footprint(
        pid=number,
        rss=totals.get("Rss", 0),
        pss=totals.get("Pss", 0),
        anonymous=totals.get("Anonymous", 0) + totals.get("Swap", 0),
        shmem=shmem,
        locked=totals.get("Locked", 0),
        files=tuple(
            _file(name, sums.get(name, {}), permissions.get(name, set()), keys.get(name, "")) for name in names
        ),
        regions=tuple(regions),
    )


def weight_files(pid: int) -> list[str]:
    """Paths of the model files that process `pid` has mapped."""
    return [item.path for item in footprint(pid).files if _holds_weights(item)]


def _holds_weights(item: FileMapping) -> bool:
    """By name, or by magic: download caches name their files by hash."""
    if item.path.removesuffix(_DELETED).lower().endswith(_WEIGHT_SUFFIXES):
        return True
    if item.permissions != ("r--s",):
        return False
    try:
        with Path(item.path).open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        there = Path(f"/proc/{pid}").exists()
        what = f"process {pid} has no memory of its own: it has ended, or is the kernel's"
        raise ApuError(what if there else f"there is no process {pid}") from None
    except PermissionError:
        raise ApuError(f"/proc/{pid}/{name} may not be read; run as the user of process {pid} or as root") from None


def _vmas(text: str) -> Iterable[tuple[dict[str, str], dict[str, int]]]:
    head: dict[str, str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        match = _HEAD.fullmatch(line)
        if match:
            if head:
                yield head, _fields(lines)
            head, lines = match.groupdict(), []
        else:
            lines.append(line)
    if head:
        yield head, _fields(lines)


def _fields(lines: Iterable[str]) -> dict[str, int]:
    """`Rss:  12 kB` lines as bytes."""
    sizes: dict[str, int] = {}
    for line in lines:
        parts = line.split()
        if len(parts) == 3 and parts[2] == "kB":
            sizes[parts[0][:-1]] = int(parts[1]) * 1024
    return sizes


def _identities(files: Iterable[str | os.PathLike[str]]) -> dict[str, int]:
    """Real path -> inode (0 when the file is gone)."""
    found: dict[str, int] = {}
    for name in files:
        real = os.path.realpath(name)
        try:
            found[real] = Path(real).stat().st_ino
        except OSError:
            found[real] = 0
    return found


def _file_name(name: str, inode: int, picked: dict[str, int] | None) -> str | None:
    """Under which name a mapping is reported. Mount namespaces change paths, renaming leaves `(deleted)`."""
    path = name.replace("\\012", "\n")
    base = Path(path.removesuffix(_DELETED)).name
    if picked is None:
        return path
    for candidate in (path, path.removesuffix(_DELETED)):
        if candidate in picked:
            return candidate
    return next((known for known, ino in picked.items() if ino == inode and Path(known).name == base), None)


def _file(path: str, sizes: dict[str, int], permissions: set[str], key: str) -> FileMapping:
    return FileMapping(
        path=path,
        permissions=tuple(sorted(permissions)),
        mapped=sizes.get("Size", 0),
        rss=sizes.get("Rss", 0),
        pss=sizes.get("Pss", 0),
        shared_clean=sizes.get("Shared_Clean", 0),
        shared_dirty=sizes.get("Shared_Dirty", 0),
        private_clean=sizes.get("Private_Clean", 0),
        private_dirty=sizes.get("Private_Dirty", 0),
        anonymous=sizes.get("Anonymous", 0),
        locked=sizes.get("Locked", 0),
        key=key,
    )


# ---------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: what was found; when `ok` is False, `text` names the mapping at fault."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """Anonymous memory at a moment, by address range, to tell later what has grown."""

    copies: int
    regions: tuple[Region, ...]

    @classmethod
    def take(cls, pid: int | None = None) -> Baseline:
        now = footprint(pid, files=())
        return cls(now.copies, now.regions)

    def growth(self, now: Footprint) -> int:
        return now.copies - self.copies

    def grown(self, now: Footprint) -> list[Region]:
        """The ranges that hold more than before, largest growth first; `nbytes` is the growth."""
        found = []
        for region in now.regions:
            before = sum(old.nbytes for old in self.regions if old.start < region.end and region.start < old.end)
            if region.nbytes > before:
                found.append(Region(region.start, region.end, region.name, region.nbytes - before))
        return sorted(found, key=lambda region: -region.nbytes)


def check_files(now: Footprint, weights_bytes: int | None = None) -> list[Finding]:
    """The weights are clean pages of read-only shared mappings; nearly all `weights_bytes` are resident."""
    found = []
    for item in now.files:
        if not item.permissions:
            found.append(Finding(False, f"{item.path} is not mapped by process {now.pid}"))
        elif item.permissions != ("r--s",):
            kinds = ", ".join(item.permissions)
            found.append(Finding(False, f"{item.path} is mapped {kinds}, expected r--s (read-only, shared)"))
        elif item.anonymous or (item.dirty and not _lives_in_memory(item.path)):
            dirty, copied = format_size(item.dirty), format_size(item.anonymous)
            found.append(Finding(False, f"{item.path} has {dirty} dirty and {copied} copied pages, expected none"))
        else:
            found.append(Finding(True, f"{item.path}: read-only, shared, clean, {format_size(item.rss)} resident"))
    if weights_bytes is not None:
        resident = sum(item.rss for item in now.files)
        text = f"weights are {format_size(weights_bytes)}; {format_size(resident)} of their files are resident"
        found.append(Finding(resident >= RESIDENT_SHARE * weights_bytes, text))
    return found


def write_back(files: Iterable[str | os.PathLike[str]]) -> None:
    """Have the pages of files that were just downloaded written to disk; until then the kernel calls them dirty."""
    for file in files:
        with Path(file).open("rb") as stream:
            os.fsync(stream.fileno())


def _lives_in_memory(path: str) -> bool:
    """Whether the file system has no disk to be clean against: its pages are dirty from birth."""
    try:
        return file_system(path).split()[0] in ("tmpfs", "ramfs", "hugetlbfs")
    except OSError:
        return False


def check_growth(
    now: Footprint, baseline: Baseline, expected: int, weights_bytes: int, floor: int = GROWTH_FLOOR
) -> Finding:
    """Anonymous memory grew by at most `expected` (KV, scratch) and the larger of 5% of weights and `floor`."""
    slack = max(int(GROWTH_SHARE * weights_bytes), floor)
    growth = baseline.growth(now)
    text = (
        f"anonymous memory grew by {format_size(growth)}; allowed {format_size(expected + slack)} "
        f"(KV and scratch {format_size(expected)}, slack {format_size(slack)})"
    )
    if growth <= expected + slack:
        return Finding(True, text)
    grown = baseline.grown(now)
    where = f"; most of it in {grown[0]} (+{format_size(grown[0].nbytes)})" if grown else ""
    return Finding(False, text + where)


def check_dropped(now: Footprint, weights_bytes: int) -> list[Finding]:
    """No page of the files is mapped or cached: the weights are elsewhere. File systems that live in memory cannot
    drop pages, which is said and no fault.
    """
    found = []
    allowed = max(int(GROWTH_SHARE * weights_bytes), GROWTH_FLOOR)
    for item in now.files:
        if item.permissions:
            text = f"{item.path} is mapped by process {now.pid}, expected no mapping beside a copy"
            found.append(Finding(False, text))
            continue
        with Path(item.path).open("rb") as stream:
            cached = cached_bytes(stream.fileno(), Path(item.path), os.fstat(stream.fileno()).st_size)
        if _lives_in_memory(item.path):
            found.append(Finding(True, f"{item.path} is on a file system in memory: its pages cannot be dropped"))
        elif cached is None:
            found.append(Finding(True, f"{item.path}: the kernel does not tell this user which pages are cached"))
        else:
            text = f"{item.path}: not mapped, {format_size(cached)} of it cached; allowed {format_size(allowed)}"
            found.append(Finding(cached <= allowed, text))
    return found


def check_device(used: int, weights_bytes: int, copied: int, expected: int) -> list[Finding]:
    """A GPU's own memory holds `copied` weights (all or none) and `expected` (KV, scratch). `used` is what the driver
    says was taken meanwhile; of weights smaller than what it may take besides, it cannot tell one copy from two.
    """
    slack = max(int(GROWTH_SHARE * weights_bytes), DEVICE_FLOOR)
    text = (
        f"device memory grew by {format_size(used)}; allowed {format_size(copied + expected + slack)} (weights "
        f"{format_size(copied)}, KV and scratch {format_size(expected)}, slack {format_size(slack)})"
    )
    text += "; too small a model for the driver's figure to tell a copy" if slack >= weights_bytes else ""
    found = [Finding(used <= copied + expected + slack, text)]
    if copied:
        share = copied / weights_bytes if weights_bytes else 0.0
        text = f"one copy of the weights is in device memory: {format_size(copied)}, {share:.2f} times the weights"
        found.append(Finding(0.99 <= share <= 1 + GROWTH_SHARE, text))
    return found


def check_sharing(processes: Sequence[Footprint]) -> list[Finding]:
    """Processes that map the same files hold their pages once: the sum of their Pss is one Rss."""
    found = []
    for items in zip(*(process.files for process in processes), strict=True):
        pss, rss = sum(item.pss for item in items), max(item.rss for item in items)
        sizes = f"together account for {format_size(pss)} (Pss); each maps {format_size(rss)} (Rss)"
        text = f"{items[0].path}: {len(items)} processes {sizes}"
        found.append(Finding(pss <= rss + rss // 100 + len(items) * 4096, text))
    return found
