"""Calls beyond the limit, compressed messages, and the health service."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej import telemetry
from specrej.client.channel import open_channel
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.serving import failure_of, listening, retry_info_s
from tests.specrej.fakes import FakeOrchestrator

Code = grpc.StatusCode
BOUND_S = 20.0
CHECK = "/grpc.health.v1.Health/Check"
GENERATE = "/specrej.v1.OrchestratorService/Generate"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reasons of refused calls, as they are counted."""
    reasons: list[str] = []
    add = telemetry.metrics.add

    def count(metric: telemetry.names.Metric, number: float = 1, **labels: Any) -> None:
        reasons.extend([labels["reason"]] if metric is telemetry.names.RPC_REFUSED else [])
        add(metric, number, **labels)

    monkeypatch.setattr(telemetry.metrics, "add", count)
    return reasons


async def probe(channel: grpc.aio.Channel) -> None:
    """A health check; raises unless it is answered."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)


async def test_calls_beyond_the_limit_are_refused(
    orchestrator: FakeOrchestrator, refused: list[str]
) -> None:
    """Guards against running calls without a bound, and a limit that never ends."""
    orchestrator.hangs = True
    async with (
        listening(orchestrator.service(), max_calls=1) as address,
        open_channel(address) as first,
        open_channel(f"localhost:{address.rpartition(':')[2]}") as second,
    ):
        one: Any = OrchestratorServiceStub(first)
        other: Any = OrchestratorServiceStub(second)
        request = orchestrator_pb2.GenerateRequest()
        running = asyncio.ensure_future(one.Generate(request, timeout=BOUND_S))
        await asyncio.wait_for(orchestrator.received.wait(), BOUND_S)
        error = await failure_of(other.Generate(request, timeout=BOUND_S))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert retry_info_s(error) == 1.0
        assert refused == ["calls"]
        await probe(second)
        orchestrator.released.set()
        await running
        await other.Generate(request, timeout=BOUND_S)


@pytest.mark.parametrize("method", [CHECK, GENERATE])
async def test_compressed_messages_are_refused(method: str, channel: grpc.aio.Channel) -> None:
    """Guards against a message that takes a thousand times its size once it is decompressed."""
    send: Any = channel.unary_unary(method)
    compressed = send(bytes(2**20), timeout=BOUND_S, compression=grpc.Compression.Gzip)
    error = await failure_of(compressed)
    assert error.code() is Code.UNIMPLEMENTED
    await send(b"", timeout=BOUND_S)  # on the same connection


async def test_health_finds_services(channel: grpc.aio.Channel) -> None:
    """Guards the own health service against differences from the protocol."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    unknown = health_pb2.HealthCheckRequest(service="other")
    assert (await failure_of(stub.Check(unknown))).code() is Code.NOT_FOUND
    watch = stub.Watch(unknown)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
