"""One stack of toys for all examples, with the rewards that they name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from deploy.local.stack import Stack
from specrej.client import Client

EXAMPLES = Path(__file__).parents[2] / "examples"
REWARDS = [
    {"name": "toy", "kind": "toy"},
    *json.loads((EXAMPLES / "coding/rewards.json").read_text()),
    {"name": "relevance", "kind": "toy"},
]
SETTINGS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=2",
    "SPECREJ_REWARD_REWARDS": json.dumps(REWARDS),
    # The default of a quarter of a second is short on a busy machine.
    "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
    # Small enough that the tests can overload it.
    "SPECREJ_ORCHESTRATOR_MAX_RUNNING": "2",
    "SPECREJ_ORCHESTRATOR_MAX_QUEUED": "1",
}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(environment=SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.orchestrator_address, timeout_s=60) as client:
        yield client
