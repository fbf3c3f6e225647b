"""How requests arrive: bodies within bounds, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from gateway.errors import HTTPError

T = TypeVar("T")

# Bytes of all bodies that are being read at the same time, in multiples of the largest one.
_BODIES = 32


class Disconnected(Exception):
    """The client has closed its connection; nothing can be sent."""


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client disconnects.

    The request's body must have been read.

    Raises:
        Disconnected: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Bodies:
    """Reads bodies of at most `max_bytes`, each within `seconds`, and bounds all of them."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            HTTPError: it is too long, late, or no JSON by its type; or too many are being read.
            Disconnected: the client left.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # other types reach this port from any web page
            text = "must have content-type: application/json"
            raise HTTPError(415, text, code="unsupported_media_type")
        parts: list[bytes] = []
        with self._counted() as add:
            try:
                async with asyncio.timeout(self._seconds):
                    async for part in request.stream():
                        parts.append(part)
                        add(len(part))
            except TimeoutError:
                text = f"the body did not arrive within {self._seconds:g} s"
                raise HTTPError(408, text, code="timeout") from None
            except ClientDisconnect:
                raise Disconnected from None
        return b"".join(parts)

    @contextmanager
    def _counted(self) -> Iterator[Any]:
        size = 0

        def add(num_bytes: int) -> None:
            nonlocal size
            size += num_bytes
            self._num_bytes += num_bytes
            if size > self._max_bytes:
                text = f"the body must have at most {self._max_bytes} bytes"
                raise HTTPError(413, text, code="request_too_large")
            if self._num_bytes > _BODIES * self._max_bytes:
                raise HTTPError(
                    503, "too many bodies are being read", code="overloaded", retry_after_s=1
                )

        try:
            yield add
        finally:
            self._num_bytes -= size
