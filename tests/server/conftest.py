"""A served fake model for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from server_fakes import Served, serving

from apu_engine.server import app


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals before the body end their connection at once."""
    monkeypatch.setattr(app, "LINGER_SECONDS", 0.05)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running
