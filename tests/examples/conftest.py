"""A client of the stack of toys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from deploy.local.stack import Stack
from specrej.client import Client

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(toys: Stack) -> AsyncIterator[Client]:
    async with Client(toys.orchestrator_address, timeout_s=60) as client:
        yield client
