"""TLS of the gateway: certificates, names, sessions and handshakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from tests.certificates import Authority, place
from tests.gateway.gateways import MODELS, Connection, context, gateway_at, response_to


async def get_models(port: int, tls: ssl.SSLContext) -> int:
    return int((await response_to(port, MODELS + b"\r\n", tls))[0])


async def test_tls_with_certificates_that_change(address: str, tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    pair = first.issue()
    async with gateway_at(address, **pair.settings) as server:
        assert await get_models(server.port, context(first)) == 200
        second.issue()
        assert await get_models(server.port, context(second)) == 200
        with pytest.raises(ssl.SSLError):
            await get_models(server.port, context(first))
        plain = await Connection.open(server.port, MODELS + b"\r\n")
        assert await plain.read_all() == b""


async def test_mutual_tls_with_names(address: str, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, good = authority.issue(), authority.issue("good", "front.example")
    clients = {"tls_client_ca": str(authority.path), "allowed_clients": "front.example"}
    async with gateway_at(address, **pair.settings, **clients) as server:
        assert await get_models(server.port, context(authority, good)) == 200
        foreign = other.issue("foreign", "front.example")
        refused = (pair, authority.issue("nameless", nameless=True), foreign, None)
        for cut in (context(authority, one) for one in refused):
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await get_models(server.port, cut)


def status_line(
    port: int, tls: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[bytes, ssl.SSLSession | None]:
    """The answer's first line to a health check, and the TLS session; empty: refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            with tls.wrap_socket(raw, server_hostname="localhost", session=session) as wrapped:
                wrapped.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                return wrapped.recv(4096).split(b"\r\n")[0], wrapped.session
        except OSError:
            return b"", None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_outlives_its_authority(
    address: str, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Guards against clients of a removed authority that resume their sessions."""
    removed, other = Authority(tmp_path, "removed"), Authority(tmp_path, "other")
    pair, client = removed.issue(), removed.issue("client")
    authorities = tmp_path / "clients.pem"
    place(authorities, removed.path.read_bytes())
    async with gateway_at(address, **pair.settings, tls_client_ca=str(authorities)) as server:
        tls = context(removed, client)
        tls.maximum_version = version
        first, session = await asyncio.to_thread(status_line, server.port, tls)
        assert first == b"HTTP/1.1 200 OK"
        place(authorities, other.path.read_bytes())
        again, _ = await asyncio.to_thread(status_line, server.port, tls, session)
        assert again == b""
