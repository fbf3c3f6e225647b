"""One connection: uvicorn's HTTP/1.1, with bounds on silence, unread replies and number."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gateway.errors import HTTPError, body_of
from gateway.settings import GatewaySettings
from specrej.telemetry import metrics, names

_UNREAD_BYTES = 32768


class Connection(H11Protocol):
    """A connection without pipelining: a request in front of an unfinished answer ends it.

    Its one timer ends it while headers are awaited, and while a reply is not read.
    """

    def __init__(self, config: Config, state: ServerState, settings: GatewaySettings) -> None:
        super().__init__(config, state, {})
        self._settings = settings
        self.access_log = False  # it has query strings
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        self._end_after(self._settings.header_s)
        allowed, certificate = self._settings.allowed_names, transport.get_extra_info("peercert")
        if len(self.connections) > self._settings.max_connections:
            self._refuse(503, "too many connections", "overloaded")
        elif allowed and not {name for _, name in certificate["subjectAltName"]} & {*allowed}:
            self._refuse(403, "the certificate has none of the allowed names", "permission_denied")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering and not self.cycle.more_body:
            self._end("pipelined")
            return
        super().data_received(data)
        if self._is_answering:
            self._cancel_timer()
        elif not self._timer:
            self._end_after(self._settings.header_s)

    @property
    def _is_answering(self) -> bool:
        return bool(self.cycle and not self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_after(self._settings.unread_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timer()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_after(self._settings.unread_s)  # closing waits for the reader of what is left

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

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

    def _end_after(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._end, "late")

    def _end(self, reason: str) -> None:
        metrics.add(names.HTTP_REFUSED, 1, reason=reason)
        self.transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
