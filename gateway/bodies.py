"""Bodies of requests, and calls that end when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from gateway.errors import HTTPError

_MAX_VALUES = 50_000

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
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # of all that are being read

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            HTTPError: it is too long or not JSON, or too many are being read.
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
            async for part in request.stream():
                body += part
                self._num_bytes += len(part)
                self._check(len(body))
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
