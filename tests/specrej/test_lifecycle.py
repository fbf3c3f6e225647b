"""A server's life as its balancer sees it: alive, ready, draining."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej import serving, wire
from specrej.channel import open_channel
from specrej.serving import LIVENESS, Context, Server, Service, _kind
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)
from tests.specrej.fakes import GENERATION, FakeOrchestrator

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


async def _is_away(port: int) -> bool:
    async with open_channel(f"127.0.0.1:{port}", retries=False) as channel:
        return await health(channel) is None


@pytest.mark.parametrize("method", ["Watch", "Check"])
async def test_a_strangers_health_check_holds_up_no_drain(method: str) -> None:
    """Guards restarts against calls that never end: one that watches, one that sends no message."""
    server = Server(ServiceSettings(grace_s=300), [])
    async with running(server) as (task, channel):
        call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")()
        if method == "Watch":
            await call.write(b"")
            await call.read()
        else:
            await call.wait_for_connection()
            assert await health(channel) is not None  # came later, on the same connection
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


async def test_a_drain_waits_for_what_runs(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards requests against a drain that ends with the settling of what else there is."""
    monkeypatch.setattr(serving, "_SETTLING_S", 0.001)
    register = partial(add_OrchestratorServiceServicer_to_server, orchestrator)
    service = Service("specrej.v1.OrchestratorService", register)
    server = Server(ServiceSettings(grace_s=300), [service])
    orchestrator.hangs = True
    async with running(server) as (_, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = asyncio.ensure_future(stub.Generate(orchestrator_pb2.GenerateRequest()))
        await asyncio.wait_for(orchestrator.asked.wait(), BOUND_S)
        stopping = asyncio.ensure_future(server.stop())
        await until(partial(_is_away, server.port))
        for _ in range(20):  # long after whatever was on its way has settled
            assert await _is_away(server.port)
        orchestrator.released.set()
        assert await call == wire.generation_to_wire(GENERATION)
        await asyncio.wait_for(stopping, BOUND_S)


class Deaf(FakeOrchestrator):
    """Does not end when it is cancelled, as who waits for a step that hangs."""

    async def Generate(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.asked.set()
        while not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await self.released.wait()
        return wire.generation_to_wire(GENERATION)


async def test_a_call_that_cannot_end_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards restarts against a step that hangs: the platform had to kill the process."""
    monkeypatch.setattr(serving, "_ENDING_S", 0.01)
    deaf = Deaf()
    register = partial(add_OrchestratorServiceServicer_to_server, deaf)
    server = Server(ServiceSettings(grace_s=0.01), [Service("deaf", register)])
    async with running(server) as (task, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = stub.Generate(orchestrator_pb2.GenerateRequest())
        try:
            await asyncio.wait_for(deaf.asked.wait(), BOUND_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, BOUND_S)
        finally:
            deaf.released.set()
            call.cancel()
        await server.stop()


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
