"""SPARSE_ATTENTION in plans on a GPU, against float64: what test_sparse.py asks of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_sparse import ATTENDED, check_attention

from apu_engine._native import Device


@pytest.mark.parametrize("kv", [np.float32, np.float16])
@pytest.mark.parametrize(("tokens", "chosen", "position"), [case for case in ATTENDED if not case[1]])
def test_attention(gpu: Device, kv: Any, tokens: int, chosen: int, position: int) -> None:
    check_attention(gpu, kv, tokens, chosen, position, bound=6e-3 if kv is np.float16 else 2e-5)


def test_many_heads(gpu: Device) -> None:
    check_attention(gpu, np.float32, 4, 0, 500, heads=20, d=40)
