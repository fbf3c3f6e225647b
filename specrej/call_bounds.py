"""The way of a call from its headers to its handler: bounds on waiting, number and size.

A call begins with its headers, and its message may never come. grpc itself would wait for that of a
unary call without a bound, outside of any handler, and return UNKNOWN with a class name for one
that cannot be decoded. So all handlers read their messages here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from sys import intern
from typing import Any, Self, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from specrej import limits, telemetry
from specrej.errors import DeadlineExceeded, Overloaded
from specrej.telemetry import names

Context = grpc.aio.ServicerContext[Any, Any]
# Quoted: the class is generic only for type checkers.
RpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Handler = Callable[[Any, Context], Awaitable[Any]]

_RETRY_S = 1.0
# A cancelled call reads as ended this long before its handler is cancelled.
_CANCELLATION_S = 0.001


class CallBounds:
    """At most `max_calls` run at once, at most `max_waiting` wait for a message, each `message_s`.

    Further calls that wait displace the oldest one: a message that comes with its headers is read
    at once, also during a flood of calls without any.
    """

    def __init__(self, max_calls: int, max_waiting: int, message_s: float) -> None:
        self._max_calls = max_calls
        self._max_waiting = max_waiting
        self._message_s = message_s
        self._num_running = 0
        self._waiting: dict[asyncio.Timeout, None] = {}  # in order of arrival

    async def first_message(self, context: Context) -> Any:
        """The call's first message, serialized, or grpc.aio.EOF.

        Raises:
            DeadlineExceeded: none came in time.
            Overloaded: other calls displaced this one.
        """
        if len(self._waiting) >= self._max_waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.reschedule(0)
        bound = asyncio.timeout(self._message_s)
        try:
            async with bound:
                self._waiting[bound] = None
                return await context.read()
        except TimeoutError:
            if bound not in self._waiting:
                raise _refusal("displaced", "too many calls without a message") from None
            telemetry.metrics.add(names.RPC_REFUSED, 1, reason="no_message")
            raise DeadlineExceeded(f"no message within {self._message_s:g} s") from None
        finally:
            self._waiting.pop(bound, None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a call that has its message.

        Raises:
            Overloaded: `max_calls` run.
        """
        if self._num_running >= self._max_calls:
            raise _refusal("calls", "too many calls")
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1


def _refusal(reason: str, text: str) -> Overloaded:
    telemetry.metrics.add(names.RPC_REFUSED, 1, reason=reason)
    return Overloaded(text, retry_after_s=_RETRY_S)


def bounded(
    handler: Any,
    bounds: CallBounds,
    check: Callable[[bytes, Any], None],
    wrap: Callable[[Handler], Handler],
) -> RpcHandler:
    """The handler within `wrap` and `bounds`; `check` has each message and its descriptor first."""
    behavior, decode = getattr(handler, behavior_name(handler)), _decoder(handler, check)

    async def read(_: Any, context: Context) -> Any:
        messages = _Messages(await bounds.first_message(context), context, decode)
        with bounds.running():
            request = messages if handler.request_streaming else await messages.only()
            return await _answer(behavior(request, context), context)

    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return make(wrap(read), None, handler.response_serializer)


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
        raise limits.malformed()


async def _answer(answer: Any, context: Context) -> Any:
    """Await a coroutine; write the messages of a generator, as that of reflection."""
    if not inspect.isasyncgen(answer):
        return await answer
    async for message in answer:
        await context.write(message)
    return None


def _decoder(handler: RpcHandler, check: Callable[[bytes, Any], None]) -> Callable[[bytes], Any]:
    """The handler's deserializer; a malformed or oversized message raises InvalidRequest."""
    parse: Any = handler.request_deserializer
    message = parse.__self__.DESCRIPTOR  # generated handlers have its class's FromString

    def decode(data: bytes) -> Any:
        check(data, message)
        try:
            return parse(data)
        except DecodeError:
            raise limits.malformed() from None

    return decode
