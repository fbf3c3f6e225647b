"""Calls to a server with OpenAI's API: connections, retries, and what its errors mean here."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import httpx2

from generator_service.settings import GeneratorSettings
from generator_service.stock.requests import Places
from specrej.contracts import errors
from specrej.reloading_file import ReloadingFile, read_line
from specrej.security import may_use_proxy
from specrej.server.serving import time_left_s

log = logging.getLogger(__name__)

_ATTEMPTS = 4
# Of our own; the server's Retry-After may be longer.
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_MAX_RETRY_AFTER_S = 86_400.0
_CONNECT_S = 10.0
_MOST_BYTES = 64 << 20  # of a whole answer, and of a line of a stream
# The server has closed a connection that was kept, before it received the request.
_STALE = ("RemoteProtocolError", "ReadError", "WriteError")
_MISFITS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
Body = Mapping[str, Any]


class Server:
    """A server's URL, key and connections."""

    def __init__(self, settings: GeneratorSettings) -> None:
        """Raises OSError or ValueError: the key cannot be read."""
        self.url = settings.remote_url.rstrip("/")
        self._affinity = settings.remote_affinity_header
        self._places = Places(settings.remote_requests)
        path = settings.remote_key_file
        self._key = ReloadingFile((path,), partial(read_line, path)) if path else None
        self._client = httpx2.AsyncClient(
            # Compressed answers are not read: a few bytes could be gigabytes.
            headers={"Accept-Encoding": "identity"},
            limits=httpx2.Limits(max_connections=settings.remote_requests + 1),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=may_use_proxy(self.url),
        )

    async def get(self, path: str) -> Any:
        """The JSON of a resource; None if the server does not have it.

        Raises:
            SpecrejError: as `messages`.
        """
        try:
            async with self._response("GET", path, None, "") as response:
                return _parsed(await _whole(response))
        except _Failed as failed:
            if failed.status in (404, 405, 501):
                return None
            raise failed.error(0) from failed

    async def messages(
        self, path: str, body: Body, session: str, tenant: str = ""
    ) -> AsyncGenerator[Any, None]:
        """The JSON of the server's messages: one, or if `body` has `stream` those of its stream.

        A request that fails before its first message is repeated. Closing the iterator closes the
        connection.

        Raises:
            InvalidRequest: the server refuses the request; with its reason.
            Overloaded, Unavailable: the last attempt failed so, or the next delay exceeds the time
                left (without a deadline, `_MAX_DELAY_S`); a stream broke off.
            InternalError: the server refuses the key, or its answer cannot be read.
        """
        for attempt in range(_ATTEMPTS):
            has_begun = False
            try:
                async with (
                    self._places.take(session, tenant),
                    aclosing(self._attempt(path, body, session)) as messages,
                ):
                    async for message in messages:
                        has_begun = True
                        yield message
                return
            except _Failed as failed:
                if has_begun:
                    raise errors.Unavailable("the endpoint broke off a stream") from failed
                error = failed.error(attempt)
                delay_s = error.retry_after_s or 0.0
                if not attempt and failed.reason in _STALE:
                    delay_s = 0.0
                left_s = time_left_s()
                longest_s = _MAX_DELAY_S if left_s is None else left_s
                is_last = attempt + 1 == _ATTEMPTS or not isinstance(error, errors.RetryableError)
                if is_last or delay_s > longest_s:
                    raise error from failed
                log.info("%s; again in %.1f s", error.message, delay_s)
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, path: str, body: Body, session: str) -> AsyncGenerator[Any, None]:
        """Raises _Failed: the server has refused it, or does not answer."""
        async with self._response("POST", path, body, session) as response:
            if "event-stream" not in response.headers.get("content-type", ""):
                yield _parsed(await _whole(response))
                return
            is_complete = False
            # Up to the end of the body, not of the messages: the connection can be used again.
            async for line in _lines(response):
                name, _, data = line.partition(b":")
                if name != b"data" or is_complete:
                    continue
                if is_complete := data.strip() == b"[DONE]":
                    continue
                message = _parsed(data)
                if isinstance(message, dict) and (error := message.get("error")):
                    code = error.get("code") if isinstance(error, dict) else None
                    raise _Failed(_reason(data), code if isinstance(code, int) else 500)
                yield message
        if not is_complete:
            raise _Failed("its stream has no end")

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Body | None, session: str
    ) -> AsyncIterator[httpx2.Response]:
        """A response of status 200, whose body is still to be read.

        Raises:
            _Failed: another status, or no response; also from the body of the `with` statement.
        """
        headers = {"Authorization": f"Bearer {self._key.get()}"} if self._key else {}
        if session and self._affinity:
            headers[self._affinity] = session
        try:
            async with self._client.stream(
                method, f"{self.url}{path}", json=body, headers=headers
            ) as response:
                if response.status_code == 200:
                    yield response
                    return
                answer = await _whole(response)
        except httpx2.HTTPError as error:
            raise _Failed(type(error).__name__) from error
        retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
        raise _Failed(_reason(answer), response.status_code, retry_after_s)


class _Failed(Exception):
    """An attempt failed; `reason`: the server's, or without a status the kind of error."""

    def __init__(self, reason: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status
        self._retry_after_s = retry_after_s

    def error(self, attempt: int) -> errors.SpecrejError:
        """What callers receive; if another attempt may succeed, with the time until then."""
        status = self.status
        if status in (401, 403):
            return errors.InternalError(f"the endpoint refuses the key: status {status}")
        if status not in (0, 408, 409, 429) and status < 500:
            reason = f"the endpoint refuses it with status {status}: {self.reason}"
            return errors.InvalidRequest([errors.Violation("sampling", reason)])
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt * random.uniform(1, 1.5))
        delay_s = max(delay_s, self._retry_after_s)
        if status == 429:
            return errors.Overloaded("the endpoint limits requests", retry_after_s=delay_s)
        reason = f"answers with status {status}" if status else f"does not answer: {self.reason}"
        return errors.Unavailable(f"the endpoint {reason}", retry_after_s=delay_s)


def encodable(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs, which UTF-8 lacks and JSON may have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@contextmanager
def reading() -> Iterator[None]:
    """Raises InternalError: an answer that is read within has another form than the API's."""
    try:
        yield
    except _MISFITS as error:
        reason = encodable(f"{type(error).__name__} {error}"[:200])
        raise errors.InternalError(f"the endpoint's answer cannot be read: {reason}") from error


def _parsed(data: bytes | bytearray) -> Any:
    with reading():
        return json.loads(data.decode("utf-8", "replace"))


async def _whole(response: httpx2.Response) -> bytearray:
    """The body. Raises InternalError: it is too long."""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part  # bytes would be copied for each part
        _check_length(body)
    return body


async def _lines(response: httpx2.Response) -> AsyncIterator[bytearray]:
    """The lines of the body, which end at b"\n" only: JSON may have U+2028, at which Python's
    `splitlines` splits. Raises InternalError: one is too long."""
    line = bytearray()
    async for part in response.aiter_raw():
        line += part
        if b"\n" in part:
            *lines, line = line.split(b"\n")
            for complete in lines:
                yield complete
        _check_length(line)


def _check_length(received: bytearray) -> None:
    if len(received) > _MOST_BYTES:
        raise errors.InternalError(f"the endpoint's answer has more than {_MOST_BYTES} bytes")


def _retry_after_s(text: str) -> float:
    """Seconds, at most a day; 0 if it is not a number, such as a date."""
    with suppress(ValueError):
        return min(_MAX_RETRY_AFTER_S, max(0.0, float(text)))
    return 0.0


def _reason(answer: bytes | bytearray) -> str:
    with suppress(*_MISFITS):
        return encodable(str(json.loads(answer)["error"]["message"])[:200])
    return "without a reason"
