"""One service for all tests of metrics and traces."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.telemetry.observed import Observed, observed


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def service() -> AsyncIterator[Observed]:
    async with observed() as running:
        yield running
