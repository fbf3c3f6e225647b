"""The gateway's process: listens, follows the orchestrator's health, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from email.utils import formatdate
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.app import Gateway
from gateway.connection import Bounds, Connection
from gateway.settings import GatewaySettings
from specrej.client import Client
from specrej.credentials import TLSFiles
from specrej.serving import Signals

log = logging.getLogger(__name__)

_POLL_S = 1.0
_IDLE_S = 60  # without a request, after one
_HANDSHAKE_S = 10.0
_ENDING_S = 3.0  # for cancelled requests


class Server:
    """Serves the gateway; port 0 picks a free one."""

    def __init__(self, settings: GatewaySettings, client: Client, gateway: Gateway) -> None:
        self._settings = settings
        self._client = client
        self._gateway = gateway
        self._state = ServerState()
        self._listener: asyncio.Server
        self._is_draining = False
        self.port = 0

    async def start(self) -> None:
        """Listen, not ready until the orchestrator serves.

        Raises:
            OSError: the address cannot be bound.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        config = Config(
            self._gateway.app(),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            h11_max_incomplete_event_size=settings.max_header_bytes,
        )
        config.load()
        bounds = Bounds(
            settings.header_s, settings.unread_s, settings.max_connections, settings.allowed_names
        )
        files = settings.tls_files
        self._listener = await loop.create_server(
            lambda: Connection(config, self._state, bounds, loop),
            settings.host.strip("[]"),
            settings.port,
            ssl=_context(files) if files else None,
            ssl_handshake_timeout=_HANDSHAKE_S if files else None,
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once."""
        signals = Signals()
        await self.start()
        log.info("listening on %s:%d", self._settings.host, self.port)
        if not self._settings.forwards_tokens:
            log.warning(
                "tokens are not forwarded in plaintext to %s: set orchestrator_tls_ca",
                self._settings.orchestrator_address,
            )
        following = asyncio.ensure_future(self.follow())
        try:
            await signals.first.wait()
        finally:
            self._is_draining = True
            draining = asyncio.ensure_future(self._drain())
            second = asyncio.ensure_future(signals.second.wait())
            await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, second, following):
                task.cancel()
            await asyncio.gather(draining, second, following, return_exceptions=True)
            await self.stop(0)

    async def follow(self) -> None:
        """Ready while the orchestrator serves and this process does not drain."""
        while True:
            serves = await self._client.is_serving()
            if serves != self._gateway.is_ready:
                log.info("serving" if serves else "waiting for the orchestrator")
            self._gateway.is_ready = serves and not self._is_draining
            date = formatdate(usegmt=True).encode()
            self._state.default_headers = [(b"date", date)]
            await asyncio.sleep(_POLL_S)

    async def _drain(self) -> None:
        self._gateway.is_ready = False
        await asyncio.sleep(self._settings.drain_seconds)
        await self.stop(self._settings.grace_s)

    async def stop(self, grace_s: float) -> None:
        """Refuse connections, give requests `grace_s` seconds to finish, then end them."""
        self._listener.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        if self._state.tasks and grace_s:
            await asyncio.wait(self._state.tasks, timeout=grace_s)
        for connection in tuple(self._state.connections):
            if transport := connection.transport:
                transport.abort()  # cancels its request, as a client that leaves does
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING_S)


def _context(files: TLSFiles) -> ssl.SSLContext:
    """A context that uses changed certificates from the next connection on."""
    watched = files.watch()
    current, latest = watched.get(), _read(files)

    def renew(connection: Any, name: Any, first: ssl.SSLContext) -> None:
        nonlocal current, latest
        if (pem := watched.get()) is not current:
            with suppress(OSError):  # replaced once more: the next connection reads it
                current, latest = pem, _read(files)
        connection.context = latest

    context = _read(files)
    context.sni_callback = renew
    return context


def _read(files: TLSFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert files.cert, "the settings require it"
    context.load_cert_chain(files.cert, files.key)
    if files.ca:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
