"""Sizes in words, and what this process may use."""

from __future__ import annotations

from apu_engine.memory.budget import memory_available


def test_this_machine() -> None:
    assert memory_available() > 0
