"""Runs the gateway, `python -m gateway --help`: listens, follows the orchestrator, drains."""

from __future__ import annotations

import asyncio
import logging
from email.utils import formatdate
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.app import Gateway
from gateway.settings import GatewaySettings
from specrej import telemetry
from specrej.client import Client
from specrej.security import tls_files
from specrej.server.serving import ServerGauges, Signals, warn_if_exposed
from specrej.settings import load

log = logging.getLogger(__name__)

_POLL_S = 1.0
_MOST_FAILED = 3  # polls, one after the other
_IDLE_S = 60  # between two requests of a connection
_FLUSH_S = 0.02  # between two looks at replies that are being read
_ENDING_S = 3.0  # for the end of cancelled requests


class Connection(H11Protocol):
    """A connection, whose client's certificate must have one of `names`, if there are any."""

    def __init__(self, names: frozenset[str], config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._names = names

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._names:
            certificate = transport.get_extra_info("peercert")
            if not self._names & {name for _, name in certificate.get("subjectAltName", ())}:
                transport.abort()


class Server:
    """Serves the gateway; port 0 picks a free one."""

    def __init__(self, settings: GatewaySettings, client: Client, gateway: Gateway) -> None:
        self._settings = settings
        self._client = client
        self._gateway = gateway
        self._state = ServerState()
        files = settings.tls_files
        self._certificates = files.watch() if files else None
        self._gauges = ServerGauges(
            self._certificates, tls_files(settings.orchestrator_credentials)
        )
        self._is_draining = False
        self._listeners: list[asyncio.Server] = []
        self.port = 0

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once.

        Raises:
            OSError: the address cannot be bound.
        """
        signals = Signals()
        await self.start()
        log.info("listening on %s:%d", self._settings.host, self.port)
        warn_if_exposed(self._settings)
        if not self._settings.forwards_tokens:
            address = self._settings.orchestrator_address
            log.warning("tokens are not sent in plaintext to %s: set orchestrator_tls_ca", address)
        self._gauges.observe()
        following = asyncio.ensure_future(self._follow())
        try:
            await signals.first.wait()
        finally:
            draining = asyncio.ensure_future(self._drain())
            second = asyncio.ensure_future(signals.second.wait())
            await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, second, following):
                task.cancel()
            await asyncio.gather(draining, second, following, return_exceptions=True)
            await self.stop(0)

    async def start(self) -> None:
        """Listen. Raises OSError: the address cannot be bound."""
        settings, files, watched = self._settings, self._settings.tls_files, self._certificates
        tls = files.server_context(watched) if files and watched else None
        names = frozenset(settings.allowed_names)
        await self._listen(self._gateway.app(), settings.port, names, ssl=tls)
        self.port = self._listeners[0].sockets[0].getsockname()[1]
        if settings.health_port:
            await self._listen(self._gateway.probes(), settings.health_port, frozenset())

    async def _listen(self, app: Any, port: int, names: frozenset[str], **tls: Any) -> None:
        config = Config(
            app,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # it has query strings
            timeout_keep_alive=_IDLE_S,
        )
        config.load()
        connect = partial(Connection, names, config, self._state)
        host = self._settings.host.strip("[]")
        listener = await asyncio.get_running_loop().create_server(connect, host, port, **tls)
        self._listeners.append(listener)

    async def _follow(self) -> None:
        """Ready while an orchestrator serves and this process does not drain.

        After the loss of one of several, checks go to it until its connection ends.
        """
        num_failed = _MOST_FAILED
        while True:
            num_failed = 0 if await self._client.is_serving() else num_failed + 1
            self._gateway.is_ready = num_failed < _MOST_FAILED and not self._is_draining
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await self._gauges.sleep(_POLL_S)

    async def _drain(self) -> None:
        self._is_draining, self._gateway.is_ready = True, False
        await asyncio.sleep(self._settings.drain_seconds)
        await self.stop(self._settings.grace_s)

    async def stop(self, grace_s: float) -> None:
        """Refuse connections, give requests `grace_s` seconds to finish, then end them."""
        clock = asyncio.get_running_loop().time
        end_s = clock() + grace_s
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        if self._state.tasks and grace_s:
            await asyncio.wait(self._state.tasks, timeout=grace_s)
        while self._state.connections and clock() < end_s:  # clients that read  # noqa: ASYNC110
            await asyncio.sleep(_FLUSH_S)
        for connection in tuple(self._state.connections):
            connection.transport.abort()  # as if the client had left
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING_S)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load(GatewaySettings)
    try:
        with telemetry.configured("gateway", settings):
            asyncio.run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"gateway: {error}") from error


async def _serve(settings: GatewaySettings) -> None:
    address, credentials = settings.orchestrator_address, settings.orchestrator_credentials
    async with Client(address, timeout_s=settings.deadline_s, **credentials) as client:
        await Server(settings, client, Gateway(settings, client)).run()


if __name__ == "__main__":
    main()
