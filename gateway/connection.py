"""One connection: uvicorn's HTTP/1.1 within bounds on silence, unread replies and number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.errors import HTTPError, body_of
from specrej import telemetry

_WRITE_BUFFER_BYTES = 32768


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds that a client may be silent or not read; connections; certificate names."""

    header_s: float
    unread_s: float
    max_connections: int
    allowed_names: Collection[str] = ()


class Connection(H11Protocol):
    """HTTP/1.1 without pipelining: a request in front of an unfinished answer ends the connection.

    A connection has one timer, which ends it: while its headers are awaited, and while its reply
    is not read.
    """

    def __init__(
        self, config: Config, state: ServerState, bounds: Bounds, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(config, state, {}, loop)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        self._end_after(self._bounds.header_s)
        if len(self.connections) > self._bounds.max_connections:
            text = "too many connections"
            self._refuse(HTTPError(503, text, code="overloaded", retry_after_s=1))
        elif not self._is_allowed(transport.get_extra_info("peercert")):
            text = "the certificate has none of the allowed names"
            self._refuse(HTTPError(403, text, code="permission_denied"))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.more_body:
            self._end("pipelined")
            return
        super().data_received(data)
        if self._is_answering:
            self._cancel_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._end_after(self._bounds.header_s)

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_after(self._bounds.unread_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_after(self._bounds.unread_s)  # closing waits for the reader of what is left

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too long headers."""
        self._refuse(HTTPError(400, msg, code="invalid_http"))

    def _refuse(self, error: HTTPError) -> None:
        status, body = body_of(error)
        text = json.dumps(body).encode()
        retry = f"retry-after: {error.retry_after_s:.0f}\r\n" if error.retry_after_s else ""
        head = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n{retry}"
            f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
        )
        telemetry.metrics.add(telemetry.names.HTTP_REFUSED, 1, reason=error.code)
        self.transport.write(head.encode() + text)
        self.transport.close()
        self._end_after(self._bounds.header_s)

    def _is_allowed(self, certificate: Any) -> bool:
        names = {name for _, name in (certificate or {}).get("subjectAltName", ())}
        return not self._bounds.allowed_names or not names.isdisjoint(self._bounds.allowed_names)

    def _end_after(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._end, "late")

    def _end(self, reason: str) -> None:
        telemetry.metrics.add(telemetry.names.HTTP_REFUSED, 1, reason=reason)
        self.transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
