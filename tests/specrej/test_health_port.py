"""The health port of a real orchestrator process, as a probe without TLS sees it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.stack import Ports
from specrej.server.serving import LIVENESS, Server
from specrej.settings import ServiceSettings
from specrej.v1 import orchestrator_pb2
from tests.certificates import Authority
from tests.serving import failure_of, health_of, until

ORCHESTRATOR = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HOST = "127.0.0.1"
BOUND_S = 60.0


@dataclass(frozen=True, slots=True)
class Running:
    process: asyncio.subprocess.Process
    main: str
    probes: str
    authority: Authority

    async def health_by_tls(self) -> str:
        """Liveness, at the main port."""
        port = self.main.rpartition(":")[2]
        return await health_of(f"localhost:{port}", LIVENESS, tls_ca=self.authority.path)


@asynccontextmanager
async def secured_orchestrator(directory: Path, *arguments: str) -> AsyncIterator[Running]:
    """An orchestrator with TLS, tokens and a health port, without backends."""
    ports, authority = Ports.free(), Authority(directory)
    pair, tokens = authority.issue(), directory / "tokens.jsonl"
    tokens.write_text(json.dumps({"tenant": "acme", "sha256": "0" * 64, "roles": ["generate"]}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "orchestrator", f"--port={ports.orchestrator}"),
        *(f"--health-port={ports.generator}", f"--tokens-file={tokens}", "--redis-url="),
        *(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", *arguments),
        *(f"--generator-address={HOST}:{ports.reward}", f"--reward-address={HOST}:{ports.reward}"),
    )
    probes = f"{HOST}:{ports.generator}"

    async def is_alive() -> bool:
        return await health_of(probes, LIVENESS) == "SERVING"

    try:
        await until(is_alive, bound_s=BOUND_S, every_s=0.05)
        yield Running(process, f"{HOST}:{ports.orchestrator}", probes, authority)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_probes_without_tls_see_the_state_and_nothing_else(tmp_path: Path) -> None:
    """Guards against probes that need TLS or a token, a plaintext port with other services, and
    a port that outlives the drain."""
    async with secured_orchestrator(tmp_path) as running:
        assert await health_of(running.probes, ORCHESTRATOR) == "NOT_SERVING"  # without backends
        assert await health_of(running.probes, "other") == "NOT_FOUND"
        assert await running.health_by_tls() == "SERVING"
        assert await health_of(running.main, LIVENESS) == "UNAVAILABLE"  # plaintext
        async with grpc.aio.insecure_channel(running.probes) as channel:
            for method in (f"/{ORCHESTRATOR}/Describe", REFLECTION):
                call: Any = channel.unary_unary(method)
                assert (await failure_of(call(b""))).code() == grpc.StatusCode.UNIMPLEMENTED
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), BOUND_S) == 0
        assert await health_of(running.probes, LIVENESS) == "UNAVAILABLE"


async def test_the_port_has_the_bounds_of_the_others(tmp_path: Path) -> None:
    """Guards against a plaintext port by which callers without a token use up memory."""
    async with secured_orchestrator(tmp_path, "--max-connections=8") as running:
        async with grpc.aio.insecure_channel(running.probes) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            long = health_pb2.HealthCheckRequest(service="x" * 5000)
            # The port has room for one connection, and that of the check before may not have ended.
            failure = await failure_of(stub.Check(long, wait_for_ready=True))
            assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
            # An eighth of the connections: this one.
            assert await health_of(running.probes, LIVENESS) == "UNAVAILABLE"
        assert await running.health_by_tls() == "SERVING"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_the_host_may_be_an_ipv6_address(host: str) -> None:
    """Guards against a port that seems to be taken."""
    server = Server(ServiceSettings(host=host, port=0), [])
    try:
        await server.start()
        assert server.port
    finally:
        await server.stop(0)


async def test_a_taken_health_port_raises() -> None:
    """Guards against a service without the port that its probes need."""
    with socket.create_server((HOST, 0)) as taken:
        server = Server(ServiceSettings(health_port=taken.getsockname()[1]), [])
        try:
            with pytest.raises(OSError, match="cannot listen on"):
                await server.start()
        finally:
            await server.stop(0)
