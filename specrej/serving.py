"""What every gRPC server here needs: the status interceptor, health, reflection, signals, streams.

Knows no service. Handlers raise `SpecrejError`s and never catch; the interceptor maps them.
Streaming handlers are coroutines that use `context.write`: an async generator cancelled inside a
write would not run its `finally` in time.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from specrej import telemetry
from specrej.channel import MAX_MESSAGE_BYTES
from specrej.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    SessionExpired,
    SpecrejError,
    Violation,
)
from specrej.settings import ServiceSettings
from specrej.status import to_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
# Quoted: the class is generic for type checkers only.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Awaitable[Any]]
_OURS = "/specrej.v1."


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Runs each handler in a span, within its deadline, and turns what it raises into a status.

    `default_deadline_s` bounds calls whose client set no deadline; None leaves them unbounded.
    """

    def __init__(self, default_deadline_s: float | None = None) -> None:
        self._default_deadline_s = default_deadline_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        kind = _kind(handler)
        behavior, decode = getattr(handler, kind), _decoder(handler)
        if handler.request_streaming:
            return handler._replace(
                **{kind: self._guard(details.method, behavior)}, request_deserializer=decode
            )

        # grpc would answer a message that it cannot decode with UNKNOWN and a class name.
        async def decoding(data: bytes, context: Context) -> Any:
            return await behavior(decode(data), context)

        return handler._replace(
            **{kind: self._guard(details.method, decoding)}, request_deserializer=None
        )

    def _guard(self, method: str, behavior: Handler) -> Handler:
        async def guarded(request: Any, context: Context) -> Any:
            with telemetry.server_span(method, context.invocation_metadata() or ()) as span:
                try:
                    async with asyncio.timeout(self._deadline_s(context)):
                        return await behavior(request, context)
                except Exception as error:
                    await _abort(context, method, error, span)
                except asyncio.CancelledError as error:
                    telemetry.end_with_code(span, grpc.StatusCode.CANCELLED.name)
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # Not the call's own cancellation: without a status its client would hang.
                    await _abort(context, method, error, span)

        return guarded

    def _deadline_s(self, context: Context) -> float | None:
        remaining = context.time_remaining()
        # grpc reports "no deadline" as None or as an absurdly distant one.
        return self._default_deadline_s if remaining is None or remaining > 1e7 else remaining


async def _abort(context: Context, method: str, error: BaseException, span: telemetry.Span) -> None:
    code, text, trailers = to_status(_presentable(method, error))
    telemetry.end_with_code(span, code.name)
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
    requests = "stream" if handler.request_streaming else "unary"
    return f"{requests}_{'stream' if handler.response_streaming else 'unary'}"


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


T = TypeVar("T")


async def _leased(step: Awaitable[T], lease_s: float) -> T:
    lease = asyncio.timeout(lease_s)
    try:
        async with lease:
            return await step
    except TimeoutError:
        if lease.expired():
            raise SessionExpired(f"nothing from the peer for {lease_s:g} s") from None
        raise


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service: its full name and how to add its servicer to a server."""

    name: str
    register: Callable[[grpc.aio.Server], None]


class Server:
    """A gRPC server with health, reflection and a drain; port 0 picks a free one."""

    def __init__(
        self,
        settings: ServiceSettings,
        services: Sequence[Service],
        *,
        default_deadline_s: float | None = None,
    ) -> None:
        self._settings = settings
        self._services = services
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(default_deadline_s)],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
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
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks of "" and of every service."""
        states = health_pb2.HealthCheckResponse
        value = states.SERVING if serving else states.NOT_SERVING
        for name in ("", *(service.name for service in self._services)):
            await self._health.set(name, value)

    async def stop(self, grace_s: float | None = None) -> None:
        """NOT_SERVING, refuse new calls, let running ones finish for `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._settings.grace_s if grace_s is None else grace_s)

    async def run(self, warm_up: Callable[[], Awaitable[None]]) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once."""
        signals = _Signals()
        await self.start()
        log.info("listening on %s:%d", self._settings.host, self.port)
        try:
            warming = asyncio.ensure_future(warm_up())
            stopping = asyncio.ensure_future(signals.first.wait())
            await asyncio.wait({warming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                warming.result()
                await self.set_serving(True)
                log.info("serving")
                await stopping
            warming.cancel()
        finally:
            draining = asyncio.ensure_future(self.stop())
            second = asyncio.ensure_future(signals.second.wait())
            await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
            second.cancel()
            if not draining.done():
                await self.stop(0)


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
