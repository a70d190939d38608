"""`apu-engine show`: a file's facts, and whether it fits on this machine, a fixture or a preset, from its header."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sparse_models import FLASH_BYTES, sparse_moe

from apu_engine.cli import main
from apu_engine.memory.budget import RUNTIME_BYTES, STAGING_RING
from models import TinyModel

GIB = 1 << 30
MACHINES = Path(__file__).parent.parent / "fixtures/machines"


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 80.76 GiB, a hole on the disk."""
    path = sparse_moe(tmp_path_factory.mktemp("sparse") / "flash.gguf")
    assert path.stat().st_size > FLASH_BYTES - 64 and path.stat().st_blocks < 2048
    return path


def estimate(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> dict[str, Any]:
    assert main(["show", *map(str, args), "--estimate-only", "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["estimate"]
    return found


def test_a_large_model_on_stock_firmware(
    flash: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """80.76 GiB, 32k context: accepted in place without a kernel parameter, as a copy refused with the one it needs."""
    monkeypatch.setenv("APU_SYSROOT", str(MACHINES / "strix-halo-128-stock"))
    found = estimate(capsys, flash, "--ctx", 32768)
    assert (found["machine"], found["context"], found["fits"]) == ("strix-halo-128-stock", 32768, True)
    assert abs(found["weights"] - FLASH_BYTES) < 64
    assert found["kv"] == 40 * 2 * 4 * 128 * 2 * 32768
    in_place, staged = found["strategies"]
    assert (in_place["strategy"], in_place["fits"], in_place["remedy"]) == ("registered", True, "")
    assert (staged["strategy"], staged["fits"]) == ("staged", False)
    needed = found["weights"] + found["kv"] + found["scratch"] + RUNTIME_BYTES + STAGING_RING
    gib = -(-(needed + 812_646_400) // GIB)  # what others use of GTT stays there
    assert staged["pages_limit"] == gib * 262_144
    assert staged["remedy"] == f"boot with ttm.pages_limit={gib * 262_144} ({gib} GiB of GTT)"


def test_that_parameter_is_enough_and_one_gib_less_is_not(
    flash: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(MACHINES / "strix-halo-128-stock", tmp_path / "machine")
    monkeypatch.setenv("APU_SYSROOT", str(root))
    pages = estimate(capsys, flash, "--memory", "staged", status=78)["strategies"][0]["pages_limit"]
    total = root / "sys/class/drm/card1/device/mem_info_gtt_total"
    for limit, status in ((pages, 0), (pages - 262_144, 78)):
        total.write_text(f"{limit * 4096}\n")
        estimate(capsys, flash, "--memory", "staged", "--ctx", 32768, status=status)


def test_refusals_name_what_helps(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*args: object) -> str:
        assert main(["show", str(flash), "--estimate-only", *map(str, args)]) == 78
        out, err = capsys.readouterr()
        assert "too little" in out and len(err.splitlines()) == 1
        return err

    text = refusal("--machine", "strix-halo-128", "--memory", "staged", "--ctx", 32768)
    for words in ("free GTT is 62.8 GiB", "Boot with ttm.pages_limit=22020096 (84 GiB", "--memory auto", "--force"):
        assert words in text
    text = refusal("--machine", "strix-halo-64")
    assert "KFD's limit on what GPUs map is 60.0 GiB" in text and "Use a file of at most 57" in text
    assert "pages_limit" not in text and "end other programs" not in text
    text = refusal("--machine", "strix-halo-128", "--memory-budget", "80GiB")
    assert "memory_budget is 80 GiB" in text and "raise --memory-budget" in text
    text = refusal("--machine", "strix-halo-128", "--ctx", 131072, "--parallel", 4)
    assert "ctx 131072 x 4" in text and "--parallel 1" in text and "--ctx" in text
    text = refusal("--machine", "strix-halo-128", "--ctx", 131072, "--parallel", 5, "--kv-type", "f16")
    assert "use --kv-type q8_0" in text


def test_remedies_work(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest context that a refusal names fits, one page more does not."""
    base = (flash, "--machine", "strix-halo-128", "--parallel", 4)
    assert main(["show", *map(str, base), "--estimate-only", "--ctx", "131072"]) == 78
    found = re.search(r"[Uu]se --ctx (\d+)", capsys.readouterr().err)
    assert found is not None
    estimate(capsys, *base, "--ctx", found[1])
    estimate(capsys, *base, "--ctx", int(found[1]) + 128, status=78)


def test_force_goes_on(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate(capsys, flash, "--machine", "strix-point-32", "--force")
    assert not any(item["fits"] for item in found["strategies"])
    assert found["notices"][0].startswith("--force: registered: ")


def test_a_container(flash: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APU_SYSROOT", str(MACHINES / "container-no-devices"))
    assert main(["show", str(flash), "--estimate-only"]) == 78
    assert "raise the container's or the unit's memory limit" in capsys.readouterr().err


def test_on_the_cpu_a_notice_at_most(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(flash), "--estimate-only", "--device", "cpu", "--machine", "strix-point-32"]) == 0
    out = capsys.readouterr().out
    assert "direct: fits" in out and "read from disk again" in out


def test_a_model(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_llama.path), "--machine", "strix-halo-128"]) == 0
    out = capsys.readouterr().out
    for words in ("llama, 2 layers of width 64", "tiny llama", "F32", "512 tokens trained", "registered: fits"):
        assert words in out
    assert main(["show", str(tiny_llama.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["architecture"] == "llama" and found["estimate"]["fits"]


def test_bad_arguments(tiny_llama: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_llama.path), "--machine", "toaster"]) == 2
    assert "expected one of strix-halo-128" in capsys.readouterr().err
    assert main(["show"]) == 2
    capsys.readouterr()
    assert main(["show", str(tiny_llama.path), "--device", "toaster"]) == 2
    assert "expected auto, cpu, hip[:N] or cuda[:N]" in capsys.readouterr().err
