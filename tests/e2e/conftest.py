"""The real stack: four processes on the embedded models, started once for all end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from specrej.stack import Stack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(environment={"SPECREJ_GENERATOR_KV_SLOTS": "40000"}) as running:
        yield running
