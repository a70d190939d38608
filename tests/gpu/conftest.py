"""The stand-in for libamdhip64, and a device that runs on it.

Tests of whole plans take `gpu`: the stand-in, or with APU_TEST_DEVICE=cuda (hip) in the environment the GPU of the
machine, as scripts/gpu_verify.sh runs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hip_double import HipDouble, code_object, library
from shim import KERNELS

from apu_engine._native import Device
from apu_engine.device import open_device


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the double and its kernels before any test's time runs."""
    needing = {"hip_kernels"} if "APU_TEST_DEVICE" in os.environ else {"hip_kernels", "gpu"}
    wanted = any(needing & set(getattr(item, "fixturenames", ())) for item in session.items)
    if wanted and not session.config.option.collectonly:
        with TemporaryDirectory() as folder:
            code_object(Path(folder))
            library()


@pytest.fixture(scope="session")
def hip_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gfx1151's code object: all kernels, for the double."""
    folder: Path = tmp_path_factory.mktemp("kernels")
    code_object(folder)
    return folder


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HipDouble]:
    """The double behind device "hip", without kernels; everything that a test makes must be gone at its end. What an
    earlier test's probe found is not known.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = library()
    monkeypatch.setenv("APU_HIP_LIBRARY", str(path))
    double = HipDouble(path)
    double.set()
    before = double.live()
    yield double
    double.set()
    assert double.live() == before


@pytest.fixture
def hip_device(hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Device hip:0, a gfx1151 that the CPU plays."""
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    with Device("hip") as device:
        yield device
        hip.set()  # so that closing works after an arranged fault


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The GPU that plans are tested on."""
    kind = os.environ.get("APU_TEST_DEVICE")
    if kind is None:
        yield request.getfixturevalue("hip_device")
        return
    with open_device(kind)[0] as device:
        yield device


@pytest.fixture
def wide_gpu(hip: HipDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A gfx90a that the CPU plays, waves of 64, with the kernels of compressed rows and their index alone."""
    files = [KERNELS / f"{name}.hip" for name in ("compress", "index", "rows", "step")]
    code_object(tmp_path, "gfx90a", files)
    monkeypatch.setenv("APU_KERNELS", str(tmp_path))
    hip.set(arch="gfx90a")
    with Device("hip") as device:
        yield device
    hip.set()
