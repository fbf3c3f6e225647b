"""A server's life as its balancer sees it: alive, ready, draining."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from specrej.client.channel import open_channel
from specrej.contracts import wire
from specrej.contracts.errors import InternalError
from specrej.server import serving
from specrej.server.serving import LIVENESS, Context, Server
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2
from specrej.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.serving import failure_of, health_of, until
from tests.specrej.fakes import GENERATION, FakeOrchestrator

BOUND_S = 20.0


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


async def until_health(server: Server, readiness: str = "", liveness: str = "") -> None:
    """Wait for these serving statuses; empty: any."""

    async def is_reached() -> bool:
        pairs = ((readiness, ""), (liveness, LIVENESS))
        return all([not h or await health_of(address(server), name) == h for h, name in pairs])

    await until(is_reached)


@asynccontextmanager
async def running(
    server: Server, loaded: asyncio.Event | None = None
) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    """Run a server; end it by SIGTERM, if it still runs. `loaded`: the end of its warm-up."""

    async def warm_up() -> None:
        if loaded:
            await loaded.wait()

    task = asyncio.create_task(server.run(warm_up))
    await until(lambda: server.port != 0)
    async with open_channel(address(server)) as channel:
        try:
            yield task, channel
        finally:
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(task, BOUND_S)


async def test_health_follows_the_heartbeat(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a process that answers while its engine hangs, and is never restarted; and
    against a recovery logged as an error."""
    age_s = [0.0]
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server):
        await until_health(server, "SERVING", "SERVING")
        age_s[0] = 1e9
        await until_health(server, "NOT_SERVING", "NOT_SERVING")
        with caplog.at_level("INFO", "specrej.server.serving"):
            age_s[0] = 0.0
            await until_health(server, "SERVING", "SERVING")
    assert [r.levelname for r in caplog.records if "serving" in r.message][-2:] == ["ERROR", "INFO"]


async def test_an_ended_compute_thread_ends_the_process() -> None:
    """Guards against a process without its engine that is never restarted."""
    age_s = [0.0]
    server = Server(ServiceSettings(stuck_s=0.2), [])
    server.watch(lambda: age_s[0])
    async with running(server) as (task, _):
        age_s[0] = math.inf
        with pytest.raises(RuntimeError, match="a compute thread has ended"):
            await asyncio.wait_for(task, BOUND_S)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_server_that_was_never_ready_ends_without_a_drain(fails: bool) -> None:
    """Guards against seconds before the error of each start that fails."""
    server = Server(ServiceSettings(drain_s=300), [])

    async def warm_up() -> None:
        if fails:
            raise OSError("no model")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="no model") if fails else nullcontext():
        await asyncio.wait_for(server.run(warm_up), BOUND_S)


async def test_a_loading_server_is_alive_and_ends_on_sigterm() -> None:
    """Guards a slow start against a liveness probe that kills it again and again."""
    server = Server(ServiceSettings(), [])
    async with running(server, asyncio.Event()):
        await until_health(server, "NOT_SERVING", "SERVING")


async def test_a_drain_sets_not_serving_first_and_a_second_signal_ends_it() -> None:
    """Guards requests on their way: they would fail if refused before health is NOT_SERVING. Guards
    a drain against a supervisor that stops what is not alive."""
    server = Server(ServiceSettings(drain_s=300), [])
    async with running(server) as (task, _):
        await until_health(server, "SERVING")
        os.kill(os.getpid(), signal.SIGTERM)
        await until_health(server, "NOT_SERVING", "SERVING")  # it still answers
        server.set_serving(True)  # as after a recovery
        assert await health_of(address(server)) == "NOT_SERVING"
        assert not task.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


@pytest.mark.parametrize("method", ["Watch", "Check"])
async def test_an_open_health_check_does_not_delay_a_drain(method: str) -> None:
    """Guards restarts against calls that never end: one that watches, one that sends no message."""
    server = Server(ServiceSettings(grace_s=300), [])
    async with running(server) as (task, channel):
        call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")()
        if method == "Watch":
            await call.write(b"")
            await call.read()
        else:
            await call.wait_for_connection()
            # A later call on the same connection: the server has received the first one.
            later: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await later(b"", timeout=BOUND_S)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, BOUND_S)


async def test_a_drain_waits_for_running_calls(
    orchestrator: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards requests against a drain that ends once all other calls have ended."""
    monkeypatch.setattr(serving, "_SETTLING_S", 0.001)
    server = Server(ServiceSettings(grace_s=300), [orchestrator.service()])
    orchestrator.hangs = True
    async with running(server) as (_, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = asyncio.ensure_future(stub.Generate(orchestrator_pb2.GenerateRequest()))
        await asyncio.wait_for(orchestrator.received.wait(), BOUND_S)
        orchestrator.failures = [InternalError("the end of another call")]
        await failure_of(stub.Generate(orchestrator_pb2.GenerateRequest()))
        stopping = asyncio.ensure_future(server.stop())
        await until_health(server, "UNAVAILABLE")
        for _ in range(20):  # long after all other calls have ended
            assert await health_of(address(server)) == "UNAVAILABLE"
        orchestrator.released.set()
        assert await call == wire.generation_to_message(GENERATION)
        await asyncio.wait_for(stopping, BOUND_S)


class IgnoringCancellation(FakeOrchestrator):
    """Does not end when it is cancelled, like a call that waits for a hanging step."""

    async def Generate(self, request: Any, context: Context) -> Any:  # noqa: N802
        self.received.set()
        while not self.released.is_set():
            with suppress(asyncio.CancelledError):
                await self.released.wait()
        return wire.generation_to_message(GENERATION)


async def test_a_hanging_call_does_not_delay_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards restarts against a step that hangs: the platform had to kill the process."""
    monkeypatch.setattr(serving, "_ENDING_S", 0.01)
    hanging = IgnoringCancellation()
    server = Server(ServiceSettings(grace_s=0.01), [hanging.service()])
    async with running(server) as (task, channel):
        stub: Any = OrchestratorServiceStub(channel)
        call = stub.Generate(orchestrator_pb2.GenerateRequest())
        try:
            await asyncio.wait_for(hanging.received.wait(), BOUND_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(task, BOUND_S)
        finally:
            hanging.released.set()
            call.cancel()
        await server.stop()
