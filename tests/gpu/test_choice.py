"""Which device is taken, why, and what the reason says where a GPU cannot be used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hip_double import HipDouble, library

from apu_engine import device as choice
from apu_engine.config import EngineConfig
from apu_engine.device import open_device, pick_device
from apu_engine.engine.load import load
from apu_engine.errors import BudgetError, ConfigError
from models import TinyModel


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose kernel shows a gfx1151 that this user may open."""
    kfd, nodes = tmp_path / "kfd", tmp_path / "nodes"
    kfd.touch()
    (nodes / "0").mkdir(parents=True)
    (nodes / "0" / "properties").write_text("cpu_cores_count 32\ngfx_target_version 0\n")  # the CPU
    (nodes / "1").mkdir()
    (nodes / "1" / "properties").write_text("simd_count 80\ngfx_target_version 110501\n")
    monkeypatch.setattr(choice, "_KFD", kfd)
    monkeypatch.setattr(choice, "_NODES", nodes)
    monkeypatch.setenv("APU_HIP_LIBRARY", "/nowhere/libamdhip64.so")
    return tmp_path


def test_the_cpu_as_asked() -> None:
    assert (pick_device("cpu").name, pick_device("cpu").reason) == ("cpu", "as asked")


@pytest.mark.parametrize("request_", ["gpu", "hip:", "hip:x", "hip:-1", "cpu:1", "auto:0", ""])
def test_unknown_requests(request_: str) -> None:
    with pytest.raises(ConfigError, match=r"expected auto, cpu, hip\[:N\] or cuda\[:N\]"):
        pick_device(request_)


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_KFD", tmp_path / "kfd")
    assert pick_device("auto").reason == "no AMD GPU: /dev/kfd is absent"
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(choice, "_NODES", tmp_path / "nodes")
    assert pick_device("auto").reason == "no AMD GPU: none in /sys/class/kfd"


def test_a_gpu_without_a_runtime(machine: Path) -> None:
    missing = "/nowhere/libamdhip64.so was not found; install ROCm's HIP runtime"
    assert pick_device("auto").kind == "cpu"
    assert pick_device("auto").reason.startswith(f"gfx1151 is present, but {missing}")
    with pytest.raises(ConfigError, match=f"--device hip:1: {missing}"):
        pick_device("hip:1")


def test_a_gpu_that_the_user_may_not_open(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    reason = pick_device("auto").reason
    assert "gfx1151 is present, but this user may not open" in reason
    assert "usermod -aG" in reason and "log in again" in reason
    with pytest.raises(ConfigError, match=r"was not found; .*; this user may not open .*usermod -aG"):
        pick_device("hip")


def test_a_gpu_without_kernels(machine: Path, hip: HipDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(machine))
    advice = rf"no kernels for gfx1151 in {machine}; build them with ./build.sh --targets gfx1151"
    assert advice in pick_device("auto").reason
    with pytest.raises(ConfigError, match=f"--device hip: {advice}"):
        pick_device("hip")


def test_a_gpu_that_works(machine: Path, hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    assert pick_device("auto").name == "hip:0"
    assert pick_device("auto").reason == "the first GPU that the runtime shows"
    hip.set(devices=2)
    assert (pick_device("hip:1").name, pick_device("hip:1").reason) == ("hip:1", "as asked")
    with pytest.raises(ConfigError, match=r"--device hip:2: .*hip:2 does not exist: the runtime shows 2 devices"):
        pick_device("hip:2")
    opened, chosen = open_device("hip:1")
    assert (opened.props.name, chosen.index) == ("HIP double 1", 1)
    opened.close()


def test_cuda_is_never_taken_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_KFD", Path("/nowhere"))
    assert pick_device("auto").kind == "cpu"
    with pytest.raises(ConfigError, match="--device cuda:4000: "):
        pick_device("cuda:4000")


def test_memory_strategies(
    hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: TinyModel
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    for device, options, text in (
        (
            "hip",
            {"memory": "direct"},
            "direct needs a device that reads pageable memory .* which hip, HIP double 0 does",
        ),
        ("hip", {"memory": "staged", "memory_way": "svm"}, "memory_way: expected auto on hip, .* staged, found svm"),
        ("cpu", {"memory": "staged"}, "memory: staged needs a GPU"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(EngineConfig(model=str(tiny_llama.path), device=device, **options))


def test_weights_that_do_not_fit(
    hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: TinyModel
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    config = EngineConfig(model=str(tiny_llama.path), device="hip", memory="staged", ctx=64)
    hip.set(memory=100_000)
    with pytest.raises(
        BudgetError, match=r"does not fit on hip, HIP double 0: .* as free is 97\.7 KiB\. Use .*--force"
    ):
        load(config)
    assert not any(hip.live().values())
    hip.set(memory=(385 << 20) + tiny_llama.path.stat().st_size)
    load(config).close()
    with pytest.raises(BudgetError, match=r"\(ctx 8192\).* use --ctx \d+, "):
        load(replace(config, ctx=8192))


def test_a_runtime_that_lacks_functions(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_HIP_LIBRARY", str(library(hide=["hipGraphLaunch"])))
    assert "lacks hipGraphLaunch" in pick_device("auto").reason


def test_the_runtime_of_rocms_python_packages(tmp_path: Path, hip_kernels: Path) -> None:
    """Found in site-packages/_rocm_sdk_core/lib, where the dynamic linker does not look."""
    folder = tmp_path / "_rocm_sdk_core" / "lib"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    name = "libamdhip64.so.12"  # the newest name that is tried, so that none of the machine's comes before
    shutil.copy(library(flags=[f"-Wl,-soname,{name}"]), folder / name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "APU_KERNELS": str(hip_kernels)}
    environment.pop("APU_HIP_LIBRARY", None)
    code = "from apu_engine.device import pick_device; print(pick_device('hip').name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.stdout, run.returncode) == ("hip:0\n", 0), run.stderr
