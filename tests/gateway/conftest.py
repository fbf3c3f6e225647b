"""A fake orchestrator; all services as processes on toys with the gateway, and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from deploy.local.stack import Stack
from gateway.__main__ import Server
from tests.gateway.gateways import gateway_at
from tests.specrej.conftest import address, orchestrator

__all__ = ["address", "orchestrator"]  # fixtures


@pytest.fixture
async def gateway(address: str) -> AsyncIterator[Server]:
    async with gateway_at(address) as server:
        yield server


TOYS = {
    "SPECREJ_GENERATOR_MODEL": "toy:step_ms=5",
    "SPECREJ_REWARD_REWARDS": (
        '[{"name": "toy", "kind": "toy"}, {"name": "answer", "kind": "answer"}]'
    ),
    # The default of a quarter of a second is short on a busy machine.
    "SPECREJ_ORCHESTRATOR_CACHE_TIMEOUT_S": "2",
    "SPECREJ_GATEWAY_KEEP_ALIVE_S": "0.2",
}


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(environment=TOYS, gateway=True) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    """Without retries, which would hide errors."""
    url = f"{stack.gateway_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
