"""A served fake model for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from server_fakes import Served, serving


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running
