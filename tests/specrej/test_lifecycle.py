"""A server's life as its balancer sees it: alive, ready, draining."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.channel import open_channel
from specrej.serving import LIVENESS, Server, _kind
from specrej.settings import ServiceSettings

BOUND_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, name: str = "") -> int | None:
    """None: it does not answer, or knows no such name."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=2)
    except grpc.aio.AioRpcError:
        return None
    status: int = answer.status
    return status


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not await condition():  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    server: Server, loaded: asyncio.Event | None = None
) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    async def warm_up() -> None:
        if loaded:
            await loaded.wait()

    task = asyncio.create_task(server.run(warm_up))

    async def listens() -> bool:
        return server.port != 0

    await until(listens)
    async with open_channel(f"127.0.0.1:{server.port}", retries=False) as channel:
        try:
            yield task, channel
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(task, BOUND_S)


async def test_health_follows_the_heartbeat() -> None:
    """Guards against a process that answers while its engine hangs, and is never restarted."""
    age_s = [0.0]
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server) as (_, channel):

        async def is_ready() -> bool:
            return await health(channel) == SERVING == await health(channel, LIVENESS)

        async def is_stuck() -> bool:
            return await health(channel) == NOT_SERVING == await health(channel, LIVENESS)

        await until(is_ready)
        age_s[0] = 1e9
        await until(is_stuck)
        age_s[0] = 0.0
        await until(is_ready)


async def test_a_heart_that_has_stopped_for_ever_ends_the_process() -> None:
    """Guards against a service whose engine is gone, and that nobody starts again."""
    age_s = [0.0]
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server) as (task, _):
        age_s[0] = math.inf
        with pytest.raises(RuntimeError, match="a thread has ended"):
            await asyncio.wait_for(task, BOUND_S)


async def test_who_recovers_while_loading_is_not_ready() -> None:
    """Guards the first of several models, stuck for a while, from saying that all are loaded."""
    age_s, loaded = [1e9], asyncio.Event()
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server, loaded) as (_, channel):

        async def is_stuck() -> bool:
            return await health(channel, LIVENESS) == NOT_SERVING

        async def is_alive() -> bool:
            return await health(channel, LIVENESS) == SERVING

        async def is_ready() -> bool:
            return await health(channel) == SERVING

        await until(is_stuck)
        age_s[0] = 0.0
        await until(is_alive)
        assert await health(channel) == NOT_SERVING
        loaded.set()
        await until(is_ready)


async def test_a_server_that_is_loading_is_alive_but_not_ready() -> None:
    """Guards a slow start against a liveness probe that kills it again and again."""
    server = Server(ServiceSettings(), [])
    loaded = asyncio.Event()
    task = asyncio.create_task(server.run(lambda: loaded.wait()))  # type: ignore[arg-type,return-value]

    async def listens() -> bool:
        return server.port != 0

    await until(listens)
    async with open_channel(f"127.0.0.1:{server.port}", retries=False) as channel:

        async def is_alive() -> bool:
            return await health(channel, LIVENESS) == SERVING

        await until(is_alive)
        assert await health(channel) == NOT_SERVING
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, BOUND_S)


async def test_a_drain_tells_balancers_first_and_a_second_signal_ends_it() -> None:
    """Guards requests that are still being sent here: refused before health said so, they fail."""
    server = Server(ServiceSettings(drain_s=300), [])
    async with running(server) as (task, channel):

        async def is_ready() -> bool:
            return await health(channel) == SERVING

        async def is_draining() -> bool:
            return await health(channel) == NOT_SERVING

        await until(is_ready)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(is_draining)  # it answers still
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


def test_handlers_are_looked_up_by_names_that_are_always_the_same_objects() -> None:
    """Guards 250 KiB: CPython keeps the last 4,096 names of attributes, and each call made its own.

    In a soak that looks like a leak.
    """
    handler: Any = grpc.stream_stream_rpc_method_handler(lambda *_: None)
    assert _kind(handler) is _kind(handler) == "stream_stream"


def test_a_drain_takes_its_time_where_there_may_be_balancers() -> None:
    assert ServiceSettings().drain_seconds == 0
    assert ServiceSettings(host="0.0.0.0", allow_anonymous=True).drain_seconds == 5
    assert ServiceSettings(host="0.0.0.0", allow_anonymous=True, drain_s=1).drain_seconds == 1
