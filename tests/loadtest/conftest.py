"""All services as real processes with toy models, shared by all load tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.local.stack import Stack

TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
    "SPECREJ_REWARD_REWARDS": '[{"name": "toy", "kind": "toy"}]',
    # The default of a quarter of a second is short on a busy machine.
    "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def toys() -> AsyncIterator[Stack]:
    async with Stack(environment=TOYS) as running:
        yield running
