"""Real gRPC servers on free loopback ports for the tests of all services; programs they need."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, Unpack

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.backend.v1 import generator_pb2, generator_pb2_grpc
from specrej.client.channel import open_channel
from specrej.contracts import GeneratorDescription, ServiceDescription, wire
from specrej.security import Credentials
from specrej.server.serving import Server, Service
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc

T = TypeVar("T")

_POLL_S = 2.0  # timeout of a health check
_DESCRIBE_S = 10.0  # of a description, whose failure raises


@asynccontextmanager
async def listening(
    service: Service,
    *,
    default_deadline_s: float | None = None,
    max_deadline_s: float | None = None,
    **settings: Any,
) -> AsyncIterator[str]:
    """The address of a server of one service."""
    server = Server(
        ServiceSettings(**settings),
        [service],
        default_deadline_s=default_deadline_s,
        max_deadline_s=max_deadline_s,
    )
    await server.start()
    server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def serving(service: Service, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel, without retries, to a server of one service."""
    async with listening(service, **settings) as address, open_channel(address) as channel:
        yield channel


async def failure_of(call: Awaitable[Any] | Callable[[], Awaitable[Any]]) -> grpc.aio.AioRpcError:
    """The error a call ends with; an AssertionError if it succeeds."""
    try:
        await (call() if callable(call) else call)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def violations_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Field paths and descriptions of an INVALID_ARGUMENT."""
    bad = error_details_pb2.BadRequest()
    for detail in _details(error):
        detail.Unpack(bad)
    return {violation.field: violation.description for violation in bad.field_violations}


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of the error's one ErrorInfo."""
    info = error_details_pb2.ErrorInfo()
    assert sum(detail.Unpack(info) for detail in _details(error)) == 1
    return str(info.reason)


def retry_info_s(error: grpc.aio.AioRpcError) -> float | None:
    """The delay of the error's RetryInfo in seconds; None without one."""
    info = error_details_pb2.RetryInfo()
    has_info = any(detail.Unpack(info) for detail in _details(error))
    return info.retry_delay.ToMilliseconds() / 1000 if has_info else None


async def health_of(address: str, service: str = "", **credentials: Unpack[Credentials]) -> str:
    """SERVING, NOT_SERVING or the status code of the failed check."""
    async with open_channel(address, **credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = await stub.Check(request, timeout=_POLL_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def describe_generator(address: str) -> GeneratorDescription:
    """The description of a generator; raises AioRpcError."""
    async with open_channel(address) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        request = generator_pb2.GeneratorServiceDescribeRequest()
        reply = await stub.Describe(request, timeout=_DESCRIBE_S)
        return wire.from_message(reply.generator, GeneratorDescription)


async def describe_service(address: str) -> ServiceDescription:
    """The orchestrator's description of all services; raises AioRpcError."""
    async with open_channel(address) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        request = orchestrator_pb2.OrchestratorServiceDescribeRequest()
        reply = await stub.Describe(request, timeout=_DESCRIBE_S)
        return wire.from_message(reply, ServiceDescription)


async def until(condition: Callable[[], object], bound_s: float = 60, every_s: float = 0) -> None:
    """Return once the condition holds; raise TimeoutError after `bound_s` seconds.

    It is checked every `every_s` seconds. 0: at each of the event loop's next 100 turns, then every
    2 ms, so that a wait for other threads and processes leaves them the processor.
    """
    async with asyncio.timeout(bound_s):
        for turn in itertools.count():
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(every_s or (0 if turn < 100 else 0.002))


async def until_read(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object], **bounds: float
) -> None:
    """`until`, of what is read."""

    async def does_hold() -> object:
        return holds(await read())

    await until(does_hold, **bounds)


async def until_slots_are_free(generator_address: str, bound_s: float = 60) -> None:
    """Return once no session has slots of the generator; raise TimeoutError after `bound_s`."""

    async def are_free() -> bool:
        return (await describe_generator(generator_address)).slots.owned == 0

    await until(are_free, bound_s, every_s=0.05)


async def turns(count: int = 20) -> None:
    """Let every task that can continue do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def need(path: str | Path | None, name: str) -> Path:
    """The path of a program or file of another project; CI fails without it."""
    if path and Path(path).exists():
        return Path(path)
    if os.environ.get("CI"):
        pytest.fail(f"{name} is not installed")
    pytest.skip(f"{name} is not installed")


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return list(status_pb2.Status.FromString(value).details)
    return []


def varint(number: int) -> bytes:
    """A number as protobuf encodes it."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def part(number: int, value: bytes) -> bytes:
    """A length-delimited field of a message."""
    return varint(number << 3 | 2) + varint(len(value)) + value
