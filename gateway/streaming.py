"""Server-sent events: the chunks of OpenAI's API, or the orchestrator's own events."""

from __future__ import annotations

import asyncio
import json
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import JSON, Answer, in_thread
from gateway.bodies import Disconnected, until_disconnected
from gateway.errors import body_of, for_caller
from gateway.requests import Call
from specrej import telemetry
from specrej.contracts import Admitted, Event, Finished, RoundCompleted, TextDelta, wire

Parts = AsyncGenerator[bytes, None]

_COMMENT = b": keep-alive\n\n"
_MANY = 200  # candidates of a round, each of which takes 20 us
# Of a packed body: bytes that are sent at once, and how slowly a client may take it.
_SENT_BYTES = 65_536
_UNREAD_S = 30.0
_LEAST_BYTES_S = 16_384


class Events:
    """The events of a call; a wait for the next one ends after `silence_s`, the call goes on."""

    def __init__(self, events: AsyncGenerator[Event, None], silence_s: float) -> None:
        self._events = events
        self._silence_s = silence_s
        self._next: asyncio.Task[Event] | None = None
        self.request_id = ""

    async def peek(self) -> Event | None:
        """The next event, which stays the next one; None: there was none for `silence_s`.

        Raises:
            SpecrejError: the call failed.
        """
        if not self._next:
            self._next = asyncio.ensure_future(anext(self._events))
        await asyncio.wait({self._next}, timeout=self._silence_s)
        if not self._next.done():
            return None
        event = self._next.result()
        if isinstance(event, Admitted):
            self.request_id = event.request_id
        elif isinstance(event, Finished):
            self.request_id = event.generation.request_id
            telemetry.note(id=self.request_id, n=event.generation.n)
        return event

    async def all(self) -> AsyncGenerator[Event | None, None]:
        """Every event to the last; None in place of silence."""
        event: Event | None = None
        while not isinstance(event, Finished):
            if event := await self.peek():
                self._next = None
            yield event

    async def aclose(self) -> None:
        """End the call; its slots are freed."""
        if self._next:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._events.aclose()


class EventStream(Response):
    """Sends `parts` until the last, or until the client disconnects; then ends the call.

    A failure of the call is a last part, which `failure` makes of a status and OpenAI's body.
    """

    def __init__(
        self, events: Events, parts: Parts, call: Call, failure: Callable[[int, JSON], bytes]
    ) -> None:
        # Proxies such as nginx must not collect events.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        if events.request_id:
            headers["x-request-id"] = events.request_id
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._parts, self._call = events, parts, call
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        body = {"type": "http.response.body", "more_body": True}
        async with aclosing(self._parts):
            try:
                async for part in self._parts:
                    await send({**body, "body": part})
            except Exception as error:
                status, failure = body_of(for_caller(error, "a stream"), self._call.name_of)
                await send({**body, "body": self._failure(status, failure)})
        await send({**body, "more_body": False})


class PackedResponse(Response):
    """JSON in parts, which is compressed until it is sent; a client that takes it too slowly is
    disconnected."""

    def __init__(self, parts: Iterable[str], headers: dict[str, str]) -> None:
        packer, self._packed, num_bytes = zlib.compressobj(1), list[bytes](), 0
        for part in parts:
            num_bytes += len(data := part.encode())
            self._packed.append(packer.compress(data))
        self._packed.append(packer.flush())
        self._bound_s = _UNREAD_S + num_bytes / _LEAST_BYTES_S
        headers = {**headers, "content-length": f"{num_bytes}"}
        super().__init__(headers=headers, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                await until_disconnected(receive, self._send(send))
        except TimeoutError:
            raise Disconnected from None

    async def _send(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        body, unpacker = {"type": "http.response.body", "more_body": True}, zlib.decompressobj()
        for data in self._packed:
            while data:
                await send({**body, "body": unpacker.decompress(data, _SENT_BYTES)})
                data = unpacker.unconsumed_tail
        await send({**body, "body": unpacker.flush(), "more_body": False})


def answer_stream(events: Events, answer: Answer, call: Call) -> EventStream:
    """Chunks as the clients of an API read them."""
    # A call without an event in time has no id yet, and all chunks must have the same.
    answer.request_id = events.request_id or uuid.uuid4().hex
    parts = _parts_of(events, answer, call)
    return EventStream(
        events, parts, call, lambda status, body: _part(answer.failure(status, body))
    )


async def _parts_of(events: Events, answer: Answer, call: Call) -> Parts:
    for chunk in answer.opening():
        yield _part(chunk)
    async for event in events.all():
        match event:
            case None:
                yield _COMMENT
            case TextDelta():
                for chunk in answer.delta(event):
                    yield _part(chunk)
            case Finished(generation):
                next_end = partial(next, map(_part, answer.closing(generation)), b"")
                while part := await in_thread(next_end, is_large=call.wants_logprobs):
                    yield part
    yield answer.end


def raw_stream(events: Events, call: Call) -> EventStream:
    """Every event of the orchestrator under its name; a failure is the event `error`."""

    async def parts() -> Parts:
        async for event in events.all():
            is_large = isinstance(event, RoundCompleted) and len(event.trace.candidates) > _MANY
            if event is None:
                yield _COMMENT
            elif is_large or isinstance(event, Finished):
                yield await in_thread(partial(_named_part, event), is_large=call.wants_logprobs)
            else:
                yield _named_part(event)

    return EventStream(events, parts(), call, lambda _, failed: _part(failed, "error"))


def _named_part(event: Event) -> bytes:
    ((name, value),) = wire.to_plain(event).items()
    return _part(value, name)


def _part(value: Any, name: str = "") -> bytes:
    """An event; those that have a type are named by it."""
    name = name or value.get("type", "")
    # In ASCII: some clients take U+2028 and U+0085 for ends of lines.
    data = json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode() if name else f"data: {data}\n\n".encode()
