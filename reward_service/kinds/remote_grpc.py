"""A reward of another reward service, such as one on a machine with a GPU.

Sessions remain sessions there, so that what it keeps of a prompt's texts is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio

from reward_service.kinds.remote import answering
from reward_service.scoring import Score
from reward_service.specs import GRPCSpec
from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1 import reward_pb2_grpc
from specrej.client.channel import open_channel
from specrej.contracts import Candidate, Prompt, RewardDescription, Scores, wire
from specrej.contracts.errors import NotFound, Unavailable
from specrej.contracts.validation import MAX_BATCH
from specrej.remote import RemoteRewards

_POLL_S = 0.2  # between two calls to a service that loads its rewards


class GRPCReward:
    """Scores by a reward of the service at the spec's address; made by `connect`."""

    def __init__(
        self, spec: GRPCSpec, channel: grpc.aio.Channel, described: RewardDescription
    ) -> None:
        self.name = spec.name
        self.fingerprint = described.fingerprint
        self.description = described.description
        self.max_batch = described.max_batch or MAX_BATCH
        self._timeout_s = spec.timeout_s
        self._channel = channel
        self._scorer = partial(RemoteRewards(channel).open, described.name)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[Score]:
        async with AsyncExitStack() as stack:
            async with answering(self.name, self._timeout_s):
                try:
                    session = await stack.enter_async_context(self._scorer(prompt))
                except NotFound as error:  # it existed when this service started
                    raise Unavailable(f"reward {self.name} is gone") from error
            # The other service may serve other weights by now, and cached answers are keyed by
            # this.
            self.fingerprint = session.fingerprint

            async def score(candidates: Sequence[Candidate]) -> Scores:
                async with answering(self.name, self._timeout_s):
                    return await session.score(candidates)

            yield score

    async def aclose(self) -> None:
        await self._channel.close()


async def connect(spec: GRPCSpec) -> GRPCReward:
    """The reward, as its service describes it.

    Raises:
        ValueError: there is no such reward, or the credentials cannot be used.
        OSError: a file of theirs cannot be read.
        RuntimeError: the service does not answer within `timeout_s`.
    """
    channel = open_channel(spec.address, retries=False, **spec.credentials)
    try:
        return GRPCReward(spec, channel, await _described(spec, channel))
    except BaseException:
        await channel.close()
        raise


async def _described(spec: GRPCSpec, channel: grpc.aio.Channel) -> RewardDescription:
    stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
    ends = time.monotonic() + spec.timeout_s
    while True:
        try:
            answer = await stub.Describe(
                pb.RewardServiceDescribeRequest(),
                timeout=ends - time.monotonic(),
                wait_for_ready=True,
            )
            break
        except grpc.aio.AioRpcError as failure:
            # A service that loads its rewards is unavailable.
            is_loading = failure.code() is grpc.StatusCode.UNAVAILABLE
            if not is_loading or time.monotonic() + _POLL_S >= ends:
                code = failure.code().name
                raise RuntimeError(f"reward {spec.name}: {spec.address}: {code}") from None
        await asyncio.sleep(_POLL_S)
    rewards = [wire.from_message(reward, RewardDescription) for reward in answer.rewards]
    served = {reward.name: reward for reward in rewards}
    described = served.get(spec.reward) if spec.reward else next(iter(rewards), None)
    if described is None:
        raise ValueError(f"reward {spec.name}: {spec.address} serves {', '.join(served)}")
    return described
