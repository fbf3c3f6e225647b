"""Reads the messages of calls: parses them, and checks them before and after."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from specrej.contracts.errors import InvalidRequest, malformed

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[..., Awaitable[Any]]  # of a request and a Context
# Of a parsed message; raises what the caller receives.
Check: TypeAlias = Callable[[Any], None]
Look: TypeAlias = Callable[[bytes, Any], None]

# On a cancelled call, `read` returns EOF up to this long before the handler is cancelled.
_CANCELLATION_S = 0.001


def reading(handler: Any, check: Check, look: Look | None = None) -> Handler:
    """The handler's behaviour with messages read and replies written here; `check` is given each
    message, `look` its bytes and descriptor before it is parsed."""
    unary = handler.unary_unary or handler.unary_stream
    behavior = unary or handler.stream_unary or handler.stream_stream

    async def read(_: Any, context: Context) -> None:
        parsed = partial(_parsed, parse=handler.request_deserializer, look=look, check=check)
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


class _Messages:
    """The messages of a call; `parsed` makes one of its bytes."""

    def __init__(self, context: Context, parsed: Callable[[bytes], Any]) -> None:
        self._context = context
        self._parsed = parsed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            await asyncio.sleep(_CANCELLATION_S)
            raise StopAsyncIteration
        return self._parsed(data)


def _parsed(data: bytes, parse: Any, look: Look | None, check: Check) -> Any:
    """The message. Raises InvalidRequest: it cannot be parsed, or a check refuses it."""
    if look:
        look(data, parse.__self__.DESCRIPTOR)
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
