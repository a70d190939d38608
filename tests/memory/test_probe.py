"""What the probe measures, keeps and concludes, over a device double; and the lines that users read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_double import Memory

from apu_engine.errors import LoadCancelled
from apu_engine.memory import probe as module
from apu_engine.memory.files import file_system
from apu_engine.memory.placement import PAGE
from apu_engine.memory.probe import Cache, Candidate, Probe, Way, candidates, probe
from apu_engine.memory.strategies import Job
from apu_engine.weights.model_file import TensorRef

SIZE = (2 << 20) + 300


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SHORT", 0)  # so that bandwidth counts on a small file
    return tmp_path / "cache" / "apu_engine" / "probe.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(np.random.default_rng(9).bytes(SIZE))
    return path


def job(memory: Memory, file: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    refs = [TensorRef("w", 0, (5000, 100), 0, 100, 2_000_000)]
    return Job(memory.install(monkeypatch), [file], [SIZE], refs)


def names(found: list[Candidate]) -> list[str]:
    return [candidate.title for candidate in found]


def choose(result: Probe, memory: str = "auto", way: str = "auto") -> list[Candidate]:
    return candidates(memory, way, result, [item.name for item in result.ways])


def test_everything_works(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(rates={"svm": 190, "advise": 198, "lock": 197, "register": 150})
    result = probe(job(memory, file, monkeypatch))
    assert [way.name for way in result.ways] == ["svm", "advise", "lock", "register"]
    assert all(not way.problem and way.grain == "coarse" for way in result.ways)
    assert all(way.register_s_per_gib >= 0 and way.first_touch_s_per_gib >= 0 for way in result.ways)
    assert result.seconds < module.SECONDS and result.device_gb_per_s == 200
    assert not memory.regions
    found = choose(result)
    # B and C are within noise of each other, A is 95%, D is too slow unless a copy does not fit
    assert names(found) == [
        "registered (way B)",
        "registered (way C)",
        "registered (way A)",
        "staged",
        "registered (way D)",
    ]
    assert found[0].why == "99% of device bandwidth"


def test_as_on_a_gpu_behind_a_bus(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(ways=("register",), kind="cuda", integrated=False, device_rate=4361, rates={"register": 51.2})
    found = choose(probe(job(memory, file, monkeypatch)))
    assert names(found) == ["staged", "registered (way D)"]
    assert found[0].why == "in place reads at 1.2% of device memory (51 of 4361 GB/s)"


def test_fine_grained_pages_are_not_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(ways=("lock", "register"), grains={"lock": "fine", "register": "fine"}, rates={"lock": 9.5})
    memory.refuse = {"register": "hipErrorInvalidValue (1)"}
    found = choose(probe(job(memory, file, monkeypatch)))
    assert names(found) == ["staged", "registered (way C)"]
    assert found[0].why == "in place reads at 4.8% of device memory (9.5 of 200 GB/s, fine-grained)"


def test_ways_that_fail(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(refuse={"svm": "HSA_STATUS_ERROR (0x1000)"}, wrong={"advise"}, shift=0)
    monkeypatch.setattr(module, "anonymous_in", lambda _: 12288 if any(r.way == "lock" for r in memory.regions) else 0)
    result = probe(job(memory, file, monkeypatch))
    problems = {way.name: way.problem for way in result.ways}
    assert problems["svm"] == "device hip: HSA_STATUS_ERROR (0x1000)"
    assert "reads other bytes at 0 of m.gguf than the file holds: expected sum 0x" in problems["advise"]
    assert problems["lock"] == "12,288 bytes of the file became anonymous memory: pages were copied"
    assert problems["register"] == ""
    assert names(choose(result)) == ["registered (way D)", "staged"]
    assert names(choose(result, "registered")) == ["registered (way D)"]


def test_nothing_works(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(ways=("svm", "lock"), refuse={"svm": "no", "lock": "never"})
    result = probe(job(memory, file, monkeypatch))
    (staged,) = choose(result)
    assert staged.why == "no way of reading in place works (way A: device hip: no; way C: device hip: never)"
    assert names(choose(result, "registered")) == ["registered (way A)", "registered (way C)"]  # each says why
    (only,) = choose(probe(job(Memory(ways=()), file, monkeypatch), fresh=True))
    assert (only.strategy, only.why) == ("staged", "the runtime has no way of reading in place")


def test_one_way_alone(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Who names a way may have a reason not to try the others; the next start measures them all."""
    memory = Memory()
    result = probe(job(memory, file, monkeypatch), only="lock")
    assert [way.name for way in result.ways] == ["lock"]
    assert not any("svm" in line for line in memory.log)
    assert not probe(job(memory, file, monkeypatch)).cached


def test_direct_is_measured_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(ways=("register",), pageable=True, rates={"register": 100})
    found = choose(probe(job(memory, file, monkeypatch)))
    assert [(c.strategy, c.way) for c in found] == [("direct", None), ("staged", None), ("registered", "register")]


def test_what_was_asked_for() -> None:
    result = Probe(200, 1 << 28, 1, 0, (Way("svm", gb_per_s=199), Way("lock", gb_per_s=150, grain="fine")))
    assert choose(result, "staged") == [Candidate("staged", why="as asked")]
    assert choose(result, "direct") == [Candidate("direct", why="as asked")]
    why = "75% of device bandwidth, fine-grained"
    assert choose(result, "auto", "lock") == [Candidate("registered", "lock", why)]
    assert candidates("registered", "lock", None, ["lock"]) == [Candidate("registered", "lock", "as asked")]
    assert names(choose(result, "registered")) == ["registered (way A)", "registered (way C)"]


def test_short_slices_tell_only_the_slow_from_the_fast() -> None:
    ways = (Way("svm", gb_per_s=120), Way("lock", gb_per_s=60))
    assert names(candidates("auto", "auto", Probe(200, 1 << 30, 1, 0, ways), [])) == [
        "staged",
        "registered (way A)",
        "registered (way C)",
    ]


def test_a_result_is_kept(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    memory = Memory()
    first = probe(job(memory, file, monkeypatch))
    calls = len(memory.log)
    again = probe(job(memory, file, monkeypatch))
    assert len(memory.log) == calls
    assert again.cached and not first.cached and again.ways == first.ways
    other = job(memory, file, monkeypatch)
    other.device.props = type(other.device.props)(
        **{name: getattr(other.device.props, name) for name in other.device.props.__slots__} | {"driver_version": 8}
    )
    assert not probe(other).cached  # another driver
    assert not probe(job(memory, file, monkeypatch), fresh=True).cached
    assert probe(job(memory, file, monkeypatch), only="lock").cached
    assert sorted(path.name for path in cache.parent.iterdir()) == ["probe.json", "probe.lock"]
    Cache(module._key(other)).forget()
    assert not probe(other).cached


def test_one_process_measures_at_a_time(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The one that waits takes what the other found; its marks are not taken for a crash."""
    first, second = Memory(), Memory()
    key = module._key(job(first, file, monkeypatch))
    found: list[Probe] = []
    with Cache(key).alone(job(first, file, monkeypatch)), Cache(key).trying("svm"):
        other = threading.Thread(target=lambda: found.append(probe(work)))
        work = job(second, file, monkeypatch)
        other.start()
        other.join(0.2)
        assert other.is_alive() and not second.log
        Cache(key).write(Probe(200, 1, 0.1, 0, (Way("svm", gb_per_s=1),)))
    other.join(10)
    assert found[0].cached and not second.log


def test_less_memory_than_a_slice(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 1 << 16)
    memory = Memory(largest_allocation=SIZE // 2)
    assert probe(job(memory, file, monkeypatch)).device_gb_per_s == 200


@pytest.mark.parametrize("text", ["", "{", '{"results": {"k": 3}}', "[]"])
def test_a_damaged_cache(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert not probe(job(Memory(), file, monkeypatch)).cached
    assert probe(job(Memory(), file, monkeypatch)).cached


def test_a_cache_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file, not a folder")
    assert not probe(job(Memory(), file, monkeypatch)).cached


def test_a_way_that_took_the_process_with_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(ways=("svm", "lock"))
    work = job(memory, file, monkeypatch)
    key = module._key(work)
    with pytest.raises(KeyboardInterrupt), Cache(key).trying("lock"):
        raise KeyboardInterrupt
    assert Cache(key).lost() == {}  # an interruption is no loss
    trying = Cache(key).trying("svm")
    trying.__enter__()
    result = probe(work)
    assert result.ways[0].problem.startswith(f"the process did not survive trying it {time.strftime('%Y-')}")
    assert names(choose(result)) == ["registered (way C)", "staged"]
    assert not any("svm" in line for line in memory.log)


def test_five_seconds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", -1.0)
    result = probe(job(Memory(ways=("svm",)), file, monkeypatch))
    assert result.ways == (Way("svm", "not tried, -1 s were over"),)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_cancelled(file: Path, monkeypatch: pytest.MonkeyPatch, at: int, cache: Path) -> None:
    memory = Memory(ways=("svm",))
    work = job(memory, file, monkeypatch)
    goes_on = Job.goes_on
    count = 0

    def cancelling(self: Job, what: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            self.cancel.set()
        goes_on(self, what)

    monkeypatch.setattr(Job, "goes_on", cancelling)
    with pytest.raises(LoadCancelled):
        probe(work)
    assert not memory.regions and str(file) not in Path("/proc/self/maps").read_text()
    assert Cache(module._key(work)).lost() == {}


def test_slices_cover_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle and the end of the weights are verified beside the slice that is timed."""
    monkeypatch.setattr(module, "SLICE", 4 * PAGE)
    monkeypatch.setattr(module, "SMALL", PAGE)
    monkeypatch.setattr(module, "REGISTERED_BYTES", 32 * PAGE)
    path = tmp_path / "big.gguf"
    path.write_bytes(bytes(64 * PAGE))
    refs = [TensorRef(str(i), 0, (2, PAGE), 0, 8 * PAGE * i, 8 * PAGE) for i in range(8)]
    found = module._slices(Job(Memory().install(monkeypatch), [path], [64 * PAGE], refs))
    assert (found[0].first, found[0].nbytes) == (0, 4 * PAGE)
    assert [(item.first, item.last) for item in found[1:]] == [(47 * PAGE, 48 * PAGE), (63 * PAGE, 64 * PAGE)]


def test_the_file_system(tmp_path: Path) -> None:
    assert len(file_system(tmp_path).split()) >= 2
    assert file_system(Path("/proc/self/status")) == "proc proc"
    assert os.path.realpath("/dev/shm") != "/dev/shm" or file_system(Path("/dev/shm")).startswith("tmpfs ")


def test_titles() -> None:
    assert Way("svm").title == "way A" and Way("direct").title == "direct"
    listed: Any = [Way(name).title for name in ("advise", "lock", "register")]
    assert listed == ["way B", "way C", "way D"]
