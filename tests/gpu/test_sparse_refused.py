"""Ops without GPU kernels are refused by name when a plan is made: streams, compressed rows, limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import running
from rig import NONE, Plan, Rig

from apu_engine._native import Device, UnsupportedError, lib
from models import tiny_deepseek4_gguf


def test_deepseek4_is_refused(gpu: Device, tmp_path: Path) -> None:
    tiny = tiny_deepseek4_gguf(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedError, match=r"EMBED.*several copies.*--device cpu"), running(tiny.path, gpu):
        pass


def test_streams_are_refused(gpu: Device) -> None:
    rig = Rig(rows=4)
    x, out = rig.input(np.ones((64, 64), np.float32)), rig.scratch("out", 32)
    weights = [rig.weight(name, np.ones(shape, np.float32)) for name, shape in (("w", (2, 64)), ("s", 1), ("o", 2))]
    rig.op(lib.APU_OP_STREAMS_IN, ins=(x,), outs=(out,), weights=weights, ints=(2,))
    with pytest.raises(UnsupportedError, match=r"STREAMS_IN.*--device cpu"):
        Plan(rig, gpu)


def test_limits_are_refused(gpu: Device) -> None:
    rig = Rig(rows=4)
    x, out = rig.input(np.ones((64, 32), np.float32)), rig.scratch("out", 8)
    gate, up = (rig.weight(name, np.ones((8, 32), np.float32)) for name in ("gate", "up"))
    weights, ints = (NONE, gate, up), (lib.APU_ACT_SILU,)
    rig.op(lib.APU_OP_MATMUL, ins=(x,), outs=(out,), weights=weights, ints=ints, floats=(0.0, 0.0, 10.0))
    with pytest.raises(UnsupportedError, match=r"MATMUL.*a limit.*--device cpu"):
        Plan(rig, gpu)
