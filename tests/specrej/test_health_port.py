"""The health port beside a port with TLS and tokens, as a probe without TLS sees it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.stack import Ports
from specrej.server.serving import Server
from specrej.settings import ServiceSettings
from tests.certificates import Authority, place, token_line
from tests.serving import failure_of, health_of, listening
from tests.specrej.fakes import FakeOrchestrator

ORCHESTRATOR = "specrej.v1.OrchestratorService"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HOST = "127.0.0.1"


@asynccontextmanager
async def secured(folder: Path, **settings: Any) -> AsyncIterator[tuple[str, str]]:
    """The addresses of the main port, with TLS and tokens, and of the health port."""
    port, tokens = Ports.free().generator, folder / "tokens"
    place(tokens, token_line("acme", "acme-token"))
    pair = Authority(folder).issue().settings
    files: dict[str, Any] = {"tokens_file": str(tokens), "health_port": port, **pair}
    async with listening(FakeOrchestrator().service(), **files, **settings) as address:
        yield address, f"{HOST}:{port}"


async def test_probes_without_tls_see_the_state_and_nothing_else(tmp_path: Path) -> None:
    """Guards against probes that need TLS or a token, a plaintext port with other services, and
    a port that outlives its server."""
    async with secured(tmp_path) as (main, probes):
        assert await health_of(probes, ORCHESTRATOR) == "SERVING"
        assert await health_of(probes, "other") == "NOT_FOUND"
        assert await health_of(main) == "UNAVAILABLE"  # plaintext
        port = main.rpartition(":")[2]
        ca = tmp_path / "ca.pem"
        assert await health_of(f"localhost:{port}", tls_ca=ca) == "SERVING"
        async with grpc.aio.insecure_channel(probes) as channel:
            for method in (f"/{ORCHESTRATOR}/Describe", REFLECTION):
                call: Any = channel.unary_unary(method)
                assert (await failure_of(call(b""))).code() == grpc.StatusCode.UNIMPLEMENTED
    assert await health_of(probes) == "UNAVAILABLE"


async def test_the_port_has_the_bounds_of_the_others(tmp_path: Path) -> None:
    """Guards against a plaintext port by which callers without a token use up memory."""
    async with (
        secured(tmp_path, max_connections=8) as (_, probes),
        grpc.aio.insecure_channel(probes) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        failure = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000)))
        assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
        # An eighth of the connections: this one.
        assert await health_of(probes) == "UNAVAILABLE"


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
