"""Reads the messages of calls: parses them, checks them, and bounds the time that this takes.

Parsing is work before any refusal: two megabytes of a million empty turns take a tenth of a second
of the event loop, in which no other call goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from specrej.contracts.errors import InvalidRequest, Overloaded, malformed

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[..., Awaitable[Any]]  # of a request and a Context
# Of a parsed message; raises what the caller receives.
Check: TypeAlias = Callable[[Any], None]

# On a cancelled call, `read` returns EOF up to this long before the handler is cancelled.
_CANCELLATION_S = 0.001
# Of messages that are parsed by turns; while they wait they may have so many bytes in all.
_LARGE_BYTES, _MOST_BYTES = 1 << 16, 64 << 20
# A turn that took longer than this is followed by a rest of three times as long.
_LONG_S, _REST = 0.005, 3


class Reader:
    """Reads the messages of all calls of a server."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting_bytes = 0

    def reading(self, handler: Any, check: Check) -> Handler:
        """The handler's behaviour with messages read and replies written here."""
        unary = handler.unary_unary or handler.unary_stream
        behavior = unary or handler.stream_unary or handler.stream_stream

        async def read(_: Any, context: Context) -> None:
            parsed = partial(self.parsed, parse=handler.request_deserializer, check=check)
            messages = _Messages(context, parsed)
            request = messages if handler.request_streaming else await anext(messages, None)
            if request is None:
                raise malformed()  # a unary call without a message
            answer = behavior(request, context)
            if inspect.isasyncgen(answer):  # as that of reflection
                async for message in answer:
                    await context.write(message)
            elif handler.response_streaming:
                await answer
            else:
                await context.write(await answer)

        return read

    async def parsed(self, data: bytes, parse: Callable[[bytes], Any], check: Check) -> Any:
        """The message, once it is its turn.

        Raises:
            InvalidRequest: it cannot be parsed, or `check` refuses it.
            Overloaded: too many bytes wait.
        """
        if len(data) < _LARGE_BYTES:
            return _parsed(data, parse, check)
        if self._waiting_bytes + len(data) > _MOST_BYTES:
            raise Overloaded("too many large messages at once", retry_after_s=1.0)
        self._waiting_bytes += len(data)
        try:
            await self._turn.acquire()
        finally:
            self._waiting_bytes -= len(data)
        began = time.perf_counter()
        try:
            return _parsed(data, parse, check)
        finally:
            took_s = time.perf_counter() - began
            rest_s = _REST * took_s if took_s > _LONG_S else 0.0
            asyncio.get_running_loop().call_later(rest_s, self._turn.release)


class _Messages:
    """The messages of a call; `parsed` makes one of its bytes."""

    def __init__(self, context: Context, parsed: Callable[[bytes], Awaitable[Any]]) -> None:
        self._context = context
        self._parsed = parsed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLATION_S)
            raise StopAsyncIteration
        return await self._parsed(data)


def _parsed(data: bytes, parse: Callable[[bytes], Any], check: Check) -> Any:
    try:
        message = parse(data)
    except DecodeError:
        raise malformed() from None
    try:
        check(message)
    except InvalidRequest as error:
        # The frames of a traceback would keep it until the client has read the status, with up to
        # 28 times the memory of its bytes.
        del message
        raise error.with_traceback(None) from None
    return message
