"""Rewards of other servers: each call waits on the event loop, by itself.

A slow server delays its own callers only, and waiting for it does not count for the heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Protocol, Self

from reward_service.reward import Described
from reward_service.scoring import RewardWorker, Score, WorkerSession, queue_full, worker_closed
from specrej.contracts import Candidate, Prompt, Scores
from specrej.contracts.errors import Overloaded, Unavailable
from specrej.server.serving import time_left_s
from specrej.telemetry import metrics, names

log = logging.getLogger(__name__)


class RemoteReward(Described, Protocol):
    """A reward that another server computes; called on the event loop, by any number at once."""

    max_batch: int  # candidates that the server takes at once

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[Score]:
        """A session there.

        Raises:
            InvalidRequest: the reward cannot take this prompt.
            Unavailable: the server cannot be reached.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class RemoteWorker(RewardWorker):
    """Serves a reward of another server; made by `start`, ended by `close`.

    At most `queue_limit` calls are under way. A call that is cancelled ends its request there.
    """

    def __init__(self, reward: RemoteReward, queue_limit: int) -> None:
        self._reward, self.max_batch = reward, reward.max_batch
        self._queue_limit = queue_limit
        self._num_calls = 0
        self._closed = False

    @classmethod
    async def start(
        cls, connect: Callable[[], Awaitable[RemoteReward]], queue_limit: int = 64
    ) -> Self:
        """A worker whose reward has scored once, unless its server is busy or not reached yet.

        Raises what `connect` raises, and RewardInvalid.
        """
        worker = cls(await connect(), queue_limit)
        try:
            await worker.warm_up()
        except (Unavailable, Overloaded) as error:
            log.warning("serving without it: %s", error.message)
        except BaseException:
            worker.close()
            await worker.join(0)
            raise
        return worker

    @property
    def reward(self) -> RemoteReward:
        return self._reward

    @asynccontextmanager
    async def open(self, prompt: Prompt, *, once: bool = False) -> AsyncIterator[WorkerSession]:
        async with AsyncExitStack() as stack:
            with self._counted():
                score = await stack.enter_async_context(self._reward.open(prompt))
            yield WorkerSession(self._reward.name, partial(self._score, score))

    def close(self) -> None:
        self._closed = True

    async def join(self, timeout_s: float) -> None:
        """Close the connections: calls have ended with their streams."""
        await self._reward.aclose()

    async def _score(self, score: Score, candidates: Sequence[Candidate]) -> Scores:
        with self._counted():
            return await score(candidates)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call under way. Raises Overloaded, Unavailable."""
        if self._closed:
            raise worker_closed()
        if self._num_calls >= self._queue_limit:
            raise queue_full(self._reward.name, self._queue_limit)
        self._num_calls += 1
        metrics.add(names.REWARD_QUEUED, 1, reward=self._reward.name)
        try:
            yield
        finally:
            self._num_calls -= 1
            metrics.add(names.REWARD_QUEUED, -1, reward=self._reward.name)


@asynccontextmanager
async def answering(name: str, timeout_s: float) -> AsyncIterator[float]:
    """Bound an exchange with a reward's server; yields the seconds that it may take.

    These are `timeout_s`, or less if the caller's deadline comes first.

    Raises:
        Unavailable: `timeout_s` seconds have passed.
    """
    left_s = time_left_s()
    try:
        async with asyncio.timeout(timeout_s) as bound:
            yield timeout_s if left_s is None else max(0.0, min(timeout_s, left_s))
    except TimeoutError:
        if not bound.expired():
            raise
        raise Unavailable(f"reward {name} did not answer within {timeout_s:g} s") from None
