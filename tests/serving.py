"""Real gRPC servers on free loopback ports for the tests of all services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from specrej.channel import open_channel
from specrej.serving import Server, Service
from specrej.settings import ServiceSettings


@asynccontextmanager
async def listening(
    service: Service, *, default_deadline_s: float | None = None
) -> AsyncIterator[str]:
    """The address of a server of one service."""
    server = Server(ServiceSettings(), [service], default_deadline_s=default_deadline_s)
    await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def serving(
    service: Service, *, default_deadline_s: float | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel, without retries, to a server of one service."""
    async with (
        listening(service, default_deadline_s=default_deadline_s) as address,
        open_channel(address, retries=False) as channel,
    ):
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


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; TimeoutError after 10 seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0)


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return list(status_pb2.Status.FromString(value).details)
    return []
