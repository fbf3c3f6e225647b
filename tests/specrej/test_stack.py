"""The local stack's own part: ports, programs, the embedded server. Real services are for e2e."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from deploy.local.__main__ import main
from deploy.local.processes import ProcessError, Processes
from deploy.local.stack import Ports, Stack, first_line
from tests.faults.proxy import reset


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_free_ports_differ() -> None:
    """Guards against two services on one port."""
    first, second = (astuple(Ports.free()) for _ in range(2))
    assert len({*first, *second}) == 18
    # Guards against ports that a connection takes before a service listens there.
    assert max(*first, *second) < 32_768


async def test_a_taken_port_raises_before_anything_starts() -> None:
    """Guards against a stack connected to another program's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ProcessError, match=rf"port {port} \(reward\)"):
            async with Stack(replace(Ports.free(), reward=port)):
                pytest.fail("entered")


async def test_a_reset_connection_is_no_answer() -> None:
    """Guards against a stack that ends because one service does, and hides why."""

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async with await asyncio.start_server(leave, "127.0.0.1", 0) as server:
        assert await first_line(server.sockets[0].getsockname()[1], b"PING\r\n") == b""


async def test_a_service_that_cannot_start_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hanging start where the model is missing; nothing is left running."""
    monkeypatch.setenv("SPECREJ_GENERATOR_MODEL", str(tmp_path / "missing"))
    stack = Stack(log_dir=tmp_path / "logs", start_timeout_s=60, grace_s=5)
    with pytest.raises(ProcessError, match="the end of its log"):
        async with stack:
            pytest.fail("entered")
    assert (tmp_path / "logs" / "generator.log").exists()
    stack.ports.check_free()


async def test_the_embedded_server_answers_and_keeps_nothing(tmp_path: Path) -> None:
    """Guards against options that the embedded server refuses, and dump files left behind."""
    stack = Stack()
    async with Processes([stack._valkey()], tmp_path, start_timeout_s=20):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports.redis)
        writer.write(b"SET a 1\r\nCONFIG GET bind\r\n")
        assert await reader.readline() == b"+OK\r\n"
        assert b"127.0.0.1" in await reader.readuntil(b"127.0.0.1\r\n")
        writer.close()
        await writer.wait_closed()
    assert names(tmp_path) == ["redis.log"]


def test_addresses_follow_the_ports() -> None:
    """Guards against two generators at one port, and an orchestrator with other addresses than
    those of its backends."""
    stack = Stack(Ports(1, 2, 3, 4), generators=3, reward_services=2, environment={"X": "9"})
    addresses = stack.generator_addresses.split(",") + stack.reward_addresses.split(",")
    assert len({*addresses, stack.orchestrator_address}) == 6
    assert addresses[0] == stack.generator_address == "127.0.0.1:2"
    orchestrator = stack._replica(stack._orchestrators[0]).environment
    assert orchestrator["SPECREJ_ORCHESTRATOR_GENERATOR_ADDRESS"] == stack.generator_addresses
    assert orchestrator["SPECREJ_ORCHESTRATOR_REWARD_ADDRESS"] == stack.reward_addresses
    assert orchestrator["SPECREJ_ORCHESTRATOR_REDIS_URL"] == stack.redis_url
    assert stack.orchestrator_address == "127.0.0.1:1" and stack.redis_url.endswith(":4/0")
    for backend in (*stack._generators, *stack._rewards):
        environment = stack._replica(backend).environment
        assert environment["X"] == "9"
        assert environment[f"SPECREJ_{backend.kind.upper()}_PORT"] == str(backend.port)
        assert backend.address in addresses
    assert len(set(stack.metrics_urls)) == 6


def test_the_gateway_calls_the_orchestrator() -> None:
    stack = Stack(Ports(1, gateway=5, metrics_gateway=6), gateway=True, environment={"X": "9"})
    environment = stack._replica(stack._gateways[0]).environment
    assert environment["SPECREJ_GATEWAY_ORCHESTRATOR_ADDRESS"] == stack.orchestrator_address
    assert environment["SPECREJ_GATEWAY_PORT"] == "5" and environment["X"] == "9"
    assert stack.gateway_url.endswith(":5") and stack.metrics_urls[-1].endswith(":6/metrics")
    assert not Stack()._gateways


async def test_credentials_that_are_being_replaced_are_no_answer(tmp_path: Path) -> None:
    """Guards all services: the check of one would end the supervision of all."""
    stack = Stack(
        environment={"SPECREJ_REWARD_TLS_CERT": "x.pem"},
        credentials={"tls_ca": tmp_path / "absent.pem"},
    )
    reward = stack._replica(stack._rewards[0])
    assert reward.is_stuck
    assert not await reward.is_ready() and not await reward.is_stuck()


def test_the_page_of_a_gateway_with_tls_is_https() -> None:
    stack = Stack(gateway=True, environment={"SPECREJ_GATEWAY_TLS_CERT": "x.pem"})
    assert stack.gateway_url.startswith("https://")


@pytest.mark.parametrize("flag", ["--port", "--redis-port", "--metrics-port"])
@pytest.mark.parametrize("port", ["0", "65533", "x"])
def test_ports_are_checked(
    flag: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against half an hour of waiting for a service on another port."""
    monkeypatch.setattr("sys.argv", ["specrej", "up", flag, port])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{flag}: must be 1 .. 65532" in capsys.readouterr().err
