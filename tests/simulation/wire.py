"""gRPC without sockets: real handlers behind the real interceptor, and the channels to them.

Messages are serialized, travel in virtual time, and are parsed again. A call ends with a status as
in gRPC: an error is an `AioRpcError` with its code, its text and its trailers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast

import grpc
from grpc_health.v1 import health_pb2_grpc

from specrej.security import Access, Metadata
from specrej.server.interceptor import StatusInterceptor
from specrej.server.serving import Service

_MAX_CALLS = 1000


class Way(Protocol):
    """The network between two processes."""

    async def travel(self) -> None:
        """Take the time of a message, one way."""


class Server:
    """The services of one process, and health."""

    def __init__(
        self, *services: Service, deadline_s: float | None = None, max_deadline_s: float | None
    ) -> None:
        """`deadline_s`, `max_deadline_s`: see `StatusInterceptor`."""
        self._handlers: dict[str, Any] = {}
        self._calls = StatusInterceptor(deadline_s, Access(), max_deadline_s, max_calls=_MAX_CALLS)
        self.is_down = False
        self.refuses = False  # calls other than reports
        self.running: set[Call] = set()
        health = services[0].health
        health_pb2_grpc.add_HealthServicer_to_server(health, cast(Any, self))
        health.set("", True)
        for service in services:
            service.register(cast(Any, self))

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """As of a grpc server, which finds methods by their names below."""

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        """As of a grpc server."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in methods.items()}

    def crash(self) -> None:
        """End all calls at once, and refuse others while it `is_down`."""
        self.is_down = True
        for call in [*self.running]:
            call.fail(grpc.StatusCode.UNAVAILABLE, "connection reset")

    async def serve(self, call: Call) -> None:
        """Handle a call, and set its status unless the handler has."""
        details: Any = SimpleNamespace(method=call.method, invocation_metadata=call.metadata)
        self.running.add(call)
        try:

            async def find(_: object) -> Any:
                return self._handlers[call.method]

            handler = await self._calls.intercept_service(find, details)
            call.serialize = handler.response_serializer or (lambda message: message)
            await handler.stream_stream(None, call.context)
            await call.way.travel()
            call.end(grpc.StatusCode.OK, "")
        finally:
            self.running.discard(call)


class _Context:
    """The server's side of a call, as far as our code uses it."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def peer(self) -> str:
        return "memory:client"

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def time_remaining(self) -> float | None:
        due_s = self._call.due_s
        return None if due_s is None else due_s - asyncio.get_running_loop().time()

    async def send_initial_metadata(self, _: object) -> None:
        pass

    async def read(self) -> Any:
        return await self._call.requests.get()

    async def write(self, message: Any) -> None:
        data = self._call.serialize(message)
        await self._call.way.travel()
        self._call.replies.put_nowait(data)

    async def abort(self, code: grpc.StatusCode, text: str, trailers: Sequence[Any]) -> None:
        await self._call.way.travel()
        self._call.end(code, text, trailers)


class Call:
    """The client's side of a call."""

    def __init__(
        self,
        server: Server,
        way: Way,
        method: str,
        codecs: tuple[Callable[[Any], bytes], Callable[[bytes], Any]],
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        self.way, self.method, self.metadata = way, method, tuple(metadata or ())
        self._encode, self._decode = codecs
        self.due_s = None if timeout is None else loop.time() + timeout
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[Any] = asyncio.Queue()
        self.serialize: Callable[[Any], bytes] = bytes
        self.context = _Context(self)
        self._status: tuple[grpc.StatusCode, str, Sequence[Any]] | None = None
        late = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
        delay_s = max(0.0, timeout or 0.0)
        self._late = None if timeout is None else loop.call_later(delay_s, self.fail, *late)
        self._serving = loop.create_task(self._serve(server))

    async def _serve(self, server: Server) -> None:
        await self.way.travel()
        if server.is_down or (server.refuses and not self.method.endswith("/Watch")):
            self.fail(grpc.StatusCode.UNAVAILABLE, "connection refused")
        else:
            await server.serve(self)

    def end(self, code: grpc.StatusCode, text: str, trailers: Sequence[Any] = ()) -> None:
        """End the call with a status; the first one counts."""
        if self._status is None:
            self._status = code, text, trailers
            self.replies.put_nowait(grpc.aio.EOF)
            if self._late:
                self._late.cancel()

    def fail(self, code: grpc.StatusCode, text: str) -> None:
        """The same from outside of the handler, which is cancelled."""
        self.end(code, text)
        self._serving.cancel()

    def cancel(self) -> None:
        self.fail(grpc.StatusCode.CANCELLED, "Locally cancelled")

    async def write(self, message: Any) -> None:
        """Raises InvalidStateError: the call is over."""
        data = self._encode(message)
        await self._or_cancel(self.way.travel())
        if self._status:
            raise asyncio.InvalidStateError
        self.requests.put_nowait(data)

    async def done_writing(self) -> None:
        """Half-close."""
        self.requests.put_nowait(grpc.aio.EOF)

    async def read(self) -> Any:
        """The next message, or EOF at the end. Raises AioRpcError: the call has failed."""
        data = await self._or_cancel(self.replies.get())
        if data is not grpc.aio.EOF:
            return self._decode(data)
        self.replies.put_nowait(data)
        assert self._status
        code, text, trailers = self._status
        if code is grpc.StatusCode.OK:
            return data
        metadata = grpc.aio.Metadata(*trailers)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=text)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def _or_cancel(self, step: Awaitable[Any]) -> Any:
        try:
            return await step
        except asyncio.CancelledError:
            self.cancel()
            raise


class Channel:
    """As grpc's, to one server."""

    def __init__(self, server: Server, way: Way) -> None:
        self._call = partial(Call, server, way)

    async def close(self) -> None:
        """Calls end by themselves."""

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: object
    ) -> Any:
        return partial(self._call, method, (request_serializer, response_deserializer))

    def unary_stream(
        self,
        method: str,
        request_serializer: Any,
        response_deserializer: Any = lambda data: data,
        **_: object,
    ) -> Any:
        def start(request: Any, **sent: Any) -> Call:
            call = self._call(method, (request_serializer, response_deserializer), **sent)
            call.requests.put_nowait(request_serializer(request))
            call.requests.put_nowait(grpc.aio.EOF)
            return call

        return start

    def unary_unary(self, method: str, *codecs: Any, **named: Any) -> Any:
        start = self.unary_stream(method, *codecs, **named)

        async def answer(request: Any, **sent: Any) -> Any:
            return await start(request, **sent).read()

        return answer
