"""One stack of toys for the clients in all languages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.local.stack import Stack

TOYS = {
    # A request for 4,000 tokens takes longer than any test waits.
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(environment=TOYS) as running:
        yield running
