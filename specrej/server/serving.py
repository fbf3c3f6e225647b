"""The gRPC server of every service: health, reflection, TLS and drain.

Streaming handlers read the messages they are given, not `context`, whose are not decoded.
They are coroutines that use `context.write`: an async generator cancelled inside a write would not
run its `finally` in time. They send the initial metadata before their first message: sent with
that message, it would make grpc refuse a status while the message is unread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specrej import telemetry
from specrej.contracts.validation import MAX_METADATA_BYTES
from specrej.reloading_file import ReloadingFile
from specrej.security import PEM, Access, TLSFiles, is_loopback
from specrej.server.health import Health
from specrej.server.interceptor import Context as Context
from specrej.server.interceptor import StatusInterceptor
from specrej.server.interceptor import time_left_s as time_left_s
from specrej.settings import ProcessSettings, ServiceSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service: its full name, how to add its servicer to a server, and the server's health
    if this is the first service."""

    name: str
    register: Callable[[grpc.aio.Server], None]
    health: Health = field(default_factory=Health)


# Returns the seconds since a compute thread last made progress: 0 while it is idle, infinity once
# it has ended.
Heartbeat = Callable[[], float]

# The name of liveness in health checks: SERVING while all heartbeats are younger than `stuck_s`,
# also while models load and calls drain.
LIVENESS = "liveness"

# Connections end at this age, plus or minus a tenth, so that clients resolve the name again.
_CONNECTION_AGE_MS = 450_000

# Calls beyond `max_calls` that grpc lets in: health, reflection, and those that are being refused.
_MORE_CALLS = 512

# Calls that wait for the event loop.
_MAX_PENDING = 8192

_BEAT_S = 0.25  # between two checks of the heartbeats, and two measurements of the event loop
_LAGS_S = 60.0  # for which a measurement of the event loop counts

# The time for messages in flight to arrive at a stopping server, and for its answers to leave.
_SETTLING_S = 0.5

# The time in which a call that has arrived begins.
_BEGINNING_S = 0.05

# The time for a cancelled call to free its resources.
_ENDING_S = 3.0


class Server:
    """A gRPC server with health, reflection and a drain; port 0 picks a free one.

    Raises:
        OSError, ValueError: a certificate or tokens file cannot be used.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        services: Sequence[Service],
        *,
        default_deadline_s: float | None = None,
        max_deadline_s: float | None = None,
        client_tls: TLSFiles | None = None,
    ) -> None:
        """`default_deadline_s`, `max_deadline_s`: see `StatusInterceptor`.

        `client_tls`: the files of this service's own calls, whose expiry is measured.
        """
        self._settings = settings
        self._services = services
        self._heartbeats: list[Heartbeat] = []
        self._is_warm = False
        self._health = services[0].health if services else Health()
        self._is_ending = False
        self._access = Access(settings.tokens_path, settings.allowed_names)
        files = settings.tls_files
        self._certificates = files.watch() if files else None
        self._gauges = ServerGauges(self._certificates, client_tls)
        self._calls = StatusInterceptor(
            default_deadline_s, self._access, max_deadline_s, max_calls=settings.max_calls
        )
        self._server = _grpc_server(settings, self._calls, max_deadline_s)
        # Every call of it is one of health, which any caller may make.
        probes = StatusInterceptor(None, Access(), None, max_calls=settings.max_calls)
        self._prober = _grpc_server(settings, probes, None) if settings.health_port else None
        self.port = 0

    async def start(self) -> None:
        """Listen, NOT_SERVING until `set_serving`.

        Raises:
            OSError: the address cannot be bound.
        """
        self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service in self._services:
            service.register(self._server)
        if self._settings.reflection:
            names = [service.name for service in self._services]
            reflection.enable_server_reflection(
                (
                    *names,
                    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                    reflection.SERVICE_NAME,
                ),
                self._server,
            )
        watched = self._certificates
        credentials = _server_credentials(watched) if watched else None
        self.port = _listen(self._server, self._settings.host, self._settings.port, credentials)
        await self._server.start()
        if self._prober:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._prober)
            _listen(self._prober, self._settings.host, self._settings.health_port, None)
            await self._prober.start()

    def watch(self, heartbeat: Heartbeat) -> None:
        """Add a heartbeat: health is NOT_SERVING while one is older than `stuck_s`."""
        self._heartbeats.append(heartbeat)

    def set_serving(self, serving: bool) -> None:
        """Set readiness, the health of "" and of every service; a drain ends it for good."""
        for name in ("", *(service.name for service in self._services)):
            self._health.set(name, serving and not self._is_ending)

    async def stop(self, grace_s: float | None = None) -> None:
        """Set NOT_SERVING, refuse new calls, and give running ones `grace_s` seconds to finish.

        Only calls of the services are awaited: a health watch never ends by itself. A call that
        does not end when it is cancelled, because its step hangs, is abandoned.
        """
        self._end_readiness()
        grace_s = self._settings.grace_s if grace_s is None else grace_s
        settling_s = min(grace_s, _SETTLING_S)
        # grpc drops calls that have arrived and not begun when it stops.
        await asyncio.sleep(min(grace_s, _BEGINNING_S))
        # One after the other: grpc crashes if two stops end concurrently.
        await _within(settling_s, self._server.stop(grace_s))
        await _within(grace_s - settling_s, self._calls.idle.wait())
        await _within(settling_s + _ENDING_S, self._server.stop(settling_s))
        if self._prober:
            await _within(_ENDING_S, self._prober.stop(0))

    async def _drain(self) -> None:
        """Set NOT_SERVING, wait `drain_s` so that balancers choose other servers, then stop.

        A server that was never ready was in no balancer.
        """
        self._end_readiness()
        await asyncio.sleep(self._settings.drain_seconds if self._is_warm else 0)
        await self.stop()

    def _end_readiness(self) -> None:
        self._is_ending = True
        self.set_serving(False)

    def _heartbeat_age(self) -> Iterator[telemetry.metrics.Observed]:
        if self._heartbeats:
            yield max(beat() for beat in self._heartbeats), {}

    async def _follow_heartbeats(self) -> None:
        """Health follows the compute threads' heartbeats, not RPC liveness.

        Raises:
            RuntimeError: a compute thread has ended.
        """
        was_alive = True
        while True:
            ages = [beat() for beat in self._heartbeats]
            alive = all(age < self._settings.stuck_s for age in ages)
            self._health.set(LIVENESS, alive)
            if alive != was_alive:
                if alive:
                    log.info("the compute threads make progress again: serving")
                else:
                    log.error("no progress for %g s: not serving", self._settings.stuck_s)
                self.set_serving(alive and self._is_warm)
            if math.inf in ages:
                raise RuntimeError("a compute thread has ended")
            was_alive = alive
            await self._gauges.sleep(min(_BEAT_S, self._settings.stuck_s / 4))

    async def run(self, warm_up: Callable[[], Awaitable[None]]) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once.

        Raises what `warm_up` raises, and:
            RuntimeError: a compute thread has ended; the process must be restarted.
        """
        signals = Signals()
        asyncio.get_running_loop().set_exception_handler(_log_lost_error)
        await self.start()
        given = self._settings
        log.info("listening on %s:%d", given.host, self.port)
        warn_if_exposed(given)
        if given.tokens_file and not (given.tls_cert or is_loopback(given.host)):
            log.warning("tokens arrive in plaintext: set tls_cert, unless a proxy terminates TLS")
        if given.tls_client_ca and not (given.allowed_clients or given.tokens_file):
            log.warning("every certificate of tls_client_ca is accepted: set allowed_clients")
        telemetry.metrics.observe(telemetry.names.HEARTBEAT_AGE, self._heartbeat_age)
        self._gauges.observe()
        following = asyncio.ensure_future(self._follow_heartbeats())
        try:
            warming = asyncio.ensure_future(warm_up())
            stopping = asyncio.ensure_future(signals.first.wait())
            ending = {stopping, following}
            await asyncio.wait({warming, *ending}, return_when=asyncio.FIRST_COMPLETED)
            if warming.done() and not stopping.done():
                warming.result()
                self._is_warm = True
                self.set_serving(True)
                log.info("serving")
                await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            warming.cancel()
            if following.done():
                following.result()
        finally:
            following.cancel()
            draining = asyncio.ensure_future(self._drain())
            second = asyncio.ensure_future(signals.second.wait())
            await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
            second.cancel()
            if not draining.done():
                draining.cancel()
                await asyncio.wait({draining})
                await self.stop(0)


def _grpc_server(
    settings: ServiceSettings, interceptor: StatusInterceptor, max_deadline_s: float | None
) -> grpc.aio.Server:
    grace_s = math.inf if max_deadline_s is None else max_deadline_s + 60
    return grpc.aio.server(
        interceptors=[interceptor],
        maximum_concurrent_rpcs=settings.max_calls + _MORE_CALLS,
        options=[
            ("grpc.max_concurrent_streams", settings.max_calls),
            # Above the lower limit, 1,000 by default, grpc cancels arriving calls at random.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
            # Only identity: a compressed message is UNIMPLEMENTED and not decompressed.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # Between a lower and a higher limit, grpc refuses at random.
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
            # Longer than calls take; 2**31 - 1: no limit. It ends those whose answer is never read.
            ("grpc.max_connection_age_grace_ms", round(min(2**31 - 1, grace_s * 1e3))),
            # A second server on the same port must fail to start.
            ("grpc.so_reuseport", 0),
        ],
    )


def _listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Bind the port, with plaintext if there are no credentials; return its number."""
    is_bare = ":" in host and not host.startswith(("[", "unix:"))
    address = f"[{host}]:{port}" if is_bare else f"{host}:{port}"
    try:
        if credentials:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}") from error


async def _within(seconds: float, end: Awaitable[object]) -> None:
    """Wait at most `seconds` for `end`, then cancel it; with 0 seconds it does not begin.

    A cancelled stop of a grpc server may cancel all later stops; that does not cancel this task.
    """
    ending = asyncio.ensure_future(end)
    try:
        if seconds > 0:
            await asyncio.wait({ending}, timeout=seconds)
    finally:
        ending.cancel()
    await asyncio.wait({ending})
    if not ending.cancelled():
        ending.result()


def _log_lost_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log as asyncio does, without the objects of the context, which may hold a prompt."""
    log.error("%s", context["message"], exc_info=context.get("exception"))


def _server_credentials(watched: ReloadingFile[PEM]) -> grpc.ServerCredentials:
    """Credentials that are read again for a new connection if the files have changed."""
    given = watched.get()

    # Called by grpc's threads. Of two concurrent calls one may still use the old certificate.
    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pem = watched.get()
        if pem is given:
            return None
        given = pem
        return _certificates(pem)

    return grpc.dynamic_ssl_server_credentials(
        _certificates(given),
        changed,  # type: ignore[arg-type]  # documented: None means no change
        require_client_authentication=given.ca is not None,
    )


def _certificates(pem: PEM) -> grpc.ServerCertificateConfiguration:
    assert pem.key
    assert pem.cert, "the settings require both"
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


class ServerGauges:
    """What every server measures of itself: delays of its event loop, the life of certificates."""

    def __init__(
        self, certificates: ReloadingFile[PEM] | None, client_tls: TLSFiles | None
    ) -> None:
        self._certificates = certificates
        # A client reads its certificate once.
        self._client_expires = client_tls.read().expires if client_tls else math.inf
        self._lags: deque[tuple[float, float]] = deque()  # (when, delay of the event loop)

    def observe(self) -> None:
        """Export them from now on."""
        telemetry.metrics.observe(telemetry.names.EVENT_LOOP_LAG, self._event_loop_lag)
        telemetry.metrics.observe(telemetry.names.CERTIFICATE_LIFE, self._certificate_life)

    async def sleep(self, seconds: float) -> None:
        """Sleep; what it takes beyond these seconds is a delay of the event loop."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        now = time.monotonic()
        self._lags.append((now, now - began - seconds))
        while self._lags[0][0] < now - _LAGS_S:
            self._lags.popleft()

    def _event_loop_lag(self) -> Iterator[telemetry.metrics.Observed]:
        # Of a time, not since the last export: there may be several exporters.
        yield max((lag_s for _, lag_s in tuple(self._lags)), default=0.0), {}

    def _certificate_life(self) -> Iterator[telemetry.metrics.Observed]:
        own_expires = self._certificates.get().expires if self._certificates else math.inf
        if (expires := min(own_expires, self._client_expires)) < math.inf:
            yield expires - time.time(), {}


def warn_if_exposed(settings: ProcessSettings) -> None:
    """Log that a port which hostile peers may reach needs the edge in front, which bounds them."""
    if not (settings.private_network or is_loopback(settings.host)):
        text = "%s is not loopback: put the edge before this port, then set private_network"
        log.warning(text, settings.host)


class Signals:
    """The first and the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
