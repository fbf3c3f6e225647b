"""How much a peer may send: exactly as much as the settings say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from specrej.channel import open_channel
from specrej.v1 import reward_pb2
from specrej.v1.reward_pb2_grpc import RewardServiceStub, add_RewardServiceServicer_to_server
from tests.serving import failure_of
from tests.specrej.fakes import FakeReward, serve

MESSAGE_BYTES = 4096
METADATA_BYTES = 4096


@pytest.fixture
async def stub(reward: FakeReward) -> AsyncIterator[Any]:
    register = partial(add_RewardServiceServicer_to_server, reward)
    limits = {"max_message_bytes": MESSAGE_BYTES, "max_metadata_bytes": METADATA_BYTES}
    async with (
        serve("specrej.v1.RewardService", register, **limits) as address,
        open_channel(address, retries=False) as channel,
    ):
        yield RewardServiceStub(channel)


def message_of(size: int) -> reward_pb2.ScoreRequest:
    """A request of exactly so many bytes."""
    message = reward_pb2.ScoreRequest(responses=["x" * (size - 3)])
    assert message.ByteSize() == size
    return message


async def test_a_message_of_the_limit_is_taken_and_one_byte_more_is_not(
    stub: Any, reward: FakeReward
) -> None:
    """Guards against a limit that is off, and against an oversized message reaching a handler."""
    await stub.Score(message_of(MESSAGE_BYTES), timeout=10)
    failure = await failure_of(stub.Score(message_of(MESSAGE_BYTES + 1), timeout=10))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(reward.requests) == 1
    await stub.Score(message_of(MESSAGE_BYTES), timeout=10)  # the connection lives


async def test_metadata_up_to_the_limit_is_taken_and_more_is_not(
    stub: Any, reward: FakeReward
) -> None:
    """Guards against grpc's refusing at random between two limits, and a broken connection."""
    request = message_of(256)
    # grpc's own metadata takes some hundred bytes.
    for _ in range(4):
        await stub.Score(request, timeout=10, metadata=[("x-large", "v" * (METADATA_BYTES - 1024))])
    for _ in range(4):
        call = stub.Score(request, timeout=10, metadata=[("x-large", "v" * METADATA_BYTES)])
        assert (await failure_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(reward.requests) == 4
    await stub.Score(request, timeout=10)
