"""Devices at every instruction-set level that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_cases import LEVELS, Level

from apu_engine._native import Device, UnsupportedError


@pytest.fixture(scope="session")
def levels() -> Iterator[tuple[Level, ...]]:
    """Every level this processor has, portable first."""
    opened = []
    for name in LEVELS:
        try:
            opened.append(Level(name, Device(isa=name, threads=2)))
        except UnsupportedError:
            continue
    assert opened[0].name == "portable"
    yield tuple(opened)
    for level in opened:
        level.device.close()
