"""Answers as server-sent events: chunks of OpenAI's API, or the core's own events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import Answer
from gateway.calls import Call
from gateway.errors import body_of
from gateway.mapping import Request
from gateway.receiving import until_disconnected
from specrej import telemetry, wire
from specrej.contracts import Admitted, Event, Finished, RoundCompleted
from specrej.errors import SpecrejError

_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class Events:
    """The events of a call. `next` may be called again after it returned None."""

    def __init__(self, events: AsyncGenerator[Event, None], silence_s: float) -> None:
        self._events = events
        self._silence_s = silence_s
        self._next: asyncio.Task[Event] | None = None

    async def begin(self) -> None:
        """Wait for the first event, or for `silence_s` seconds.

        Raises:
            SpecrejError: the call failed before.
        """
        await self._wait()
        if self._next and self._next.done():
            error = self._next.exception()
            if error:
                raise error

    async def next(self) -> Event | None:
        """The next event, or None after `silence_s` seconds without one.

        Raises:
            SpecrejError: the call failed.
        """
        await self._wait()
        assert self._next
        if not self._next.done():
            return None
        done, self._next = self._next, None
        return done.result()

    async def _wait(self) -> None:
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
        await asyncio.wait({self._next}, timeout=self._silence_s)

    @property
    def request_id(self) -> str:
        """The request's id, once its first event has come."""
        if self._next and self._next.done() and not self._next.cancelled():
            event = self._next.result()
            if isinstance(event, Admitted):
                return event.request_id
            if isinstance(event, Finished):
                return event.generation.request_id
        return ""

    async def aclose(self) -> None:
        """End the call; its slots are freed."""
        if self._next:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()


class EventStream(Response):
    """Sends the parts that `write` yields until the end, or until the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, parts: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._parts = parts
        self.status_code = 200
        # Proxies such as nginx must not collect events.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        if events.request_id:
            self.headers["x-request-id"] = events.request_id
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._parts):
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def openai_stream(events: Events, answer: Answer, asked: Request, call: Call) -> EventStream:
    """Chunks as OpenAI's clients read them; a failure is a last one with `error`."""
    answer.request_id = events.request_id
    style = getattr(asked.specrej, "events", None)
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)

    async def parts() -> AsyncGenerator[bytes, None]:
        for chunk in answer.opening():
            yield _data(chunk)
        async for event in _until_finished(events):
            # A new event of the core, such as a delta of text, is a case here.
            match event:
                case None:
                    yield _COMMENT
                case RoundCompleted() if style:
                    yield _data(answer.round(event, style))
                case Finished():
                    for chunk in answer.closing(event, include_usage=has_usage):
                        yield _data(chunk)
        yield _DONE

    return EventStream(events, _with_error(parts(), call, lambda body: _data(body)))


def raw_stream(events: Events, call: Call) -> EventStream:
    """Every event of the core under its name; a failure is the event `error`."""

    async def parts() -> AsyncGenerator[bytes, None]:
        async for event in _until_finished(events):
            if event is None:
                yield _COMMENT
            else:
                ((name, value),) = wire.to_plain(event).items()
                yield _named(name, value)

    return EventStream(events, _with_error(parts(), call, lambda body: _named("error", body)))


async def _until_finished(events: Events) -> AsyncIterator[Event | None]:
    while True:
        event = await events.next()
        yield event
        if isinstance(event, Finished):
            telemetry.note(id=event.generation.request_id, n=event.generation.n)
            return


async def _with_error(
    parts: AsyncGenerator[bytes, None], call: Call, write: Callable[[Any], bytes]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        try:
            async for part in parts:
                yield part
        except SpecrejError as error:
            _, body = body_of(error, call.name_of)
            yield write(body)


def _data(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _named(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + _data(value)
