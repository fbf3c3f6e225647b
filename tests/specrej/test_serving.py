"""What every port answers to whoever calls: strangers' bytes, and connections that grow old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specrej import serving
from specrej.channel import open_channel
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)
from tests.serving import failure_of, reason_of
from tests.specrej.fakes import EVENTS, FakeOrchestrator, serve

BOUND_S = 20.0
_GARBAGE = b"\xff" * 16
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def _serve(
    orchestrator: FakeOrchestrator, *, retries: bool = False, **changes: Any
) -> AsyncIterator[grpc.aio.Channel]:
    register = partial(add_OrchestratorServiceServicer_to_server, orchestrator)
    async with (
        serve("specrej.v1.OrchestratorService", register, **changes) as address,
        open_channel(address, retries=retries) as channel,
    ):
        yield channel


@pytest.fixture
async def channel(orchestrator: FakeOrchestrator) -> AsyncIterator[grpc.aio.Channel]:
    async for opened in _serve(orchestrator, reflection=True):
        yield opened


@pytest.fixture
async def aging(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[grpc.aio.Channel]:
    """Its connections end after a tenth of a second."""
    monkeypatch.setattr(serving, "_CONNECTION_AGE_MS", 100)
    async for opened in _serve(orchestrator, retries=True):
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
async def test_what_cannot_be_decoded_is_its_senders_fault(
    channel: grpc.aio.Channel, method: str
) -> None:
    """Guards against UNKNOWN and the name of a class, for whoever sends sixteen bytes."""
    call: Any = channel.stream_stream(method)(timeout=BOUND_S)
    await call.write(_GARBAGE)
    await call.done_writing()
    error = await failure_of(call.read)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "INVALID_REQUEST"


async def test_reflection_tells_what_is_served(channel: grpc.aio.Channel) -> None:
    """Guards its stream, which is wrapped for the sake of its statuses."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    told = [answer async for answer in stub.ServerReflectionInfo([request, request])]
    for answer in told:
        names = {service.name for service in answer.list_services_response.service}
        assert "specrej.v1.OrchestratorService" in names
    assert len(told) == 2


async def test_a_connection_ends_by_age_and_no_call_with_it(
    aging: grpc.aio.Channel, orchestrator: FakeOrchestrator
) -> None:
    """Guards clients that never look up who else there is, and calls that span two connections.

    One that begins just then may be UNAVAILABLE, which the published policy retries.
    """
    stub: Any = OrchestratorServiceStub(aging)
    orchestrator.hangs = True
    stream = stub.GenerateStream(orchestrator_pb2.GenerateStreamRequest(), timeout=BOUND_S)
    events = aiter(stream)
    await anext(events)
    async with asyncio.timeout(BOUND_S):
        while len(orchestrator.peers) < 4:
            await stub.Describe(orchestrator_pb2.OrchestratorServiceDescribeRequest())
    orchestrator.released.set()
    assert len([event async for event in events]) == len(EVENTS)
