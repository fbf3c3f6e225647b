"""The life of the gateway's process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil  # type: ignore[import-untyped]
import pytest

from gateway import __main__ as gateway_main
from tests.endpoints import scrape
from tests.gateway.gateways import CHAT, STREAM, Connection, gateway_at, get, request
from tests.programs import ROOT, outcome_of
from tests.serving import until
from tests.specrej.fakes import FakeOrchestrator

MAX_BYTES_OF_STREAMS = 60 * 2**20


@asynccontextmanager
async def process(address: str, **settings: str) -> AsyncIterator[tuple[Process, int]]:
    """A gateway's process that is ready, and its port."""
    names = {f"SPECREJ_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    environment = {**os.environ, "SPECREJ_GATEWAY_ORCHESTRATOR_ADDRESS": address, **names}
    environment["SPECREJ_GATEWAY_PORT"] = "0"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"), stderr=PIPE, env=environment
    )
    assert started.stderr
    try:
        async with asyncio.timeout(60):
            while b"listening on" not in (line := await started.stderr.readline()):
                assert line, "it ended"
        port = int(line.rpartition(b":")[2])

        async def is_ready() -> bool:
            return bool((await get(port, "/readyz"))[0] == 200)

        await until(is_ready)
        yield started, port
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_idle_streams_are_small(address: str, orchestrator: FakeOrchestrator) -> None:
    """200 of them take at most 60 MiB, and nothing after they left."""
    orchestrator.hangs = True
    async with process(address) as (running, port):
        first = await Connection.open(port, request(CHAT, STREAM))
        await first.read_until(b'"assistant"')
        before = psutil.Process(running.pid).memory_info().rss
        streams = [await Connection.open(port, request(CHAT, STREAM)) for _ in range(200)]
        for stream in streams:
            await stream.read_until(b'"assistant"')
        grown = psutil.Process(running.pid).memory_info().rss - before
        assert 0 < grown <= MAX_BYTES_OF_STREAMS
        for stream in (first, *streams):
            stream.leave()

        async def all_left() -> bool:
            values = await scrape([f"http://127.0.0.1:{port}/metrics"])
            return values.sum("http_server_active_requests", http_route=CHAT) == 0

        await until(all_left)


async def test_sigterm_lets_requests_finish(address: str, orchestrator: FakeOrchestrator) -> None:
    """Guards against answers that are lost in a rollout, and a process that ends by a signal."""
    orchestrator.hangs = True
    async with process(address) as (running, port):
        stream = await Connection.open(port, request(CHAT, STREAM))
        await orchestrator.received.wait()
        running.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            try:
                (await Connection.open(port)).leave()
            except ConnectionError:
                return True
            return False

        await until(refuses)
        orchestrator.released.set()
        assert b"[DONE]" in await stream.read_all()
        assert await asyncio.wait_for(running.wait(), 20) == 0


async def test_a_second_signal_ends_it_at_once(
    address: str, orchestrator: FakeOrchestrator
) -> None:
    orchestrator.hangs = True
    async with process(address) as (running, port):
        stream = await Connection.open(port, request(CHAT, STREAM))
        await orchestrator.received.wait()
        running.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.wait(), 0.3)
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 20) == 0
        assert b"[DONE]" not in await stream.read_all()
        await asyncio.wait_for(orchestrator.cancelled.wait(), 20)


async def test_it_is_ready_only_with_an_orchestrator() -> None:
    async with gateway_at("127.0.0.1:1") as server:
        assert (await get(server.port, "/readyz"))[0] == 503


async def test_lost_health_checks_in_a_row_end_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against all gateways leaving their service at once for one lost call."""
    monkeypatch.setattr(gateway_main, "_POLL_S", 0)
    results = iter([False, True, False, False, True, False, False, False, False, True])
    is_ready: list[bool] = []
    async with gateway_at("127.0.0.1:1") as server:

        async def is_serving() -> bool:
            is_ready.append(server._gateway.is_ready)
            return next(results)

        monkeypatch.setattr(server._client, "is_serving", is_serving)
        with pytest.raises(RuntimeError):  # at the end of the results
            await server._follow()
    assert is_ready == [False, False, *[True] * 6, False, False, True]


async def test_a_taken_port_and_a_bad_setting_stop_the_process(address: str) -> None:
    async with gateway_at(address) as server:
        for variables, text in (
            ({"PORT": str(server.port)}, "gateway: "),
            ({"ORCHESTRATOR_TLS_CA": "/missing"}, "orchestrator_*"),
            ({"KEEP_ALIVE_S": "0"}, "bad setting keep_alive_s"),
        ):
            names = {f"SPECREJ_GATEWAY_{name}": value for name, value in variables.items()}
            command = (sys.executable, "-m", "gateway")
            ended = await outcome_of(*command, folder=ROOT, bound_s=60, **names)
            assert ended.returncode
            assert text in ended.stderr
