"""Which libamdhip64 is opened: where copies are found, which of several, and that two in one process are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hip_double import library

from apu_engine import runtime
from apu_engine.device import pick_device
from apu_engine.errors import GpuError
from apu_engine.memory.machine import Machine
from apu_engine.runtime import Chosen, Copy, choose, installed

STOCK = Path(__file__).parents[1] / "fixtures/machines/strix-halo-128-stock"


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APU_HIP_LIBRARY", raising=False)
    monkeypatch.setattr(runtime, "loaded", list)


def put(root: Path, name: str, full: str = "", content: Path | None = None) -> Path:
    """A library below `root`; `full` is the file that its soname links to."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    real = path.with_name(full) if full else path
    if content is None:
        real.write_text("not a library")
    else:
        shutil.copy(content, real)
    if full:
        path.symlink_to(full)
    return path


def test_copies_by_soname_in_order_each_once(tmp_path: Path) -> None:
    new = put(tmp_path, "opt/rocm-7.1.1/lib/libamdhip64.so.7", "libamdhip64.so.7.1.70101")
    (tmp_path / "opt/rocm").symlink_to("rocm-7.1.1")
    old = put(tmp_path, "opt/rocm-6.4.2/lib/libamdhip64.so.6")
    put(tmp_path, "opt/rocm-6.4.2/.info/version").write_text("6.4.2-98\n")
    put(tmp_path, "opt/rocm-6.4.2/lib/libamdhip64.so")  # what a development package adds
    put(tmp_path, "opt/rocm-6.4.2/lib/libamdhip64.so.6.backup")
    system = put(tmp_path, "usr/lib64/libamdhip64.so.5", "libamdhip64.so.5.2.21153-0")
    (tmp_path / "lib64").symlink_to("usr/lib64")
    assert [(copy.path.resolve(), copy.version) for copy in installed(Machine(tmp_path))] == [
        (new.resolve(), (7, 1, 1)),
        (old, (6, 4, 2)),
        (system.resolve(), (5, 2, 53)),
    ]


def test_core_folders(tmp_path: Path) -> None:
    for version in ("7.14", "10.1"):
        put(tmp_path, f"opt/rocm/core-{version}/lib/libamdhip64.so.{version.partition('.')[0]}")
        put(tmp_path, f"opt/rocm/core-{version}/.info/version").write_text(f"{version}.0\n")
    found = choose("gfx1151", Machine(tmp_path), lambda _: ["gfx1151"])
    assert found is not None and found.copy.version == (10, 1, 0)
    assert found.reason.endswith("core-10.1, the newest of 2 that works")


def machine_with(tmp_path: Path, *versions: str) -> Machine:
    for version in versions:
        put(tmp_path, f"opt/rocm-{version}/lib/libamdhip64.so.{version[0]}")
        put(tmp_path, f"opt/rocm-{version}/.info/version").write_text(version)
    return Machine(tmp_path)


def test_the_newest_that_works_for_this_gpu(tmp_path: Path) -> None:
    machine = machine_with(tmp_path, "6.2.0", "7.1.1", "7.2.0")
    answers: dict[tuple[int, ...], str | list[str]] = {(7, 2, 0): "crashed", (7, 1, 1): ["gfx1100"], (6, 2, 0): []}

    def chosen(gfx: str | None) -> Chosen:
        found = choose(gfx, machine, lambda copy: answers[copy.version])
        assert found is not None
        return found

    assert chosen("gfx1100").copy.version == chosen(None).copy.version == (7, 1, 1)
    assert "7.2.0, was passed over: crashed" in str(chosen("gfx1100"))
    none = chosen("gfx1151")
    assert none.copy.version == (7, 2, 0) and "of which none works" in none.reason
    assert [(copy.version, why) for copy, why in none.refused] == [
        ((7, 1, 1), "shows gfx1100, not gfx1151"),
        ((6, 2, 0), "shows no device, not gfx1151"),
    ]


def test_a_single_copy_is_not_tried(tmp_path: Path) -> None:
    def probe(copy: Copy) -> str:
        raise AssertionError

    found = choose("gfx1151", machine_with(tmp_path, "7.1.1"), probe)
    assert found is not None and found.reason == f"from {tmp_path}/opt/rocm-7.1.1"
    assert choose("gfx1151", Machine(tmp_path / "empty"), probe) is None


def test_copies_are_tried_in_processes_of_their_own(
    tmp_path: Path, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "machine"
    shutil.copytree(STOCK, root)
    shutil.rmtree(root / "opt")
    broken = put(root, "opt/rocm-7.2.0/lib/libamdhip64.so.7")
    good = put(root, "opt/rocm-7.1.0/lib/libamdhip64.so.7", content=library())
    put(root, "opt/rocm-7.2.0/.info/version").write_text("7.2.0")
    put(root, "opt/rocm-7.1.0/.info/version").write_text("7.1.0")
    monkeypatch.setenv("APU_SYSROOT", str(root))
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    code = "from apu_engine.device import pick_device; print(pick_device('auto').reason)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{good}, 7.1.0, from {good.parents[1]}, the newest of 2 that works; " in done.stdout
    assert f"{broken}, 7.2.0, was passed over: " in done.stdout
    good.unlink()
    put(root, "opt/rocm-7.1.0/lib/libamdhip64.so.7")
    with pytest.raises(GpuError, match=rf"{broken} cannot be loaded: .*; {good}: "):
        pick_device("hip")


def two_copies(tmp_path: Path, line: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which the first of two copies is loaded, as `import torch` would."""
    a, b = (put(tmp_path, f"{name}/libamdhip64.so.7", content=library()) for name in "ab")
    code = f"import ctypes; a, b = {str(a)!r}, {str(b)!r}; ctypes.CDLL(a); {line}\n"
    code += "from apu_engine.device import pick_device; print(pick_device('hip').reason)"
    variables = {**os.environ, **{name: text.format(a=a, b=b) for name, text in environment.items()}}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)


def test_a_loaded_copy_is_used(tmp_path: Path, hip_kernels: Path) -> None:
    done = two_copies(tmp_path, APU_KERNELS=str(hip_kernels))
    assert f"{tmp_path}/a/libamdhip64.so.7, 7, loaded already by this process" in done.stdout, done.stderr
    torch = tmp_path / "torch/lib"
    torch.mkdir(parents=True)
    done = two_copies(torch, APU_KERNELS=str(hip_kernels))
    assert "loaded already by torch" in done.stdout, done.stderr


def test_a_second_copy_is_refused_with_both_paths(tmp_path: Path, hip_kernels: Path) -> None:
    done = two_copies(tmp_path, APU_KERNELS=str(hip_kernels), APU_HIP_LIBRARY="{b}")
    assert done.returncode
    message = done.stderr.splitlines()[-1]
    assert f"{tmp_path}/a/libamdhip64.so.7 is in this process already" in message
    assert f"cannot load {tmp_path}/b/libamdhip64.so.7: two copies" in message


def test_two_loaded_copies_are_refused_with_both_paths(tmp_path: Path, hip_kernels: Path) -> None:
    done = two_copies(tmp_path, "ctypes.CDLL(b)", APU_KERNELS=str(hip_kernels))
    assert done.returncode
    message = done.stderr.splitlines()[-1]
    assert "two copies of the runtime do not work together" in message
    assert f"{tmp_path}/a/libamdhip64.so.7" in message and f"{tmp_path}/b/libamdhip64.so.7" in message


def test_a_runtime_that_hangs_or_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Copy(tmp_path / "libamdhip64.so.7", "here")

    class Hangs:
        TimeoutExpired = subprocess.TimeoutExpired
        DEVNULL = subprocess.DEVNULL

        @staticmethod
        def run(*_: object, **__: object) -> None:
            raise subprocess.TimeoutExpired("probe", 30)

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "subprocess", Hangs)
        assert runtime.targets(copy) == "did not answer within 30 s"
    monkeypatch.setenv("PYTHONHOME", "/nowhere")  # the child cannot even start
    assert str(runtime.targets(copy)).startswith("ended the process that tried it (status ")
