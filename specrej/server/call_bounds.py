"""The way of a call from its headers to its reply: bounds on waiting, number and size.

A call begins with its headers, and its message may never come; its reply may never be read. grpc
itself would wait for both without a bound, outside of any handler, and return UNKNOWN with a class
name for a message that cannot be decoded. So messages are read, and unary replies written, here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from sys import intern
from typing import Any, Self, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from specrej import telemetry
from specrej.contracts.errors import DeadlineExceeded, Overloaded, malformed
from specrej.telemetry import names

Context = grpc.aio.ServicerContext[Any, Any]
# Quoted: the class is generic only for type checkers.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Awaitable[Any]]
T = TypeVar("T")

_RETRY_S = 1.0
# On a cancelled call, `read` returns EOF up to this long before the handler is cancelled.
_CANCELLATION_S = 0.001


class Unread(Exception):
    """The client does not read the reply, so that no status can follow it."""


class Waits:
    """At most `most` calls wait at once, each at most `seconds`.

    One more displaces the oldest waiting call of the connection that has the most. So calls that
    send their message with their headers, and read their reply at once, are served even during a
    flood of calls that neither write nor read.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self.seconds = seconds
        self._peers: dict[asyncio.Timeout, str] = {}  # in order of arrival

    async def result(self, step: Awaitable[T], peer: str) -> T:
        """Await the step.

        Raises:
            TimeoutError: it is late.
            Overloaded: other calls displaced this one.
        """
        if len(self._peers) >= self._most:
            counts = Counter(self._peers.values())
            displaced = max(self._peers, key=lambda bound: counts[self._peers[bound]])
            del self._peers[displaced]
            if not displaced.expired():  # late by itself, and has not resumed yet
                displaced.reschedule(0)
        bound = asyncio.timeout(self.seconds)
        try:
            async with bound:
                self._peers[bound] = peer
                return await step
        except TimeoutError:
            if bound not in self._peers:
                raise _refusal("displaced", "too many calls that neither write nor read") from None
            raise
        finally:
            self._peers.pop(bound, None)


class CallBounds:
    """At most `max_calls` run at once, until their reply has been read.

    `messages` bounds those that wait for their first message, `replies` those that wait for the
    reader of a reply.
    """

    def __init__(self, max_calls: int, messages: Waits, replies: Waits) -> None:
        self._max_calls = max_calls
        self._messages = messages
        self._replies = replies
        self._running: Counter[str] = Counter()  # by tenant

    async def first_message(self, context: Context) -> Any:
        """The call's first message, serialized, or grpc.aio.EOF.

        Raises:
            DeadlineExceeded: none came in time.
            Overloaded: other calls displaced this one.
        """
        try:
            return await self._messages.result(context.read(), context.peer())
        except TimeoutError:
            telemetry.metrics.add(names.RPC_REFUSED, 1, reason="no_message")
            text = f"no message within {self._messages.seconds:g} s"
            raise DeadlineExceeded(text) from None

    async def write(self, context: Context, reply: Any) -> None:
        """Write a reply.

        Raises:
            Unread: the client did not read it in time, or other calls displaced this one.
        """
        try:
            await self._replies.result(context.write(reply), context.peer())
        except TimeoutError:
            telemetry.metrics.add(names.RPC_REFUSED, 1, reason="unread")
            raise Unread from None
        except Overloaded:
            raise Unread from None

    @contextmanager
    def running(self, tenant: str) -> Iterator[None]:
        """Count a call that has its message.

        Raises:
            Overloaded: `max_calls` run, or half as many of a tenant with a name.
        """
        if self._running.total() >= self._max_calls:
            raise _refusal("calls", "too many calls")
        if tenant and self._running[tenant] >= max(1, self._max_calls // 2):
            raise _refusal("tenant_calls", "too many calls of the tenant")
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            self._running += Counter()  # drops tenants without calls


def _refusal(reason: str, text: str) -> Overloaded:
    telemetry.metrics.add(names.RPC_REFUSED, 1, reason=reason)
    return Overloaded(text, retry_after_s=_RETRY_S)


def bounded(
    handler: Any,
    bounds: CallBounds,
    check: Callable[[Any], None],
    wrap: Callable[[Handler], Handler],
    tenant: str,
) -> RpcHandler:
    """The handler within `wrap` and `bounds`; `check` receives each parsed message."""
    behavior, decode = getattr(handler, behavior_name(handler)), _decoder(handler, check)

    async def read(_: Any, context: Context) -> Any:
        messages = _Messages(await bounds.first_message(context), context, decode)
        with bounds.running(tenant):
            request = messages if handler.request_streaming else await messages.only()
            answer = behavior(request, context)
            if inspect.isasyncgen(answer):  # as that of reflection
                async for message in answer:
                    await bounds.write(context, message)
            else:
                reply = await answer
                if not handler.response_streaming:
                    await bounds.write(context, reply)

    return grpc.stream_stream_rpc_method_handler(wrap(read), None, handler.response_serializer)


def behavior_name(handler: RpcHandler) -> str:
    """The name of the handler's attribute with its behaviour, interned.

    CPython caches the last 4,096 attribute names, and equal strings that differ by identity count
    separately.
    """
    requests = "stream" if handler.request_streaming else "unary"
    return intern(f"{requests}_{'stream' if handler.response_streaming else 'unary'}")


class _Messages:
    """The messages of a call, whose first one has been read."""

    def __init__(self, first: Any, context: Context, decode: Callable[[bytes], Any]) -> None:
        self._next = first
        self._context = context
        self._decode = decode

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message, self._next = self._next, None
        if message is None:
            message = await self._context.read()
        if message is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLATION_S)
            raise StopAsyncIteration
        return self._decode(message)

    async def only(self) -> Any:
        """The message of a unary call. Raises InvalidRequest: there is none."""
        async for message in self:
            return message
        raise malformed()


def _decoder(handler: RpcHandler, check: Callable[[Any], None]) -> Callable[[bytes], Any]:
    """The handler's deserializer; a malformed or oversized message raises InvalidRequest."""
    parse: Any = handler.request_deserializer

    def decode(data: bytes) -> Any:
        try:
            message = parse(data)
            check(message)
            return message
        except DecodeError:
            raise malformed() from None

    return decode
