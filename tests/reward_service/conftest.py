"""A reward service over real gRPC on a free port, and a classifier on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej.backend.v1.reward_pb2_grpc import RewardServiceStub
from tests.reward_service.tiny import save
from tests.serving import serving

# Starts a service with rewards (none: still loading) and options; returns a stub of it.
Serve = Callable[..., Awaitable[Any]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def serve(*rewards: Reward, lease_s: float = 30) -> Any:
            workers = [await Worker.start(partial(lambda one: one, reward)) for reward in rewards]
            for worker in workers:
                stack.callback(worker.close)
            servicer = RewardServicer(8, lease_s)
            servicer.serve(workers)
            channel = await stack.enter_async_context(serving(servicer.service()))
            return RewardServiceStub(channel)

        yield serve


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and a head of one label."""
    return save(tmp_path_factory.mktemp("classifier"))
