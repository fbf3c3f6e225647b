"""Calls without a message, too many calls, unread replies, compressed and large messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej import telemetry
from specrej.client.channel import open_channel
from specrej.server import health, interceptor
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests import http2
from tests.serving import failure_of, listening, part, reason_of, retry_info_s, serving
from tests.specrej.fakes import FakeOrchestrator

Code = grpc.StatusCode
BOUND_S = 20.0
_LIST_SERVICES = b"\x3a\x01*"  # a request of reflection
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GENERATE = "/specrej.v1.OrchestratorService/Generate"
STREAM = "/specrej.v1.OrchestratorService/GenerateStream"


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


@pytest.fixture
async def channel(orchestrator: FakeOrchestrator) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(orchestrator.service()) as opened:
        yield opened


async def probe(channel: grpc.aio.Channel) -> None:
    """A health check; raises unless it is answered."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)


@asynccontextmanager
async def unread(address: str, method: str, data: bytes = b"") -> AsyncIterator[None]:
    """A connection with three calls whose replies are not read, until the server shuts it."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    calls = [http2.unary(stream, method, data) for stream in (1, 3, 5)]
    writer.write(http2.PREFACE + http2.window(0) + b"".join(calls))
    yield
    async with asyncio.timeout(BOUND_S):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await http2.read_frame(reader)
    writer.close()


def begun(channel: grpc.aio.Channel, method: str) -> Any:
    """A call of which only the headers are sent."""
    return channel.stream_stream(method)(timeout=BOUND_S)


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION, GENERATE, STREAM])
async def test_a_call_without_a_message_ends(
    method: str,
    orchestrator: FakeOrchestrator,
    monkeypatch: pytest.MonkeyPatch,
    refused: list[str],
) -> None:
    """Guards against calls that cost nothing to hold: grpc itself waits for ever."""
    monkeypatch.setattr(interceptor, "_MESSAGE_S", 0.05)
    monkeypatch.setattr(interceptor, "_PROBE_MESSAGE_S", 0.05)
    async with serving(orchestrator.service()) as channel:
        error = await failure_of(begun(channel, method).read)
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert reason_of(error) == "DEADLINE_EXCEEDED"
    assert refused == ["no_message"]


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


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION, GENERATE])
async def test_a_client_that_does_not_read_loses_its_connection(
    method: str,
    orchestrator: FakeOrchestrator,
    monkeypatch: pytest.MonkeyPatch,
    refused: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards against streams that grpc holds for ever, until it refuses the calls of all."""
    for bound in ("_REPLY_S", "_STATUS_S", "_LATE_STATUS_S"):
        monkeypatch.setattr(interceptor, bound, 0.05)
    monkeypatch.setattr(interceptor, "_PROBE_REPLY_S", 5.0)  # of the last probe too
    monkeypatch.setattr(health, "_WRITE_S", 0.05)
    data = _LIST_SERVICES if method == REFLECTION else b""
    async with listening(orchestrator.service()) as address:
        async with unread(address, method, data):
            pass
        async with open_channel(address) as channel:
            await probe(channel)
    assert "connection" in refused
    assert not caplog.messages


async def test_watches_are_bounded_in_number_and_time(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against watches without a bound, which need no token."""
    monkeypatch.setattr(interceptor, "_MAX_PROBES", 1)
    monkeypatch.setattr(interceptor, "_PROBE_S", 0.05)
    async with serving(orchestrator.service()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()

        async def states() -> list[Any]:
            return [reply async for reply in stub.Watch(request)]

        assert (await failure_of(states)).code() is Code.DEADLINE_EXCEEDED
        monkeypatch.setattr(interceptor, "_PROBE_S", BOUND_S)
        first = stub.Watch(request)
        assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
        second = await failure_of(stub.Watch(request).read)
        assert second.code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", [CHECK, GENERATE])
async def test_compressed_messages_are_refused(method: str, channel: grpc.aio.Channel) -> None:
    """Guards against a message that takes a thousand times its size once it is decompressed."""
    send: Any = channel.unary_unary(method)
    compressed = send(bytes(2**20), timeout=BOUND_S, compression=grpc.Compression.Gzip)
    error = await failure_of(compressed)
    assert error.code() is Code.UNIMPLEMENTED
    await send(b"", timeout=BOUND_S)  # on the same connection


@pytest.mark.parametrize("method", [CHECK, WATCH, REFLECTION])
async def test_large_messages_of_probes_are_refused(method: str, channel: grpc.aio.Channel) -> None:
    """Guards against parsing, for callers without a token, what no probe sends."""
    for size, code in ((4096, None), (4097, Code.INVALID_ARGUMENT)):
        call = begun(channel, method)
        await call.write(part(1000, bytes(size - 4)))  # an unknown field
        await call.done_writing()
        if code:
            assert (await failure_of(call.read)).code() is code
        else:
            assert await call.read()


async def test_health_lists_and_finds_services(channel: grpc.aio.Channel) -> None:
    """Guards the own health service against differences from the protocol."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    statuses = (await stub.List(health_pb2.HealthListRequest())).statuses  # type: ignore[attr-defined]
    serving = health_pb2.HealthCheckResponse.SERVING
    ours = {"", "specrej.v1.OrchestratorService"}
    assert {name for name, state in statuses.items() if state.status == serving} == ours
    unknown = health_pb2.HealthCheckRequest(service="other")
    assert (await failure_of(stub.Check(unknown))).code() is Code.NOT_FOUND
    watch = stub.Watch(unknown)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
