"""Every port: malformed messages, bugs, reflection, and limits of messages and metadata."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specrej.backend.v1 import reward_pb2
from specrej.backend.v1.reward_pb2_grpc import RewardServiceStub
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.serving import failure_of, reason_of, serving
from tests.specrej.fakes import FakeOrchestrator, FakeReward

BOUND_S = 20.0
LIMIT_BYTES = 4096
_GARBAGE = b"\xff" * 16
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture
async def channel(orchestrator: FakeOrchestrator) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(orchestrator.service(), reflection=True) as opened:
        yield opened


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        _REFLECTION,
        "/specrej.v1.OrchestratorService/Generate",
    ],
)
async def test_malformed_message_is_an_invalid_argument(
    channel: grpc.aio.Channel, method: str
) -> None:
    """Guards against UNKNOWN with the name of a class for a malformed message."""
    call: Any = channel.stream_stream(method)(timeout=BOUND_S)
    await call.write(_GARBAGE)
    await call.done_writing()
    error = await failure_of(call.read)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "INVALID_REQUEST"


async def test_a_bug_is_opaque_and_logged(
    channel: grpc.aio.Channel, orchestrator: FakeOrchestrator, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against prompts and paths in errors, and an error that no log line explains."""
    orchestrator.failures = [RuntimeError("secret")]
    stub: Any = OrchestratorServiceStub(channel)
    error = await failure_of(stub.Generate(orchestrator_pb2.GenerateRequest()))
    text = str(error.details())
    assert error.code() is grpc.StatusCode.INTERNAL and "secret" not in text
    assert text.removeprefix("internal error ") in caplog.text


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    """Guards its stream, which is wrapped for the sake of its statuses."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo([request, request])]
    for answer in answers:
        names = {service.name for service in answer.list_services_response.service}
        assert "specrej.v1.OrchestratorService" in names
    assert len(answers) == 2


@pytest.fixture
async def stub(reward: FakeReward) -> AsyncIterator[Any]:
    limits = {"max_message_bytes": LIMIT_BYTES, "max_metadata_bytes": LIMIT_BYTES}
    async with serving(reward.service(), **limits) as channel:
        yield RewardServiceStub(channel)


def message_of(size: int) -> reward_pb2.ScoreRequest:
    """A request of this number of bytes."""
    message = reward_pb2.ScoreRequest(responses=["x" * (size - 3)])
    assert message.ByteSize() == size
    return message


async def test_message_above_the_limit_is_refused(stub: Any, reward: FakeReward) -> None:
    """Guards against an inexact limit, and against an oversized message reaching a handler."""
    await stub.Score(message_of(LIMIT_BYTES), timeout=10)
    failure = await failure_of(stub.Score(message_of(LIMIT_BYTES + 1), timeout=10))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(reward.requests) == 1
    await stub.Score(message_of(LIMIT_BYTES), timeout=10)  # on the same connection


async def test_metadata_above_the_limit_is_refused(stub: Any, reward: FakeReward) -> None:
    """Guards against grpc's random refusals between two limits, and a broken connection."""
    request = message_of(256)
    # grpc's own metadata takes some hundred bytes.
    for _ in range(4):
        await stub.Score(request, timeout=10, metadata=[("x-large", "v" * (LIMIT_BYTES - 1024))])
    for _ in range(4):
        call = stub.Score(request, timeout=10, metadata=[("x-large", "v" * LIMIT_BYTES)])
        assert (await failure_of(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(reward.requests) == 4
    await stub.Score(request, timeout=10)
