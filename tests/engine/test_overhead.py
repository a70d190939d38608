"""What a step costs beside its ops' work, as ratios of best times: a machine that is busy meanwhile does not matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from apu_engine import arch
from apu_engine._native import Device
from apu_engine.memory.strategies import Job, open_weights
from apu_engine.weights.opening import open_model
from models import tiny_llama_gguf


def best_times(path: Path, threads: int, steps: int = 150) -> NDArray[np.uint64]:
    """(ops) nanoseconds of each op, the best of many decode steps."""
    model = open_model(path)
    options = arch.PlanOptions(ctx=128, max_rows=1, max_sequences=1)
    with Device("cpu", threads=threads) as device:
        weights = open_weights(Job(device, model.files, model.file_sizes, arch.tensors_used(model, options)), "direct")
        loaded = arch.load(model, weights, device, options)
        try:
            plan = loaded.plan
            plan.profile(True)
            times = []
            for _ in range(steps):
                step = plan.new_step()
                step.add_output(step.add_sequence([5], 100, [[0]]))
                plan.submit(step, 0, plan.slices["sample"][1]).wait()
                times.append(plan.profile(True))
            best: NDArray[np.uint64] = np.min(times, axis=0)
            return best
        finally:
            loaded.close()
            weights.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """76 ops of one to four microseconds: enough work for two workers, too little to hide a slow barrier."""
    path = tmp_path_factory.mktemp("overhead") / "small.gguf"
    tiny_llama_gguf(path, layers=12, D=256, H=8, K=4, F=256, quant="Q8_0")
    return path


@pytest.mark.alone
def test_barriers_cost_less_than_small_ops(small: Path) -> None:
    """Sleeping at every barrier instead of spinning would make steps some seven times slower."""
    one, two = best_times(small, 1), best_times(small, 2)
    assert two.sum() < 3 * one.sum()


@pytest.mark.alone
def test_near_empty_ops_stay_on_one_worker(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny_llama_gguf(path, layers=12)
    one, two = best_times(path, 1), best_times(path, 2)
    assert two.sum() < 2 * one.sum()
