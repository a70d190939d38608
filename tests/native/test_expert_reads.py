"""How often EXPERTS reads an expert's weights in a step: once, however many rows chose it, by however many workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from shim import find_compiler

ROOT = Path(__file__).parents[2]
EXPERTS, USED, D, F = 32, 6, 512, 768  # of expert_reads.cpp


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("expert_reads") / "expert_reads"
    native = [ROOT / "native/cpu" / name for name in ("ops_experts.cpp", "matrix_product.cpp", "pool.cpp")]
    flags = ["-std=c++20", "-O0", f"-I{ROOT / 'native'}", f"-I{ROOT / 'native/include'}", "-pthread"]
    command = [find_compiler(), *flags, Path(__file__).with_name("expert_reads.cpp"), *native, "-o", out]
    subprocess.run([str(part) for part in command], check=True, timeout=100)
    return out


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
def test_an_expert_is_read_once_a_step(program: Path, rows: int, workers: int) -> None:
    draw = np.random.default_rng(rows)
    of_rows = [np.sort(draw.choice(EXPERTS, USED, replace=False)) for _ in range(rows)]
    for ids in (np.array(of_rows), np.tile(of_rows[0], (rows, 1))):
        text = " ".join(map(str, ids.ravel()))
        command = [str(program), str(rows), str(workers)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60)
        used = len(np.unique(ids))
        for line, matrix_rows in zip(done.stdout.splitlines(), (2 * F, D), strict=True):  # gate and up, down
            assert [int(number) for number in line.split()] == [used * matrix_rows, used * matrix_rows, 1]
