"""Which device is taken, why, and what the reason says where a GPU cannot be used."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hip_double import HipDouble, library

from apu_engine import device as choice
from apu_engine import launcher
from apu_engine.cli import main
from apu_engine.config import EngineConfig
from apu_engine.device import open_device, pick_device
from apu_engine.engine.load import load
from apu_engine.errors import BudgetError, ConfigError, GpuError
from models import TinyModel


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose kernel shows a gfx1151 that this user may open."""
    root = tmp_path / "machine"
    shutil.copytree(Path(__file__).parents[1] / "fixtures/machines/strix-halo-128-stock", root)
    monkeypatch.setenv("APU_SYSROOT", str(root))
    monkeypatch.setenv("APU_HIP_LIBRARY", "/nowhere/libamdhip64.so")
    return root


def test_the_cpu_as_asked() -> None:
    assert (pick_device("cpu").name, pick_device("cpu").reason) == ("cpu", "as asked")


@pytest.mark.parametrize("request_", ["gpu", "hip:", "hip:x", "hip:-1", "cpu:1", "auto:0", ""])
def test_unknown_requests(request_: str) -> None:
    with pytest.raises(ConfigError, match=r"expected auto, cpu, hip\[:N\] or cuda\[:N\]"):
        pick_device(request_)


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(tmp_path))
    assert pick_device("auto").reason == "no AMD GPU: /dev/kfd is absent"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert pick_device("auto").reason == "no AMD GPU: none in /sys/class/kfd"


def test_a_gpu_without_kernels_of_its_kind(machine: Path) -> None:
    node = machine / "sys/class/kfd/kfd/topology/nodes/1/properties"
    node.write_text(node.read_text().replace("110501", "100306"))
    found = pick_device("auto")
    assert (found.kind, found.reason) == ("cpu", "gfx1036 is present, but there are no kernels for it")


@pytest.mark.parametrize("content", [None, b"text", b""])
def test_a_library_that_the_environment_names(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "libamdhip64.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("APU_HIP_LIBRARY", str(path))
    for request in ("auto", "hip:0"):
        with pytest.raises(GpuError, match=f"{path} .*; APU_HIP_LIBRARY names that file: correct or unset it"):
            pick_device(request)


def test_a_gpu_without_a_runtime(machine: Path) -> None:
    """Never passed over for the CPU."""
    missing = "/nowhere/libamdhip64.so was not found; install ROCm's HIP runtime"
    with pytest.raises(GpuError, match=f"gfx1151 is present, but {missing}.*--device cpu"):
        pick_device("auto")
    with pytest.raises(GpuError, match=f"--device hip:1: {missing}"):
        pick_device("hip:1")
    assert pick_device("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("id_", "package"),
    [
        ("ubuntu", "sudo apt install libamdhip64-dev"),
        ("debian", "sudo apt install libamdhip64-dev"),
        ("fedora", "sudo dnf install rocm-hip"),
        ("arch", "sudo pacman -S hip-runtime-amd"),
        ("other", "install hip-runtime-amd of ROCm"),
    ],
)
def test_the_package_of_a_missing_runtime(
    machine: Path, monkeypatch: pytest.MonkeyPatch, id_: str, package: str
) -> None:
    monkeypatch.delenv("APU_HIP_LIBRARY")
    monkeypatch.setenv("PATH", "")
    (machine / "etc/os-release").write_text(f"ID={id_}\n")
    absent = (None, "libamdhip64.so was not found", None)
    monkeypatch.setattr(choice, "_open", lambda *_: absent)
    with pytest.raises(GpuError, match=rf"not found; {package}, or in this environment: pip install .*--device cpu"):
        pick_device("auto")


def test_a_gpu_that_the_user_may_not_open(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(GpuError, match=r"gfx1151 is present, but /dev/kfd: .* may not open it.*usermod -aG .*log out"):
        pick_device("auto")
    with pytest.raises(GpuError, match=r"was not found; .*; /dev/kfd: .* may not open it.*usermod -aG"):
        pick_device("hip")


def test_devices_that_a_container_lacks(machine: Path) -> None:
    (machine / "dev/kfd").unlink()
    with pytest.raises(GpuError, match="/dev/kfd is absent: sudo modprobe amdgpu"):
        pick_device("auto")
    (machine / ".dockerenv").touch()
    with pytest.raises(GpuError, match="start the container with --device /dev/kfd --device /dev/dri --group-add"):
        pick_device("auto")


def test_a_named_model_stops_at_an_unusable_gpu(
    machine: Path, tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["chat", "-m", str(tiny_llama.path), "--raw", "-p", "a", "-n", "1", "--ctx", "64"]
    assert main(args) == 78
    assert "gfx1151 is present, but" in capsys.readouterr().err
    assert main([*args, "--device", "hip"]) == 78
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    assert launcher.main([str(tiny_llama.path), "--device", "hip", "--port", port]) == 78
    assert launcher.main(["--device", "hip", "--port", port]) == 78  # no demo on another device
    assert main([*args, "--device", "cpu"]) == 0


def test_a_gpu_without_kernels(machine: Path, hip: HipDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(machine))
    advice = rf"no kernels for gfx1151 in {machine}; build them with ./build.sh --targets gfx1151"
    with pytest.raises(GpuError, match=f"gfx1151 is present, but {advice}"):
        pick_device("auto")
    with pytest.raises(GpuError, match=f"--device hip: {advice}"):
        pick_device("hip")


def test_a_gpu_that_works(machine: Path, hip: HipDouble, hip_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    assert pick_device("auto").name == "hip:0"
    shown = f"{hip.path}, unknown version, named by APU_HIP_LIBRARY"
    assert pick_device("auto").reason == f"the first GPU that the runtime shows, with {shown}"
    hip.set(devices=2)
    assert (pick_device("hip:1").name, pick_device("hip:1").reason) == ("hip:1", f"as asked, with {shown}")
    with pytest.raises(GpuError, match=r"--device hip:2: .*hip:2 does not exist: the runtime shows 2 devices"):
        pick_device("hip:2")
    opened, chosen = open_device("hip:1")
    assert (opened.props.name, chosen.index) == ("HIP double 1", 1)
    opened.close()


def test_cuda_is_never_taken_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_SYSROOT", "/nowhere")
    assert pick_device("auto").kind == "cpu"
    with pytest.raises(GpuError, match="--device cuda:4000: "):
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
    with pytest.raises(GpuError, match="lacks hipGraphLaunch"):
        pick_device("auto")


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
