"""The budget at loading, on the double with a Strix Halo's numbers: what is refused leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hip_double import HipDouble
from sparse_models import sparse_moe

from apu_engine._native import Device
from apu_engine.config import EngineConfig
from apu_engine.engine.context import fit
from apu_engine.engine.load import load
from apu_engine.errors import BudgetError
from apu_engine.weights.opening import open_model

GIB = 1 << 30
CANDIDATES = ("registered", "direct", "staged")


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parent.parent / "fixtures/machines/strix-halo-128-stock"
    monkeypatch.setenv("APU_SYSROOT", str(root))


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse_moe(tmp_path_factory.mktemp("sparse") / "flash.gguf")


def test_strategies_that_fit(flash: Path, hip: HipDouble, hip_device: Device) -> None:
    config, model = EngineConfig(model=str(flash), ctx=32768), open_model(flash)
    found = fit(config, model, hip_device, CANDIDATES)
    assert found.strategies == ("registered", "direct")
    assert list(found.refused) == ["staged"] and "ttm.pages_limit=22282240" in found.refused["staged"]
    assert found.options.ctx == found.context.tokens == 32768
    assert fit(replace(config, ctx=0), model, hip_device, CANDIDATES).context.reason == "default limit"
    hip.set(memory=2 * GIB)  # the runtime's figure may be a part of what there is: KV cache must fit into that
    with pytest.raises(BudgetError, match="what the runtime reports as free is 2 GiB"):
        fit(config, model, hip_device, CANDIDATES)
    shorter = fit(replace(config, ctx=0), model, hip_device, CANDIDATES).context
    assert 8192 < shorter.tokens < 32768 and shorter.reason == "what fits in memory"
    forced = fit(replace(config, force=True), model, hip_device, CANDIDATES)
    assert forced.strategies == CANDIDATES and forced.context.notices[0].startswith("--force: registered: ")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"memory": "staged"}, r"Boot with ttm.pages_limit=22282240 \(85 GiB of GTT\), or use --memory auto"),
        ({"memory_budget": 80 * GIB}, "registered: .*memory_budget is 80 GiB.*raise --memory-budget"),
    ],
)
def test_a_refusal_maps_and_allocates_nothing(
    flash: Path,
    hip: HipDouble,
    hip_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    remedy: str,
) -> None:
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    before = hip.live()
    stages: list[str] = []
    with pytest.raises(BudgetError, match=remedy):
        load(EngineConfig(model=str(flash), device="hip", ctx=32768, **options), stages.append)
    assert stages == ["tokenizer", "pool"]
    assert hip.live() == before
    assert str(flash) not in Path("/proc/self/maps").read_text()
