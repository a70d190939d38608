"""Ops without GPU kernels are refused by name when a plan is made: latent attention, routers with a bias or groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import running
from rig import NONE, Plan, Rig

from apu_engine._native import Device, UnsupportedError, lib
from models import tiny_deepseek2_gguf


def test_latent_attention_is_refused(gpu: Device, tmp_path: Path) -> None:
    tiny = tiny_deepseek2_gguf(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=r"LATENT_STORE.*layer 0.*--device cpu"), running(tiny.path, gpu):
        pass


@pytest.mark.parametrize("biased", [False, True])
def test_routers_with_a_bias_or_groups_are_refused(gpu: Device, biased: bool) -> None:
    rig = Rig(rows=4)
    ids, weights = rig.scratch("ids", 2, dtype=lib.APU_I32), rig.scratch("weights", 2)
    x = rig.input(np.ones((64, 32), np.float32))
    bias = rig.weight("bias", np.ones(8, np.float32)) if biased else NONE
    matrices = (NONE, rig.weight("router", np.ones((8, 32), np.float32)), bias)
    ints = (0, 1) if biased else (0, 1, 4, 2)
    rig.op(lib.APU_OP_ROUTE, ins=(x,), outs=(ids, weights), weights=matrices, ints=ints, floats=(1e-5, 1.0))
    with pytest.raises(UnsupportedError, match=r"ROUTE.*bias or groups.*--device cpu"):
        Plan(rig, gpu)
