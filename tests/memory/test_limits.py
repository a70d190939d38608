"""Needs against limits: what each strategy asks of KFD, MemAvailable, cgroup, GTT, carve-out, runtime and budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apu_engine.errors import ConfigError
from apu_engine.memory.budget import RUNTIME_BYTES, STAGING_RING, Estimate, Needs, estimate, estimates
from apu_engine.memory.limits import PRESETS, Limits, of_machine, preset
from apu_engine.memory.machine import GIB, Machine, kfd_limit

MACHINES = Path(__file__).parent.parent / "fixtures/machines"
NEEDS = Needs(weights=80 * GIB, kv=3 * GIB, scratch=GIB - RUNTIME_BYTES, tokens=32768)
STOCK = of_machine(Machine(MACHINES / "strix-halo-128-stock"))


def needed(item: Estimate) -> dict[str, int]:
    return {demand.limit: demand.needed for demand in item.demands}


def short(item: Estimate) -> list[str]:
    return [demand.limit for demand in item.missing]


def test_in_place_needs_no_gtt_for_weights() -> None:
    in_place, staged = estimates(("registered", "staged"), NEEDS, STOCK)
    assert needed(in_place) == {
        "KFD's limit on what GPUs map": 84 * GIB,
        "memory available": 84 * GIB,
        "free GTT": 4 * GIB,
    }
    assert in_place.fits and not in_place.remedy and not in_place.reason
    assert needed(staged) == dict.fromkeys(needed(in_place), 84 * GIB + STAGING_RING)
    assert short(staged) == ["free GTT"]
    assert estimate("direct", NEEDS, STOCK).demands == in_place.demands


def test_pages_limit_covers_what_is_needed_and_what_others_use() -> None:
    """In pages of 4 KiB, GiB x 262144."""
    staged = estimate("staged", NEEDS, STOCK)
    assert STOCK.gtt_used == 812_646_400
    assert staged.pages_limit == 85 * 262_144  # 84.125 GiB and 0.76 in use
    assert "ttm.pages_limit=22282240 (85 GiB of GTT)" in staged.reason
    tuned = of_machine(Machine(MACHINES / "strix-halo-128-tuned"))
    assert estimate("staged", NEEDS, tuned).fits
    dkms = estimate("staged", NEEDS, replace(STOCK, ttm_module="amdttm"))
    assert dkms.remedy.startswith("boot with amdttm.pages_limit=22282240")


def test_pages_limit_is_no_remedy_where_memory_is_short() -> None:
    staged = estimate("staged", NEEDS, preset("strix-halo-64"))
    assert short(staged) == ["KFD's limit on what GPUs map", "memory available", "free GTT"]
    assert not staged.remedy
    low = replace(STOCK, driver_free=10 * GIB, driver_total=64 * GIB)  # half of what there is, as some versions say
    assert estimate("staged", NEEDS, low).remedy
    assert not estimate("staged", NEEDS, replace(low, gtt_total=100 * GIB)).remedy


def test_the_least_of_gtt_memory_and_the_runtimes_figure() -> None:
    limits = replace(STOCK, driver_free=3 * GIB, driver_total=64 * GIB)
    assert short(estimate("registered", NEEDS, limits)) == ["what the runtime reports as free"]
    assert short(estimate("registered", NEEDS, replace(STOCK, gtt_used=60 * GIB))) == ["free GTT"]
    assert short(estimate("registered", NEEDS, replace(STOCK, memory_available=85 * GIB))) == ["memory available"]
    lies = replace(STOCK, driver_free=3 * GIB, driver_total=2 * GIB)
    assert lies.driver_lies and estimate("registered", NEEDS, lies).fits
    assert estimate("registered", NEEDS, replace(STOCK, kfd_limit=None, memory_available=200 * GIB)).fits


def test_locked_pages_of_the_file_are_no_new_demand() -> None:
    """MemAvailable leaves locked pages out; merely cached ones it counts as available."""
    limits = replace(STOCK, memory_available=50 * GIB)
    assert short(estimate("registered", NEEDS, limits)) == ["memory available"]
    cached = replace(NEEDS, cached=80 * GIB)
    assert not estimate("registered", cached, limits).fits
    locked = replace(limits, unevictable=79 * GIB)
    assert estimate("registered", cached, locked).fits
    assert not estimate("registered", NEEDS, locked).fits  # locked, but another file's
    assert not estimate("staged", cached, locked).fits


def test_a_cgroup_is_charged_file_pages_and_no_gtt() -> None:
    limits = replace(STOCK, gtt_total=100 * GIB, cgroup_available=32 * GIB, cgroup_cached=GIB)
    assert short(estimate("registered", NEEDS, limits)) == ["what the memory cgroup leaves"]
    assert estimate("staged", NEEDS, limits).fits
    assert estimate("registered", replace(NEEDS, cached=60 * GIB), limits).fits  # 59 GiB are charged to another
    container = of_machine(Machine(MACHINES / "container-no-devices"))
    assert container.cgroup_available is not None and container.cgroup_available < 32 * GIB
    assert short(estimate("registered", NEEDS, container)) == ["what the memory cgroup leaves"]


def test_a_budget_bounds_the_sum() -> None:
    assert estimate("registered", NEEDS, STOCK, budget=84 * GIB).fits
    assert short(estimate("registered", NEEDS, STOCK, budget=84 * GIB - 1)) == ["memory_budget"]
    assert "memory_budget" in short(estimate("staged", NEEDS, STOCK, budget=84 * GIB))


def test_a_large_carve_out_is_where_allocations_come_from() -> None:
    limits = replace(STOCK, memory_total=31 * GIB, memory_available=27 * GIB, kfd_limit=kfd_limit(31 * GIB))
    limits = replace(limits, gtt_total=15 * GIB, vram_total=96 * GIB, vram_used=GIB)
    staged = estimate("staged", NEEDS, limits)
    assert staged.fits
    assert needed(staged)["memory available"] == STAGING_RING
    assert short(estimate("registered", NEEDS, limits)) == ["KFD's limit on what GPUs map", "memory available"]


def test_a_gpu_with_memory_of_its_own() -> None:
    limits = Limits("this machine", "cuda", "cuda, H200", 128 * GIB, 120 * GIB, unified=False)
    limits = replace(limits, driver_free=139 * GIB, driver_total=140 * GIB)
    in_place, staged = estimates(("registered", "staged"), NEEDS, limits)
    assert needed(in_place) == {"memory available": 80 * GIB, "what the runtime reports as free": 4 * GIB}
    assert needed(staged) == {
        "memory available": STAGING_RING,
        "what the runtime reports as free": 84 * GIB + STAGING_RING,
    }


def test_on_the_cpu_only_kv_and_scratch_must_fit() -> None:
    limits = replace(STOCK, kind="cpu", memory_available=5 * GIB)
    assert estimate("direct", NEEDS, limits).fits
    assert short(estimate("direct", replace(NEEDS, kv=5 * GIB), limits)) == ["memory available"]


def test_this_machine() -> None:
    limits = of_machine()
    assert limits.name == "this machine" and 0 < limits.memory_available <= limits.memory_total


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    limits = preset(name)
    ram = int(name.split("-")[2]) * GIB
    assert 0.95 * ram < limits.memory_total < ram
    assert limits.kfd_limit == kfd_limit(limits.memory_total)
    assert limits.gtt_total == (120 * GIB if "tuned" in name else limits.memory_total // 2)
    assert estimate("registered", Needs(ram // 2, GIB, 0, 1), limits).fits


def test_the_preset_is_like_the_fixture() -> None:
    limits = preset("strix-halo-128")
    assert abs(limits.memory_total - STOCK.memory_total) < GIB // 4
    assert limits.kfd_limit and STOCK.kfd_limit and abs(limits.kfd_limit - STOCK.kfd_limit) < GIB // 4
    assert (limits.kind, limits.device, limits.unified) == (STOCK.kind, STOCK.device, STOCK.unified)


def test_an_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="--machine toaster: expected one of strix-halo-128, "):
        preset("toaster")
