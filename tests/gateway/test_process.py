"""The life of the gateway's process."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.local.stack import Ports
from tests.certificates import Authority
from tests.gateway.gateways import CHAT, STREAM, Connection, gateway_at, get, request
from tests.programs import ROOT, outcome_of, started
from tests.serving import until, until_read
from tests.specrej.fakes import FakeOrchestrator


@asynccontextmanager
async def process(address: str, **settings: str) -> AsyncIterator[tuple[Process, int]]:
    """A gateway's process that is ready, and its port."""
    names = {f"SPECREJ_GATEWAY_{name.upper()}": value for name, value in settings.items()}
    names |= {"SPECREJ_GATEWAY_ORCHESTRATOR_ADDRESS": address, "SPECREJ_GATEWAY_PORT": "0"}
    command = (sys.executable, "-m", "gateway")
    async with started(*command, until=r"listening on .*:(\d+)\n", **names) as (running, match):
        port = int(match[1])
        await until_read(lambda: get(port, "/readyz"), lambda found: found[0] == 200)
        yield running, port


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


async def test_it_is_ready_only_with_an_orchestrator() -> None:
    async with gateway_at("127.0.0.1:1") as server:
        assert (await get(server.port, "/readyz"))[0] == 503


async def test_probes_have_a_port_of_their_own(address: str, tmp_path: Path) -> None:
    """Guards against probes that the public port's callers can delay, or that need TLS."""
    port = Ports.free().gateway
    pair = Authority(tmp_path).issue().settings
    async with gateway_at(address, health_port=port, **pair) as server:
        server._gateway.is_ready = True
        silent = [await Connection.open(port) for _ in range(300)]
        assert (await get(port, "/healthz"))[0] == (await get(port, "/readyz"))[0] == 200
        assert (await get(port, "/v1/models"))[0] == 404
        for connection in silent:
            connection.leave()


async def test_a_taken_port_and_a_bad_setting_stop_the_process(address: str) -> None:
    async with gateway_at(address) as server:
        for variables, text in (
            ({"PORT": str(server.port)}, "gateway: "),
            ({"ORCHESTRATOR_TLS_CA": "/missing"}, "orchestrator_*"),
        ):
            names = {f"SPECREJ_GATEWAY_{name}": value for name, value in variables.items()}
            command = (sys.executable, "-m", "gateway")
            ended = await outcome_of(*command, folder=ROOT, bound_s=60, **names)
            assert ended.returncode
            assert text in ended.stderr
