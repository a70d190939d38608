"""Each way in which AMD's runtime is known to misbehave, met by loading a model as a user does.

Expected every time: the right fallback, or an error that says what to do; tokens equal the CPU's; nothing is left of
what was tried, and the weights are never there twice. Where each misbehaviour was seen is said in tests/gpu/double.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hip_double import HipDouble, library

from apu_engine import LLM
from apu_engine.errors import ApuError, BudgetError, ConfigError, GpuError
from apu_engine.memory import strategies
from apu_engine.memory.verify import anonymous_bytes
from models import TinyModel

PROMPT = [1, 5, 9, 13]
ALL = "svm,advise,lock,register"


@pytest.fixture(autouse=True)
def surroundings(hip: HipDouble, hip_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is the GPU."""
    monkeypatch.setenv("APU_KERNELS", str(hip_kernels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def expected(tiny_llama: TinyModel) -> list[int]:
    """What the CPU says."""
    with LLM(str(tiny_llama.path), device="cpu", ctx=256) as llm:
        return llm.generate(PROMPT, 6, temperature=0, ignore_eos=True).tokens


class Loads:
    """Loads the model on the stand-in, checks its answer and that everything is given back."""

    def __init__(self, hip: HipDouble, model: TinyModel, expected: list[int]) -> None:
        self.hip, self.expected = hip, expected
        self.path, self.size = str(model.path), model.path.stat().st_size

    def open(self, remember: bool = False, **options: Any) -> LLM:
        if not remember:  # what a probe found before
            shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        return LLM(self.path, device="hip", ctx=256, **options)

    @contextmanager
    def running(self, **options: Any) -> Iterator[LLM]:
        before, descriptors = self.hip.live(), open_files()
        with self.open(**options) as llm:
            assert llm.generate(PROMPT, 6, temperature=0, ignore_eos=True).tokens == self.expected
            yield llm
        assert self.hip.live() == before
        assert open_files() == descriptors
        assert self.path not in Path("/proc/self/maps").read_text()
        self.hip.set()

    def in_place(self, way: str, **options: Any) -> str:
        """Loads, in place by this way; returns the ready line."""
        with self.running(**options) as llm:
            weights = llm.runtime.weights
            assert (weights.strategy, weights.way) == ("registered", way)
            assert llm.runtime.copied_bytes == 0
            assert self.hip.totals()["pageable_bytes"] < self.size // 10
            line = llm.summary()
        assert "in place" in line and "copied 0, anonymous 0" in line
        return line

    def staged(self, **options: Any) -> str:
        """Loads, as one copy; returns the ready line."""
        with self.running(**options) as llm:
            assert llm.runtime.weights.strategy == "staged" and not llm.runtime.mappings
            assert 0.9 * self.size < llm.runtime.copied_bytes <= self.size
            assert self.hip.live()["range_bytes"] == self.hip.live()["registrations"] == 0
            line = llm.summary()
        assert "staged" in line
        return line

    def fails(self, kind: type[Exception], match: str, **options: Any) -> None:
        before, descriptors = self.hip.live(), open_files()
        with pytest.raises(kind, match=match):
            self.open(**options)
        assert self.hip.live() == before
        assert open_files() == descriptors
        assert self.path not in Path("/proc/self/maps").read_text()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture
def loads(hip: HipDouble, tiny_llama: TinyModel, expected: list[int]) -> Loads:
    return Loads(hip, tiny_llama, expected)


def test_a_runtime_that_behaves(loads: Loads) -> None:
    assert "98% of device bandwidth" in loads.in_place("svm")


@pytest.mark.parametrize("way", ALL.split(","))
def test_one_way_alone(hip: HipDouble, loads: Loads, way: str) -> None:
    """The others are refused: it is found, and chosen when asked for."""
    hip.set(refuse=",".join(other for other in ALL.split(",") if other != way), stale="refused")
    loads.in_place(way)
    hip.set(stale="refused")
    loads.in_place(way, memory="registered", memory_way=way)


def test_read_only_refused(hip: HipDouble, loads: Loads) -> None:
    """Registered without the flag on a mapping that nobody can write, and never on another."""
    hip.set(read_only="refused", refuse="svm,advise,lock")
    loads.in_place("register")


def test_registration_refused_above_a_size(hip: HipDouble, loads: Loads) -> None:
    """In the probe already, or only for the whole model: then the copy, and why is said."""
    hip.set(register_limit=4096)
    line = loads.staged()
    assert "no way of reading in place works" in line and "hipErrorInvalidValue (1) registering" in line
    hip.set(kfd_limit=loads.size - 4096)
    loads.staged()


def test_fine_grained_registration(hip: HipDouble, loads: Loads) -> None:
    """As ROCm before mid-2026 does: slow until advised, which registering has to come before."""
    hip.set(fine=1, refuse="svm,advise,lock")
    assert "98% of device bandwidth" in loads.in_place("register")


def test_fine_grained_for_good(hip: HipDouble, loads: Loads) -> None:
    """Without coarse grain pages are read at a tenth: a copy is faster; asked for, it is what it is."""
    for faults in ({"coarse": "ignored", "fine": 1}, {"fine": 1, "coarse": "invalid", "refuse": "svm,lock"}):
        hip.set(**faults)
        assert "in place reads at 10.0% of device memory (21 of 210 GB/s, fine-grained)" in loads.staged()
    hip.set(coarse="ignored", fine=1)
    line = loads.in_place("svm", memory="registered")
    assert "10% of device bandwidth" in line


def test_coarse_grain_refused(hip: HipDouble, loads: Loads) -> None:
    """SetCoarseGrain is a hint: a registration that is coarse-grained without it is as good."""
    hip.set(coarse="invalid", refuse="svm,lock")
    loads.in_place("register")


def test_slow_pages(hip: HipDouble, loads: Loads) -> None:
    """Coarse-grained and verified, but slow."""
    hip.set(rate_coarse=5_100, rate_device=436_100)
    assert "in place reads at 1.2% of device memory (5.1 of 436 GB/s)" in loads.staged()


def test_the_fastest_way(hip: HipDouble, loads: Loads) -> None:
    hip.set(refuse="svm", fine=1, rate_fine=150_000)
    assert "98% of device bandwidth" in loads.in_place("advise")


def test_no_svm(hip: HipDouble, loads: Loads) -> None:
    hip.set(svm="absent")
    line = loads.staged()
    assert "HSA_STATUS_ERROR" in line and "hipErrorInvalidValue" in line


@pytest.mark.parametrize("way", ["lock", "register"])
def test_addresses_that_are_not_the_hosts(hip: HipDouble, loads: Loads, way: str) -> None:
    """Nor adjoin; between guard pages, so that nothing beside the registered pages is read."""
    hip.set(scattered=1, moved=1, refuse=",".join(other for other in ALL.split(",") if other != way))
    loads.in_place(way)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Models are registered and staged so many bytes at a time, as those of many GiB are."""
    monkeypatch.setattr(strategies.registered, "__defaults__", (1 << 16,))
    monkeypatch.setattr(strategies, "STAGED_BYTES", 1 << 16)
    return 1 << 16


@pytest.mark.parametrize("way", ALL.split(","))
def test_many_parts(hip: HipDouble, loads: Loads, small_parts: int, way: str) -> None:
    """Their addresses follow from nothing; pages that two of them need are mapped twice."""
    hip.set(scattered=1, stale="refused")
    with loads.running(memory="registered", memory_way=way) as llm:
        weights = llm.runtime.weights
        assert len(weights.placed) > loads.size // small_parts and len(weights.mappings) > 1
        assert hip.live()["registrations"] == (len(weights.placed) if way in ("lock", "register") else 0)


@pytest.mark.parametrize("way", ALL.split(","))
def test_a_limit_is_met_half_way(hip: HipDouble, loads: Loads, small_parts: int, way: str) -> None:
    """What was registered by then is given back before the copy is made."""
    hip.set(kfd_limit=loads.size // 2, refuse=",".join(other for other in ALL.split(",") if other != way))
    with loads.running() as llm:
        assert llm.runtime.weights.strategy == "staged" and len(llm.runtime.weights.placed) > loads.size // small_parts
        assert hip.live()["range_bytes"] == 0
    hip.set(kfd_limit=loads.size // 2)
    loads.fails(ApuError, "hipErrorInvalidValue|HSA_STATUS_ERROR", memory="registered", memory_way=way)


def test_unregistering_that_does_nothing(hip: HipDouble, loads: Loads) -> None:
    """Then unmapping is what gives the pages back."""
    hip.set(unregister="nothing", refuse="svm,advise,lock")
    loads.in_place("register")


def test_a_failed_way_leaves_nothing_for_the_next(hip: HipDouble, loads: Loads) -> None:
    """Each way is tried on a mapping of its own: the driver refuses pages of which it knows from another one."""
    hip.set(stale="refused", coarse="ignored", fine=1, rate_fine=10_000)
    loads.staged()
    hip.set(stale="refused", refuse="svm,advise")
    loads.in_place("lock")


def test_a_way_that_worked_before(hip: HipDouble, loads: Loads) -> None:
    """What a probe found is remembered; that the way fails today is no reason to fail."""
    loads.in_place("svm")
    hip.set(refuse="svm")
    with loads.running(remember=True) as llm:
        assert llm.runtime.weights.strategy != "registered" or llm.runtime.weights.way != "svm"
        assert any("HSA_STATUS_ERROR" in notice for notice in llm.runtime.notices)


@pytest.mark.parametrize("way", ALL.split(","))
def test_registering_that_copies(hip: HipDouble, loads: Loads, way: str) -> None:
    """Anonymous memory is watched: such a way is none."""
    others = ",".join(other for other in ALL.split(",") if other != way)
    hip.set(refuse=others, copied=1 + (80 << 20) // loads.size)
    assert "anonymous memory grew" in loads.staged()


@pytest.mark.parametrize("way", ["lock", "register"])
def test_pages_of_something_else(hip: HipDouble, loads: Loads, way: str) -> None:
    """Verified by a sum: such a way is none, and asked for it is an error."""
    hip.set(wrong=1, refuse=",".join(other for other in ALL.split(",") if other != way))
    assert "the device reads other bytes at " in loads.staged()
    hip.set(wrong=1)
    loads.fails(ApuError, "the device reads other bytes at ", memory="registered", memory_way=way)


def test_figures_of_memory(hip: HipDouble, loads: Loads) -> None:
    """More free than there is says nothing, less than is needed is an end."""
    hip.set(mem_free=120 << 30, mem_total=62 << 30, refuse=ALL)
    with loads.running() as llm:
        assert any("more free memory than there is" in notice for notice in llm.runtime.notices)
    hip.set(mem_free=loads.size // 2, mem_total=1 << 30, refuse=ALL)
    loads.fails(BudgetError, "what the runtime reports as free is")


@pytest.mark.parametrize("memory", ["staged", "registered"])
@pytest.mark.parametrize("key", ["oom_at", "pinned_oom_at"])
def test_every_allocation_can_fail(hip: HipDouble, loads: Loads, memory: str, key: str) -> None:
    """The k-th, of the device's memory or of pinned memory: a clear error."""
    for k in range(1, 100):
        hip.set(**{key: k})
        before = hip.live()
        try:
            with loads.open(memory=memory):
                break  # it needed less than k
        except ApuError as error:
            assert "hipErrorOutOfMemory" in str(error)
        finally:
            assert hip.live() == before
    assert 1 < k < 99


@pytest.mark.parametrize("kernel", ["checksum", "plain_read"])
def test_launches_that_fail(hip: HipDouble, loads: Loads, kernel: str) -> None:
    hip.set(launch=kernel)
    loads.fails(ApuError, r"hipErrorLaunchFailure \(719\) launching")


def test_copies_that_fail(hip: HipDouble, loads: Loads) -> None:
    for k in (1, 2):
        hip.set(copy_fail=k)
        loads.fails(ApuError, r"hipErrorUnknown \(999\) copying \d+ bytes to the device", memory="staged")


MISBEHAVIOURS = {
    "read_only": ["refused"],
    "register_limit": [1 << 16, 1 << 19],
    "kfd_limit": [1 << 16, 500_000],
    "fine": [1],
    "coarse": ["invalid", "ignored"],
    "svm": ["absent"],
    "scattered": [1],
    "moved": [1],
    "wrong": [1],
    "unregister": ["nothing"],
    "stale": ["refused"],
    "refuse": ["svm", "advise", "lock", "register", "svm,advise", "lock,register"],
    "rate_coarse": [5_000, 150_000],
    "mem_free": [1 << 40],
    "oom_at": [1, 5, 12, 20],
    "pinned_oom_at": [1, 3],
    "copy_fail": [1, 3],
    "launch": ["checksum", "plain_read"],
    "capture": ["begin", "instantiate"],
}


@pytest.mark.parametrize("seed", range(16))
def test_several_at_once(hip: HipDouble, loads: Loads, seed: int) -> None:
    """It loads and answers as the CPU does, or says in one line why not."""
    choose = random.Random(seed)
    names = choose.sample(sorted(MISBEHAVIOURS), choose.randint(2, 6))
    faults = {name: choose.choice(MISBEHAVIOURS[name]) for name in names}
    memory = choose.choice(["auto", "auto", "registered", "staged"])
    before, descriptors = hip.live(), open_files()
    hip.set(**faults)
    try:
        with loads.running(memory=memory) as llm:
            assert llm.runtime.copied_bytes in (0, llm.runtime.weights.nbytes)
    except ApuError as error:
        assert str(error) and "\n" not in str(error) and "internal" not in str(error), (faults, memory)
    hip.set()
    assert hip.live() == before and open_files() == descriptors, (faults, memory)


def test_loading_again_and_again(hip: HipDouble, loads: Loads) -> None:
    """Neither this process nor the device grows."""
    grown: list[int] = []
    for memory in ("registered", "staged", "auto") * 4:
        with loads.running(memory=memory):
            pass
        grown.append(anonymous_bytes())
    assert grown[-1] - grown[5] < 4 << 20


def test_steps_allocate_nothing(hip: HipDouble, loads: Loads) -> None:
    """After those of the first sizes."""
    with loads.running() as llm:
        before, first = hip.live(), anonymous_bytes()
        for _ in range(8):
            llm.generate(PROMPT, 6, temperature=0, ignore_eos=True)
        assert hip.live() == before
        assert anonymous_bytes() - first < 2 << 20


def test_no_device(hip: HipDouble, loads: Loads) -> None:
    hip.set(devices=0)
    loads.fails(GpuError, "--device hip: ")


@pytest.mark.parametrize("missing", ["hipModuleLaunchKernel", "hipStreamBeginCapture"])
def test_a_runtime_that_is_too_old(loads: Loads, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("APU_HIP_LIBRARY", str(library(hide=[missing])))
    loads.fails(GpuError, rf"lacks {missing}; install ROCm's HIP runtime, 5.2 or later")


def test_a_runtime_without_ways(tiny_llama: TinyModel, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["hipHostRegister", "hipMemAdvise", "hsa_amd_memory_lock", "hsa_amd_svm_attributes_set"]
    path = library(hide=names)
    monkeypatch.setenv("APU_HIP_LIBRARY", str(path))
    old = HipDouble(path)
    line = Loads(old, tiny_llama, expected).staged()
    assert "the runtime has no way of reading in place" in line
    Loads(old, tiny_llama, expected).fails(ConfigError, "memory: registered needs a runtime", memory="registered")
