"""Footprints: what smaps says, and that every kind of second copy is found and named."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from native_double import NativeDouble

from apu_engine.errors import ApuError
from apu_engine.memory import footprint as module
from apu_engine.memory.copies import check_copies, sample
from apu_engine.memory.footprint import (
    Baseline,
    FileMapping,
    Footprint,
    check_device,
    check_dropped,
    check_files,
    check_growth,
    check_sharing,
    footprint,
    weight_files,
    write_back,
)
from apu_engine.memory.mapping import Mapping, prefetch

SMAPS = """\
7f00-7f10 r--s 00000000 fd:01 42                         /models/my model.gguf
Size:               1000 kB
Rss:                 800 kB
Pss:                 400 kB
Shared_Clean:        800 kB
Private_Dirty:         0 kB
VmFlags: rd sh mr mw me ms sd
7f10-7f20 r--s 000fa000 fd:01 42                         /models/my model.gguf
Size:                 24 kB
Rss:                   8 kB
Pss:                   8 kB
Private_Clean:         8 kB
7f20-7f30 r--p 00000000 fd:01 43                         /models/old.gguf (deleted)
Size:                  4 kB
Rss:                   4 kB
Anonymous:             4 kB
7f30-7f40 rw-p 00000000 00:00 0
Rss:                  40 kB
Anonymous:            40 kB
Swap:                 12 kB
7f40-7f50 rw-s 00000000 00:01 9                          /dev/zero (deleted)
Rss:                  32 kB
Pss:                  16 kB
7f50-7f60 rw-p 00000000 00:00 0                          [heap]
Anonymous:             8 kB
"""
ROLLUP = """\
7f00-7fff ---p 00000000 00:00 0                          [rollup]
Rss:                 876 kB
Pss:                 460 kB
Anonymous:            52 kB
Swap:                 12 kB
Locked:                4 kB
"""


@pytest.fixture
def smaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_read", lambda pid, name: {"smaps": SMAPS, "smaps_rollup": ROLLUP}[name])


@pytest.mark.usefixtures("smaps")
def test_parsing() -> None:
    now = footprint(7)
    assert (now.pid, now.rss, now.pss, now.shmem) == (7, 876 << 10, 460 << 10, 16 << 10)
    assert now.anonymous == 64 << 10 and now.locked == 4 << 10 and now.copies == 80 << 10
    model, old = now.files
    assert model.path == "/models/my model.gguf" and model.permissions == ("r--s",)
    assert (model.mapped, model.rss, model.pss) == (1024 << 10, 808 << 10, 408 << 10)
    assert (model.shared_clean, model.private_clean, model.dirty) == (800 << 10, 8 << 10, 0)
    assert old.path == "/models/old.gguf (deleted)" and old.anonymous == 4 << 10
    assert [region.nbytes >> 10 for region in now.regions] == [4, 52, 16, 8]
    assert weight_files(7) == ["/models/my model.gguf", "/models/old.gguf (deleted)"]


@pytest.mark.usefixtures("smaps")
def test_picking_files() -> None:
    now = footprint(7, ["/models/my model.gguf", "/models/none.gguf", "/models/old.gguf"])
    assert [(item.path, item.mapped >> 10) for item in now.files] == [
        ("/models/my model.gguf", 1024),
        ("/models/none.gguf", 0),
        ("/models/old.gguf", 4),
    ]
    assert [finding.ok for finding in check_files(now)] == [True, False, False]
    assert footprint(7, []).files == ()


@pytest.mark.usefixtures("smaps")
def test_output() -> None:
    now = footprint(7)
    body = json.loads(json.dumps(now.as_dict()))
    assert body["files"][0]["rss"] == 808 << 10 and "regions" not in body
    lines = now.table().splitlines()
    assert lines[0].split() == ["mapped", "resident", "Pss", "private", "dirty", "copied", "locked", "file"]
    assert lines[1].endswith("/models/my model.gguf (r--s)") and "808 KiB" in lines[1]
    shared = now.table({"fd:01 42": "3+"}).splitlines()
    assert shared[0].split()[-2:] == ["processes", "file"]
    assert shared[1].split()[-4:] == ["3+", "/models/my", "model.gguf", "(r--s)"] and shared[2].split()[-4] == "0"
    assert lines[-1].startswith("process 7: anonymous 64 KiB, shared memory 16 KiB")


def test_a_path_with_a_newline(native: NativeDouble, file: Path, tmp_path: Path) -> None:
    path = file.rename(tmp_path / "a\nb.gguf")
    with Mapping.open(path):
        assert footprint(files=[path]).files[0].mapped > 0


def test_a_process_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApuError, match="there is no process 99999999"):
        footprint(99999999)
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ApuError, match=f"process {ended.pid} has no memory of its own: it has ended, or"):
        footprint(ended.pid)
    ended.wait()

    def denied(*_: object, **__: object) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(ApuError, match="may not be read; run as the user of process 1"):
        footprint(1)


def test_device_memory_holds_one_copy_or_none() -> None:
    weights, rest = 10 << 30, 1 << 30
    assert [found.ok for found in check_device(rest, weights, 0, rest)] == [True]
    assert [found.ok for found in check_device(weights + rest, weights, 0, rest)] == [False]
    assert [found.ok for found in check_device(weights + rest, weights, weights, rest)] == [True, True]
    assert [found.ok for found in check_device(2 * weights + rest, weights, 2 * weights, rest)] == [True, False]
    small = check_device(20 << 20, 10 << 20, 10 << 20, 0)
    assert small[0].ok and "too small a model for the driver's figure" in small[0].text


# ---------------------------------------------------------------- real mappings


def test_a_mapped_file_passes(native: NativeDouble, file: Path) -> None:
    baseline = Baseline.take()
    with Mapping.open(file) as mapping:
        prefetch([mapping])
        write_back([file])
        now = footprint(files=[file])
        findings = [*check_files(now, mapping.nbytes), check_growth(now, baseline, 0, mapping.nbytes)]
        assert all(finding.ok for finding in findings), findings
        assert now.files[0].private_dirty == now.files[0].anonymous == 0


def test_a_file_beside_its_copy(native: NativeDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped, or still cached: each is a fault, unless its file system lives in memory."""
    file = tmp_path / "large.gguf"
    file.write_bytes(bytes(9 << 20))
    with Mapping.open(file):
        (finding,) = check_dropped(footprint(files=[file]), 9 << 20)
        assert not finding.ok and "expected no mapping beside a copy" in finding.text
    monkeypatch.setattr(module, "_lives_in_memory", lambda path: False)
    (finding,) = check_dropped(footprint(files=[file]), 9 << 20)
    assert not finding.ok and "not mapped, 9 MiB of it cached; allowed 8 MiB" in finding.text
    monkeypatch.setattr(module, "_lives_in_memory", lambda path: True)
    assert check_dropped(footprint(files=[file]), 9 << 20)[0].ok


def test_weights_that_are_not_resident(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file) as mapping:
        finding = check_files(footprint(files=[file]), 100 * mapping.nbytes)[-1]
        assert not finding.ok and "weights are 300.0 MiB;" in finding.text


def test_a_private_writable_mapping_is_named(file: Path) -> None:
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as private:
        private[:4096] = bytes(4096)
        (finding,) = check_files(footprint(files=[file]))
        assert not finding.ok and f"{file} is mapped rw-p, expected r--s" in finding.text


def test_a_dirty_page_is_named() -> None:
    item = FileMapping("/m.gguf", ("r--s",), 8192, 8192, 8192, 0, 4096, 4096, 0, 0, 0)
    (finding,) = check_files(Footprint(1, 0, 0, 0, 0, 0, (item,), ()))
    assert not finding.ok and finding.text == "/m.gguf has 4 KiB dirty and 0 copied pages, expected none"


def test_pages_of_a_file_system_in_memory_are_never_clean(native: NativeDouble) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".gguf") as stream:
        stream.write(bytes(range(256)) * 256)
        stream.flush()
        with Mapping.open(stream.name) as mapping:
            prefetch([mapping])
            write_back([stream.name])
            now = footprint(files=[stream.name])
            assert now.files[0].dirty == mapping.nbytes
            assert all(finding.ok for finding in check_files(now, mapping.nbytes))


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_is_found_and_its_range_named(shared: bool) -> None:
    size = 24 << 20
    baseline = Baseline.take()
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    with mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS) as memory:
        view = np.frombuffer(memory, np.uint8)
        np.copyto(np.asarray(view.view()) if view.flags.writeable else view, 1)
        address = view.__array_interface__["data"][0]
        now = footprint(files=())
        del view
        finding = check_growth(now, baseline, 1 << 20, 1 << 20)
        assert not finding.ok
        assert baseline.growth(now) >= size
        grown = baseline.grown(now)[0]
        assert grown.start <= address < grown.end and grown.nbytes >= size
        assert f"most of it in {grown}" in finding.text
        assert check_growth(now, baseline, 2 * size, 1 << 20).ok


def test_slack_is_the_larger_of_a_share_and_a_floor() -> None:
    baseline = Baseline(0, ())
    for growth, weights, ok in ((8 << 20, 1, True), ((8 << 20) + 1, 1, False), (5 << 28, 25 << 30, True), (6 << 28, 20 << 30, False)):  # fmt: skip  # noqa: E501
        now = Footprint(1, 0, 0, growth, 0, 0, (), ())
        assert check_growth(now, baseline, 0, weights).ok == ok


# ---------------------------------------------------------------- other processes

HOLDER = """
import mmap, sys
with open(sys.argv[1], "rb") as stream:
    m = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    copy = m[:] if sys.argv[2] == "copy" else sum(m[i] for i in range(0, len(m), 4096))
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(file: Path, how: str) -> Iterator[int]:
    """A process that has the file mapped and touched, or copied."""
    command = [sys.executable, "-c", HOLDER, str(file), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def test_a_second_process_adds_no_pages(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file) as mapping, holder(file, "map") as pid:
        prefetch([mapping])
        write_back([file])
        both = [footprint(files=[file]), footprint(pid, [file])]
        assert all(finding.ok for process in both for finding in check_files(process))
        (finding,) = check_sharing(both)
        assert finding.ok, finding
        assert both[0].files[0].private_clean == 0 and both[0].files[0].pss < 0.6 * both[0].files[0].rss
        assert weight_files(pid) == [str(file)]


def test_weights_behind_a_link_of_a_download_cache(native: NativeDouble, file: Path, tmp_path: Path) -> None:
    blob = tmp_path / "9f86d081884c7d65"
    blob.write_bytes(b"GGUF" + file.read_bytes())
    link = tmp_path / "model.gguf"
    link.symlink_to(blob)
    with Mapping.open(link), Mapping.open(file):
        assert set(weight_files(os.getpid())) == {str(blob), str(file)}
        (item,) = footprint(files=[link]).files
        assert item.mapped >= blob.stat().st_size


def test_pages_that_are_not_shared_are_named(file: Path) -> None:
    item = FileMapping("/m.gguf", ("r--s",), 1 << 20, 1 << 20, 1 << 20, 0, 0, 1 << 20, 0, 0, 0)
    (finding,) = check_sharing([Footprint(pid, 0, 0, 0, 0, 0, (item,), ()) for pid in (1, 2)])
    assert not finding.ok and finding.text.startswith("/m.gguf: 2 processes together account for 2 MiB (Pss)")
    assert "each maps 1 MiB (Rss)" in finding.text


@pytest.mark.parametrize(("how", "ok"), [("map", True), ("copy", False)])
def test_a_copy_in_another_process_is_found_by_content(file: Path, how: str, ok: bool) -> None:
    with holder(file, how) as pid:
        process = footprint(pid, [file])
        (finding,) = check_copies(process, [file])
        assert finding.ok == ok, finding
        assert (f"{0 if ok else 8} of 8 samples of {file} occur") in finding.text
        if not ok:
            assert "0x" in finding.text.split("memory, in ")[1]


def test_samples_skip_padding(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gguf"
    path.write_bytes(bytes(1 << 20))
    assert sample(path) == []
    path.write_bytes(b"short")
    assert sample(path) == []


def test_memory_that_may_not_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holder(file, "copy") as pid:
        process = footprint(pid, [file])

        def denied(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(ApuError, match=f"memory of process {pid} may not be read"):
            check_copies(process, [file])
