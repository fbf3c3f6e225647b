"""Servers for clients to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import pytest

from specrej.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from specrej.v1.reward_pb2_grpc import add_RewardServiceServicer_to_server
from tests.specrej.fakes import FakeOrchestrator, FakeReward, serve


@pytest.fixture
def orchestrator() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
def reward() -> FakeReward:
    return FakeReward()


@pytest.fixture
async def address(orchestrator: FakeOrchestrator) -> AsyncIterator[str]:
    """Where `orchestrator` listens."""
    register = partial(add_OrchestratorServiceServicer_to_server, orchestrator)
    async with serve("specrej.v1.OrchestratorService", register) as bound:
        yield bound


@pytest.fixture
async def reward_address(reward: FakeReward) -> AsyncIterator[str]:
    """Where `reward` listens."""
    register = partial(add_RewardServiceServicer_to_server, reward)
    async with serve("specrej.v1.RewardService", register) as bound:
        yield bound
