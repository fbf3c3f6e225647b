"""Limits on uvicorn's HTTP/1.1: connections, headers, bodies, unread replies and disconnections."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import h11
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.errors import HTTPError, body_of
from gateway.settings import GatewaySettings
from specrej.telemetry import metrics, names

log = logging.getLogger(__name__)
log.setLevel(logging.ERROR)  # uvicorn warns of each invalid request: callers could fill the log

_UNREAD_BYTES = 32768
# Parts that a body may have: _FREE_PARTS, plus one per _PART_BYTES bytes.
_FREE_PARTS, _PART_BYTES = 1000, 256
_MAX_VALUES = 50_000

# Connections whose `connection_made` is not called yet, and timers that remove them in time.
Handshakes = dict[asyncio.Protocol, asyncio.TimerHandle]


class _Requests(h11.Connection):
    """A parser that refuses bodies in tiny chunks, each of which takes 10 us of the event loop, and
    long headers also where they arrive at once: h11 bounds only those that are incomplete."""

    _num_parts = _num_bytes = 0  # of the body that is being read

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_parts = self._num_bytes = 0
            fields = sum(len(name) + len(value) for name, value in event.headers)
            if len(event.target) + fields > self._max_header_bytes:
                raise h11.RemoteProtocolError("headers are too long", error_status_hint=431)
        elif isinstance(event, h11.Data):
            self._num_parts += 1
            self._num_bytes += len(event.data)
            if self._num_parts > _FREE_PARTS + self._num_bytes // _PART_BYTES:
                raise h11.RemoteProtocolError("chunks are too small")
        return event


class Connection(H11Protocol):
    """A connection without pipelining: a request before the last answer is complete ends it.

    One timer bounds the wait for headers, another the time in which no byte of a reply is read.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        settings: GatewaySettings,
        handshakes: Handshakes,
    ) -> None:
        super().__init__(config, state, {})
        self.conn = _Requests(settings.max_header_bytes)
        self._settings = settings
        self._handshakes = handshakes
        self.access_log = False  # it has query strings
        self.logger = log
        self._end_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if timer := self._handshakes.pop(self, None):
            timer.cancel()
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        self._end_after(self._settings.header_s)
        allowed, certificate = self._settings.allowed_names, transport.get_extra_info("peercert")
        is_full = len(self.connections) > self._settings.max_connections
        if is_full and not displace(self.connections):
            self._refuse(503, "too many connections", "overloaded")
        elif allowed and not {n for _, n in certificate.get("subjectAltName", ())} & {*allowed}:
            self._refuse(403, "the certificate has none of the allowed names", "permission_denied")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.more_body:
            self._end("pipelined")
            return
        super().data_received(data)
        if self._is_answering:
            self._cancel_end()
            if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
                self._end("pipelined")  # it arrived with the request before it
        elif self._is_idle and self.conn.their_state is h11.IDLE:
            # It was the rest of a body that was answered before. The base class has stopped the
            # timer of idle connections.
            self._cancel_end()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif not self._end_timer:
            self._end_after(self._settings.header_s)

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    @property
    def _is_idle(self) -> bool:
        """Whether its request was answered, and no byte of another one has arrived."""
        is_answered = bool(self.cycle and self.cycle.response_complete)
        return is_answered and not (self.transport.is_closing() or self.conn.trailing_data[0])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._reader_timer:
            self._await_reader()  # over TLS, a whole reply may be written without a pause

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, but not before its last reply was taken."""
        if self._num_unsent():
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later
        else:
            super().timeout_keep_alive_handler()
            self._end_after(self._settings.unread_s)  # a client may leave TLS open

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_end()
        self._cancel_reader()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # otherwise it would end, and count, after a reset

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too long headers."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        metrics.add(names.HTTP_REFUSED, 1, reason=code)
        body = json.dumps(body_of(HTTPError(status, message, code))[1])
        self.transport.write(
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()
        self._end_after(self._settings.header_s)

    def _num_unsent(self) -> int:
        """Bytes of replies that the client has not taken."""
        tls = getattr(self.transport, "_ssl_protocol", None)  # its socket has a buffer of its own
        below = tls._transport.get_write_buffer_size() if tls and tls._transport else 0
        return int(self.transport.get_write_buffer_size() + below)

    def _await_reader(self, before: float = math.inf) -> None:
        """End the connection when `unread_s` pass in which no byte of the reply is taken."""
        self._cancel_reader()
        left = self._num_unsent()
        # While a reply is still written, `left` may grow although the client reads.
        is_written = self._is_answering and not self.flow.write_paused
        if left >= before and not is_written:
            self._end("late")
        elif left:
            self._reader_timer = self.loop.call_later(
                self._settings.unread_s, self._await_reader, left
            )

    def _cancel_reader(self) -> None:
        if self._reader_timer:
            self._reader_timer.cancel()
        self._reader_timer = None

    def _end_after(self, seconds: float) -> None:
        self._cancel_end()
        self._end_timer = self.loop.call_later(seconds, self._end, "late")

    def _end(self, reason: str) -> None:
        metrics.add(names.HTTP_REFUSED, 1, reason=reason)
        self.transport.abort()

    def _cancel_end(self) -> None:
        if self._end_timer:
            self._end_timer.cancel()
        self._end_timer = None


def displace(connections: Iterable[Any]) -> bool:
    """Close an idle connection, if there is one: otherwise clients that keep theirs would shut out
    others, health checks among them."""
    idle = next((c for c in connections if c._is_idle and not c._num_unsent()), None)
    if idle:
        idle.transport.abort()  # closing TLS could take half a minute
    return idle is not None


T = TypeVar("T")

# All bodies that are being read have together at most this many times the bytes of one. Small ones
# are always read, so that a few bodies which stop half-way do not keep all others out.
_BODIES = 16
_SMALL_BODY = 65_536


class Disconnected(Exception):
    """The client has closed its connection; nothing can be sent."""


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client leaves; the body was read before.

    Raises:
        Disconnected: the client left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Bodies:
    """Reads bodies of at most `max_bytes`, each within `seconds`."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_bytes = 0  # of all that are being read

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            HTTPError: it is too long, late or not JSON, or too many are being read.
            Disconnected: the client left.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # any web page may send other types to this port
            raise HTTPError(415, "content-type must be application/json", "unsupported_media_type")
        if coding := request.headers.get("content-encoding", "").lower().replace("identity", ""):
            raise HTTPError(
                415,
                f"content-encoding {coding[:40]} is not supported: send plain JSON",
                "unsupported_media_type",
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                async for part in request.stream():
                    body += part
                    self._num_bytes += len(part)
                    self._check(len(body))
        except TimeoutError:
            raise HTTPError(408, f"no body within {self._seconds:g} s", "timeout") from None
        except ClientDisconnect:
            raise Disconnected from None
        finally:
            self._num_bytes -= len(body)
        if _has_too_many_values(body):
            text = f"the body must have at most {_MAX_VALUES} values"
            raise HTTPError(413, text, "request_too_large")
        return bytes(body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            text = f"the body must have at most {self._max_bytes} bytes"
            raise HTTPError(413, text, "request_too_large")
        if num_bytes > _SMALL_BODY and self._num_bytes > _BODIES * self._max_bytes:
            raise HTTPError(503, "too many bodies are being read", "overloaded", retry_after_s=1)


def _has_too_many_values(body: bytearray) -> bool:
    """Whether JSON has too many values; counted before parsing, as a value of two bytes, or an
    error about one, takes a thousand."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > _MAX_VALUES:
        return True
    # Keys are texts; before every other value is one of these signs.
    others = sum(part.count(sign) for part in plain.split(b'"')[::2] for sign in (b",", b"[", b"{"))
    return num_texts + others > _MAX_VALUES
