"""What every gRPC server here needs: the status interceptor, health, reflection, signals, streams.

Knows no service. Handlers raise `SpecrejError`s and never catch; the interceptor maps them.
Streaming handlers are coroutines that use `context.write`: an async generator cancelled inside a
write would not run its `finally` in time.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import signal
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from sys import intern
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from specrej import telemetry
from specrej.credentials import PEM, TLSFiles
from specrej.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    SessionExpired,
    SpecrejError,
    Violation,
)
from specrej.security import OURS, Access, Caller, set_caller
from specrej.settings import ServiceSettings
from specrej.status import to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
# Quoted: the class is generic for type checkers only.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Awaitable[Any]]


# Of the call that runs in this context; time.monotonic().
_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


def time_left_s() -> float | None:
    """Seconds until the deadline of the call that runs here, the client's or the server's own."""
    deadline = _deadline.get()
    return None if deadline is None else deadline - time.monotonic()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Runs each handler in a span, within its deadline, and turns what it raises into a status.

    Whom `access` does not admit gets no further than here, whatever the method.
    `default_deadline_s` bounds calls whose client set no deadline; None leaves them unbounded.
    """

    def __init__(
        self, default_deadline_s: float | None = None, access: Access | None = None
    ) -> None:
        self._default_deadline_s = default_deadline_s
        self._access = access or Access()
        self._num_running = 0
        self.idle = asyncio.Event()  # no call of our services runs
        self.idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        try:
            caller = self._access.admit(details.method, details.invocation_metadata or ())
        except Exception as error:
            # What a stranger calls that nobody serves is no name for a span.
            return self._refuse(details.method if handler else "unknown", error)
        if handler is None:
            return None
        if details.method.startswith(OURS):
            return _wrapped(handler, lambda behavior: self._guard(details.method, behavior, caller))
        return _wrapped(handler, lambda behavior: _told(details.method, behavior))

    def _refuse(self, method: str, error: Exception) -> RpcHandler:
        """A handler of any method that looks at no message."""

        async def refuse(request: Any, context: Context) -> None:
            raise error

        return grpc.stream_stream_rpc_method_handler(self._guard(method, refuse, Caller()))

    def _guard(self, method: str, behavior: Handler, caller: Caller) -> Handler:
        name = method.lstrip("/")

        async def guarded(request: Any, context: Context) -> Any:
            metadata = context.invocation_metadata() or ()
            with self._counted(), telemetry.served(name, metadata) as call:
                try:
                    set_caller(caller)
                    left_s = self._deadline_s(context)
                    _deadline.set(None if left_s is None else time.monotonic() + left_s)
                    async with asyncio.timeout(left_s):
                        return await behavior(request, context)
                except Exception as error:
                    await _abort(context, method, error, call)
                except asyncio.CancelledError as error:
                    call.code = _code_of_cancellation(context).name
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # Not the call's own cancellation: without a status its client would hang.
                    await _abort(context, method, error, call)

        return guarded

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.idle.set()

    def _deadline_s(self, context: Context) -> float | None:
        remaining = context.time_remaining()
        # grpc reports "no deadline" as None or as an absurdly distant one.
        return self._default_deadline_s if remaining is None or remaining > 1e7 else remaining


_CANCELLATION_S = 0.001  # until one that has come is told

# Grpc cancels what is late, a client that is late too cancels by itself, a little earlier.
_LATE_S = 0.05


def _code_of_cancellation(context: Context) -> grpc.StatusCode:
    left_s = context.time_remaining()
    late = left_s is not None and left_s < _LATE_S
    return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED


async def _abort(context: Context, method: str, error: BaseException, call: telemetry.Call) -> None:
    code, text, trailers = to_status(_presentable(method, error))
    call.code = code.name
    await context.abort(code, text, trailers)


def _presentable(method: str, error: BaseException) -> SpecrejError:
    """What may leave the process: our own errors as they are, anything else opaque and logged."""
    if isinstance(error, SpecrejError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("deadline exceeded")
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("cancelled by the server")
    request_id = uuid.uuid4().hex
    log.error("bug in %s (error %s)", method, request_id, exc_info=error)
    return InternalError(f"internal error {request_id}", metadata={"error_id": request_id})


def _kind(handler: RpcHandler) -> str:
    """The name of the attribute with its behaviour: always the same object.

    CPython remembers the last 4,096 names that attributes were looked up by, each new string anew.
    """
    requests = "stream" if handler.request_streaming else "unary"
    return intern(f"{requests}_{'stream' if handler.response_streaming else 'unary'}")


def _wrapped(handler: Any, wrap: Callable[[Handler], Handler]) -> Any:
    """Its behaviour, wrapped, also decodes what is sent: grpc would answer a message that cannot be
    decoded with UNKNOWN and a class name."""
    kind = _kind(handler)
    behavior, decode = getattr(handler, kind), _decoder(handler)
    if handler.request_streaming:  # whatever reads the stream sees it fail
        return handler._replace(**{kind: wrap(behavior)}, request_deserializer=decode)

    def decoding(data: bytes, context: Context) -> Any:
        return behavior(decode(data), context)

    return handler._replace(**{kind: wrap(decoding)}, request_deserializer=None)


def _told(method: str, behavior: Handler) -> Handler:
    """Health's or reflection's, which have no deadline and no span, but our statuses."""

    async def told(request: Any, context: Context) -> Any:
        try:
            answer = behavior(request, context)
            if not inspect.isasyncgen(answer):
                return await answer
            async for message in answer:
                await context.write(message)
        except grpc.aio.AbortError:
            raise  # a status of its own
        except Exception as error:
            await context.abort(*to_status(_presentable(method, error)))

    return told


def _decoder(handler: RpcHandler) -> Callable[[bytes], Any]:
    """The handler's own, but a malformed message is its sender's fault."""

    parse = handler.request_deserializer
    assert parse, "generated handlers have one"

    def decode(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            raise InvalidRequest([Violation("request", "must be a valid message")]) from None

    return decode


class Numbered(Protocol):
    """A stream message with a sequence number."""

    sequence: int


Request = TypeVar("Request", bound=Numbered)
Response = TypeVar("Response", bound=Numbered)


async def answer_commands(
    context: Context,
    handle: Callable[[Request], Awaitable[Response]],
    stale: Callable[[], Response],
    lease_s: float,
) -> None:
    """Answer a stream's numbered commands until the peer half-closes.

    A repeated number gets the answer already given, an older one `stale()`; neither is handled
    again. A peer that neither sends nor reads for `lease_s` seconds loses the stream.

    Raises:
        SessionExpired: the lease ran out.
        InvalidRequest: a number below 1.
    """
    last: Response | None = None
    while (request := await _leased(context.read(), lease_s)) is not grpc.aio.EOF:
        if request.sequence < 1:
            raise InvalidRequest([Violation("sequence", "must be at least 1")])
        if last is None or request.sequence > last.sequence:
            last = answer = await handle(request)
            answer.sequence = request.sequence
        elif request.sequence == last.sequence:
            answer = last
        else:
            answer = stale()
            answer.sequence = request.sequence
        await _leased(context.write(answer), lease_s)
    # A stream that is cancelled reads as ended too, an instant before its handler is cancelled.
    await asyncio.sleep(_CANCELLATION_S)


T = TypeVar("T")


async def _leased(step: Awaitable[T], lease_s: float) -> T:
    lease = asyncio.timeout(lease_s)
    try:
        async with lease:
            return await step
    except TimeoutError:
        if lease.expired():
            telemetry.metrics.add(telemetry.names.LEASES_EXPIRED)
            raise SessionExpired(f"nothing from the peer for {lease_s:g} s") from None
        raise


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service: its full name and how to add its servicer to a server."""

    name: str
    register: Callable[[grpc.aio.Server], None]


# Seconds since the last sign of life of something that is at work; 0 while it has nothing to do,
# infinite if there will never be another one.
Heartbeat = Callable[[], float]

# The name that liveness goes by in health checks: SERVING as long as heartbeats are young, also
# while models are loading or calls are drained.
LIVENESS = "liveness"

# Connections end at this age, give or take a tenth, so that clients look up who there is.
_CONNECTION_AGE_MS = 450_000

# Within which what was sent to a server that stops has arrived, and what it answers has left.
_SETTLING_S = 0.5

# Within which a call that is cancelled has freed what it held.
_ENDING_S = 3.0


class Server:
    """A gRPC server with health, reflection and a drain; port 0 picks a free one.

    Raises:
        OSError, ValueError: the files of its certificates or tokens cannot be used.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        services: Sequence[Service],
        *,
        default_deadline_s: float | None = None,
    ) -> None:
        self._settings = settings
        self._services = services
        self._heartbeats: list[Heartbeat] = []
        self._is_warm = False
        self._health = health_aio.HealthServicer()
        self._calls = StatusInterceptor(default_deadline_s, Access(settings.tokens_path))
        self._server = grpc.aio.server(
            interceptors=[self._calls],
            options=[
                ("grpc.max_receive_message_length", settings.max_message_bytes),
                ("grpc.max_send_message_length", settings.max_message_bytes),
                # Between the two, grpc would refuse at random.
                ("grpc.max_metadata_size", settings.max_metadata_bytes),
                ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.max_connection_age_ms", _CONNECTION_AGE_MS),
                # For ever: a call has the deadline that its client sets, however late.
                ("grpc.max_connection_age_grace_ms", 2**31 - 1),
                # Two servers must never share a port unnoticed.
                ("grpc.so_reuseport", 0),
            ],
        )
        self.port = 0

    async def start(self) -> None:
        """Listen, NOT_SERVING until `set_serving`.

        Raises:
            OSError: the address cannot be bound.
        """
        await self.set_serving(False)
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
        address = f"{self._settings.host}:{self._settings.port}"
        files = self._settings.tls_files
        try:
            if files:
                self.port = self._server.add_secure_port(address, _server_credentials(files))
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self._server.start()

    def watch(self, heartbeat: Heartbeat) -> None:
        """From now on health follows it: NOT_SERVING while it is older than `stuck_s`."""
        self._heartbeats.append(heartbeat)

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks of "" and of every service: readiness."""
        for name in ("", *(service.name for service in self._services)):
            await self._health.set(name, _state(serving))

    async def stop(self, grace_s: float | None = None) -> None:
        """NOT_SERVING, refuse new calls, let running ones finish for `grace_s` seconds.

        Only those of our services: a stranger's health check that watches never ends by itself. One
        that does not end when it is cancelled, as its step hangs, is left behind.
        """
        await self._health.enter_graceful_shutdown()
        grace_s = self._settings.grace_s if grace_s is None else grace_s
        settling_s = min(grace_s, _SETTLING_S)
        # One after the other: grpc crashes where one stop ends beside another.
        await _within(settling_s, self._server.stop(grace_s))
        await _within(grace_s - settling_s, self._calls.idle.wait())
        await _within(settling_s + _ENDING_S, self._server.stop(settling_s))

    async def _drain(self) -> None:
        """NOT_SERVING to health checks first, so that balancers look elsewhere; then `stop`."""
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(self._settings.drain_seconds)
        await self.stop()

    def _heartbeat_age(self) -> Iterator[telemetry.metrics.Observed]:
        if self._heartbeats:
            yield max(beat() for beat in self._heartbeats), {}

    async def _follow_heartbeats(self) -> None:
        """Alive, and ready, is whoever gets on with its work; that a process answers is neither.

        Raises:
            RuntimeError: one has stopped for ever.
        """
        was_alive = True
        while True:
            ages = [beat() for beat in self._heartbeats]
            alive = all(age < self._settings.stuck_s for age in ages)
            await self._health.set(LIVENESS, _state(alive))
            if alive != was_alive:
                log.error("it goes on" if alive else "no step has ended for too long")
                await self.set_serving(alive and self._is_warm)
            if math.inf in ages:
                raise RuntimeError("a thread has ended that the service cannot be without")
            was_alive = alive
            await asyncio.sleep(min(1.0, self._settings.stuck_s / 4))

    async def run(self, warm_up: Callable[[], Awaitable[None]]) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once.

        Raises what `warm_up` raises, and:
            RuntimeError: a heartbeat has stopped for ever; only a new process can help.
        """
        signals = _Signals()
        asyncio.get_running_loop().set_exception_handler(_log_lost_error)
        await self.start()
        log.info("listening on %s:%d", self._settings.host, self.port)
        if self._settings.shows_tokens:
            log.warning("tokens reach this port in plaintext: set tls_cert, unless a proxy does it")
        telemetry.metrics.observe(telemetry.names.HEARTBEAT_AGE, self._heartbeat_age)
        following = asyncio.ensure_future(self._follow_heartbeats())
        try:
            warming = asyncio.ensure_future(warm_up())
            stopping = asyncio.ensure_future(signals.first.wait())
            ending = {stopping, following}
            await asyncio.wait({warming, *ending}, return_when=asyncio.FIRST_COMPLETED)
            if warming.done() and not stopping.done():
                warming.result()
                self._is_warm = True
                await self.set_serving(True)
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


async def _within(seconds: float, end: Awaitable[object]) -> None:
    """Until then at most."""
    with suppress(TimeoutError):
        await asyncio.wait_for(end, seconds)


def _state(serving: bool) -> Any:
    states = health_pb2.HealthCheckResponse
    return states.SERVING if serving else states.NOT_SERVING


def _log_lost_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As asyncio does, without the objects that it prints: what they hold may be a prompt."""
    log.error("%s", context["message"], exc_info=context.get("exception"))


def _server_credentials(files: TLSFiles) -> grpc.ServerCredentials:
    """Looks at the files at every new connection; those that are open go on as they are."""
    watched = files.watch()
    given = watched.get()

    # Called by grpc's own threads. If two come at once, one may still get the last certificate.
    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pem = watched.get()
        if pem is given:
            return None
        given = pem
        return _certificates(pem)

    return grpc.dynamic_ssl_server_credentials(
        _certificates(given),
        changed,  # type: ignore[arg-type]  # None is "no change", and documented
        require_client_authentication=files.ca is not None,
    )


def _certificates(pem: PEM) -> grpc.ServerCertificateConfiguration:
    assert pem.key
    assert pem.cert, "checked by the settings"
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


class _Signals:
    """The first and the second request to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
