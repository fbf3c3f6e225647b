"""The real stack: five processes on the embedded models, started once for all end-to-end tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest_asyncio

from deploy.local.stack import Stack
from tests.telemetry.observed import Observed, observed


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def service() -> AsyncIterator[Observed]:
    environment = {
        "SPECREJ_GENERATOR_KV_SLOTS": "40000",
        # The embedded one is a second generator to load: tests/reward_service/test_classifier.py.
        "SPECREJ_REWARD_REWARDS": json.dumps(
            [
                {"name": "relevance", "kind": "relevance", "directory": ".models/relevance"},
                {"name": "harmless", "kind": "toy"},
            ]
        ),
        # Of the documented name, with fewer candidates.
        "SPECREJ_GATEWAY_PRESETS": json.dumps({"sr-32": {"n": 8}}),
    }
    async with observed(environment, on_toys=False, gateway=True) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(service: Observed) -> Stack:
    return service.stack
