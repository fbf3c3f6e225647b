"""One world for all cases: what a case leaves behind fails it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.faults.world import World, world


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running() -> AsyncIterator[World]:
    async with world() as one:
        yield one
