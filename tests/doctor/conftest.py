"""The environment of whoever runs the tests says nothing about the machines that are examined."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APU_HIP_LIBRARY", "APU_MODEL", "APU_DEVICE", "HSA_OVERRIDE_GFX_VERSION", "HSA_USE_SVM"):
        monkeypatch.delenv(name, raising=False)
