"""A reward service over real gRPC on a free port, and the embedded MiniLM on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import pytest

from reward_service import embedded
from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej.channel import open_channel
from specrej.serving import Server
from specrej.settings import ServiceSettings


class Serve(Protocol):
    """Starts a service with these rewards (none: still loading) and connects to it."""

    async def __call__(self, *rewards: Reward, **options: Any) -> grpc.aio.Channel: ...


class Start(Protocol):
    """As `Serve`, but returns the address."""

    async def __call__(
        self,
        *rewards: Reward,
        max_batch: int = 8,
        lease_s: float = 30,
        queue_limit: int = 4,
        deadline_s: float | None = None,
    ) -> str: ...


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start(
            *rewards: Reward,
            max_batch: int = 8,
            lease_s: float = 30,
            queue_limit: int = 4,
            deadline_s: float | None = None,
        ) -> str:
            workers = [await Worker.start(partial(_same, r), queue_limit) for r in rewards]
            for worker in workers:
                stack.callback(worker.close)
            servicer = RewardServicer(max_batch, lease_s)
            servicer.serve(workers)
            server = Server(ServiceSettings(), [servicer.service()], default_deadline_s=deadline_s)
            await server.start()
            stack.push_async_callback(server.stop, 0)
            await server.set_serving(bool(rewards))
            return f"127.0.0.1:{server.port}"

        yield start


@pytest.fixture
async def serve(start: Start) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def serve(*rewards: Reward, **options: Any) -> grpc.aio.Channel:
            channel = open_channel(await start(*rewards, **options), retries=False)
            return await stack.enter_async_context(channel)

        yield serve


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all-MiniLM-L6-v2."""
    directory = tmp_path_factory.mktemp("models") / "relevance"
    embedded.place(directory)
    return directory


def _same(reward: Reward) -> Reward:
    return reward
