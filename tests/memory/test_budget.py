"""Sizes in words, and what this process may use."""

from __future__ import annotations

import pytest

from apu_engine.memory.budget import human_bytes, memory_available


def test_this_machine() -> None:
    assert memory_available() > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (98_362_432, "98.4 MB"),
        (184_000_000, "184 MB"),
        (999_499_999, "999 MB"),
        (999_600_000, "1 GB"),
        (86_720_000_000, "86.7 GB"),
        (1_234_567_890_123, "1.23 TB"),
        (-8_388_608, "-8.39 MB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
