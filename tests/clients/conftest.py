"""One stack of toys for the clients in all languages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from benchmarks.harness import TOYS
from deploy.local.stack import Stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    """A request for 4,000 tokens takes longer than any test waits."""
    async with Stack(environment=TOYS) as running:
        yield running
