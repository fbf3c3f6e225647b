"""Calls to a server with OpenAI's API: connections, retries, and what its errors mean here."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import httpx2

from generator_service.settings import GeneratorSettings
from specrej.contracts.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Violation,
)
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
# What reading JSON of another form than the API's raises, besides failed look-ups.
UNREADABLE = (ValueError, TypeError, RecursionError)
Body = Mapping[str, Any]


class Server:
    """A server's URL, key and connections."""

    def __init__(self, settings: GeneratorSettings) -> None:
        """Raises OSError or ValueError: the key cannot be read."""
        self.url = settings.remote_url.rstrip("/")
        self._affinity = settings.remote_affinity_header
        self._places = asyncio.Semaphore(settings.remote_requests)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        path = settings.remote_key_file
        self._key = ReloadingFile((path,), partial(read_line, path)) if path else None
        self._client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=settings.remote_requests + 1),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=may_use_proxy(self.url),
        )

    async def get(self, path: str) -> Any:
        """The JSON of a resource; None if the server does not have it.

        Raises:
            SpecrejError: as `messages`.
        """
        response = await self._request("GET", path, None, "")
        if isinstance(response, httpx2.Response) and response.status_code in (404, 405, 501):
            return None
        if isinstance(response, str) or response.status_code != 200:
            raise _failure(response, 0)
        return _parsed(response.content)

    async def messages(self, path: str, body: Body, session: str) -> AsyncGenerator[Any, None]:
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
                async with self._place(session):
                    async for message in self._attempt(path, body, session):
                        has_begun = True
                        yield message
                return
            except _Failed as failed:
                failure, delay_s = _failure(failed.response, attempt), 0.0
                if has_begun:
                    raise Unavailable("the endpoint broke off a stream") from failed
                left_s = time_left_s()
                delay_s = failure.retry_after_s or 0.0
                longest_s = _MAX_DELAY_S if left_s is None else left_s
                if attempt + 1 == _ATTEMPTS or delay_s > longest_s:
                    raise failure from failed
                log.info("%s; again in %.1f s", failure.message, delay_s)
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, path: str, body: Body, session: str) -> AsyncIterator[Any]:
        """Raises _Failed: the server has refused it, or does not answer."""
        if not body.get("stream"):
            response = await self._request("POST", path, body, session)
            if isinstance(response, str) or response.status_code != 200:
                raise _Failed(response)
            yield _parsed(response.content)
            return
        headers, is_complete = self._headers(session), False
        try:
            async with self._client.stream(
                "POST", f"{self.url}{path}", json=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _Failed(response)
                async for line in response.aiter_lines():
                    name, _, data = line.partition(":")
                    if name != "data":
                        continue
                    if is_complete := data.strip() == "[DONE]":
                        break
                    yield _parsed(data)
        except httpx2.HTTPError as error:
            raise _Failed(type(error).__name__) from error
        if not is_complete:
            raise _Failed("its stream has no end")

    @asynccontextmanager
    async def _place(self, session: str) -> AsyncIterator[None]:
        """One of the requests at the same time. Sessions take turns: a small one does not wait for
        all of a large one."""
        turn = self._turns.setdefault(session, asyncio.Lock())
        async with turn:
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    async def _request(
        self, method: str, path: str, body: Body | None, session: str
    ) -> httpx2.Response | str:
        """The response, or the kind of error without one."""
        try:
            return await self._client.request(
                method, f"{self.url}{path}", json=body, headers=self._headers(session)
            )
        except httpx2.HTTPError as error:
            return type(error).__name__

    def _headers(self, session: str) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self._key.get()}"} if self._key else {}
        if session and self._affinity:
            headers[self._affinity] = session
        return headers


class _Failed(Exception):
    """An attempt failed; `response`: the server's, or the kind of error without one."""

    def __init__(self, response: httpx2.Response | str) -> None:
        super().__init__(response)
        self.response = response


def encodable(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs, which UTF-8 lacks and JSON may have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def unreadable(error: BaseException) -> InternalError:
    """The error for an answer of another form than the API's."""
    reason = encodable(f"{type(error).__name__} {error}"[:200])
    return InternalError(f"the endpoint's answer cannot be read: {reason}")


def _parsed(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except UNREADABLE as error:
        raise unreadable(error) from error


def _failure(response: httpx2.Response | str, attempt: int) -> Overloaded | Unavailable:
    """What an attempt failed with, and when the next one may succeed.

    Raises:
        InvalidRequest, InternalError: another attempt would fail, too.
    """
    delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**attempt * random.uniform(1, 1.5))
    if isinstance(response, str):
        reason = f"the endpoint does not answer: {response}"
        return Unavailable(reason, retry_after_s=delay_s)
    status = response.status_code
    if status in (401, 403):
        raise InternalError(f"the endpoint refuses the key: status {status}")
    if status not in (408, 409, 429) and status < 500:
        reason = f"the endpoint refuses it with status {status}: {_reason(response.content)}"
        raise InvalidRequest([Violation("sampling", reason)])
    delay_s = max(delay_s, _retry_after_s(response.headers.get("retry-after", "")))
    if status == 429:
        return Overloaded("the endpoint limits requests", retry_after_s=delay_s)
    return Unavailable(f"the endpoint answers with status {status}", retry_after_s=delay_s)


def _retry_after_s(text: str) -> float:
    """Seconds, at most a day; 0 if it is not a number, such as a date."""
    with suppress(ValueError):
        return min(_MAX_RETRY_AFTER_S, max(0.0, float(text)))
    return 0.0


def _reason(answer: bytes) -> str:
    with suppress(LookupError, *UNREADABLE):
        return encodable(str(json.loads(answer)["error"]["message"])[:200])
    return "without a reason"
