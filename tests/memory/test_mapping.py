"""Mappings: read-only, shared, guarded, checked, closed exactly once."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from native_double import NativeDouble

from apu_engine.errors import MappingError
from apu_engine.memory import mapping as module
from apu_engine.memory.mapping import Mapping


def smaps_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            return line
    raise AssertionError("not mapped")


def test_read_only_and_shared(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file, file.stat().st_size) as mapping:
        assert " r--s 00000000 " in smaps_of(mapping.address)
        assert mapping.nbytes == file.stat().st_size
        assert ctypes.string_at(mapping.address, 16) == file.read_bytes()[:16]
        assert native.guarded == {mapping.address: (mapping.nbytes, str(file))}
        assert "3.0 MiB" in repr(mapping)
        mapping.check()
    assert native.guarded == {}
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_views(native: NativeDouble, file: Path) -> None:
    content = file.read_bytes()
    with Mapping.open(file) as mapping:
        view = mapping.array(5, 1000)
        assert view.dtype == np.uint8 and view.tobytes() == content[5:1005]
        assert view.__array_interface__["data"] == (mapping.address + 5, True)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        assert mapping.array().nbytes == len(content)
        assert mapping.array(len(content)).nbytes == 0
        for offset, nbytes in ((-1, 1), (0, len(content) + 1), (len(content) + 1, 0), (8, -1), (1 << 70, 1)):
            with pytest.raises(MappingError, match="lie outside"):
                mapping.array(offset, nbytes)
        del view


def test_close_waits_for_views(native: NativeDouble, file: Path) -> None:
    mapping = Mapping.open(file)
    view = mapping.array(8, 8)
    with pytest.raises(MappingError, match=f"{file}: cannot be unmapped while arrays still view it"):
        mapping.close()
    assert native.guarded and view.tobytes() == file.read_bytes()[8:16]
    mapping.check()
    del view
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    mapping.close()
    mapping.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors
    assert "closed" in repr(mapping)
    with pytest.raises(MappingError, match="closed"):
        mapping.array()
    with pytest.raises(MappingError, match="closed"):
        mapping.check()


def test_release_leaves_the_mapping_to_its_views(native: NativeDouble, file: Path) -> None:
    mapping = Mapping.open(file)
    typed = mapping.array(8, 8).view(np.uint32)[1:]
    before = len(list(Path("/proc/self/fd").iterdir()))
    mapping.release()
    mapping.release()
    mapping.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1  # mmap keeps its own until it unmaps
    assert native.guarded and typed.tobytes() == file.read_bytes()[12:16]
    with pytest.raises(MappingError, match="closed"):
        mapping.array()
    del typed
    assert not native.guarded and str(file) not in Path("/proc/self/maps").read_text()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 2
    again = Mapping.open(file)
    again.release()  # no views: at once
    assert not native.guarded and str(file) not in Path("/proc/self/maps").read_text()


def test_another_size_than_the_header_had(native: NativeDouble, file: Path) -> None:
    with pytest.raises(MappingError, match=r"has 3,145,733 bytes, but had 4 when its header was read"):
        Mapping.open(file, 4)


def test_what_cannot_be_mapped(native: NativeDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MappingError, match="empty"):
        Mapping.open(empty)
    with pytest.raises(MappingError, match="directory"):
        Mapping.open(tmp_path)
    with pytest.raises(MappingError, match="does not exist"):
        Mapping.open(tmp_path / "none")
    empty.write_bytes(b"x")
    for code, words in ((12, "no address space"), (19, "does not support mapping"), (1, "cannot be mapped")):

        def refuse(*_: object, code: int = code, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(module.mmap, "mmap", refuse)
        with pytest.raises(MappingError, match=words):
            Mapping.open(empty)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_truncation_is_named(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file) as mapping:
        os.truncate(file, 1000)
        with pytest.raises(MappingError, match=f"{file}: was truncated from 3,145,733 to 1,000 bytes"):
            mapping.check()


def test_a_fault_is_named(native: NativeDouble, file: Path) -> None:
    with Mapping.open(file) as mapping:
        native.fault = "/another/file"
        mapping.check()
        native.fault = str(file)
        with pytest.raises(MappingError, match=f"{file}: a mapped page could not be read"):
            mapping.check()


def test_rewriting_in_place_is_named(native: NativeDouble, file: Path) -> None:
    os.utime(file, ns=(0, 0))
    with Mapping.open(file) as mapping:
        with file.open("r+b") as stream:
            stream.write(b"other weights")
        with pytest.raises(MappingError, match="was written to while it was mapped"):
            mapping.check()


def test_replacing_by_renaming_is_harmless(native: NativeDouble, file: Path, tmp_path: Path) -> None:
    old = file.read_bytes()
    with Mapping.open(file) as mapping:
        new = tmp_path / "new"
        new.write_bytes(b"new weights")
        new.rename(file)
        mapping.check()
        assert mapping.array(0, 64).tobytes() == old[:64]


def test_resident_bytes(native: NativeDouble, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Mapping.open(file) as mapping:
        assert mapping.resident_bytes() == mapping.nbytes  # just written
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert mapping.resident_bytes() is None


def test_unusual_path(native: NativeDouble, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "with space, ünïcode\nand newline.gguf"
    shutil.copy(file, path)
    with Mapping.open(path) as mapping:
        mapping.check()
