"""A client that blocks: `specrej.client.Client` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from specrej.client import Client, Retries
from specrej.contracts import Event
from specrej.credentials import Credentials

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    @wraps(method)
    def call(self: SyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return self._result(lambda: method(self._client, *args, **options))

    return call


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[Event, None]],
) -> Callable[Concatenate[SyncClient, P], Generator[Event, None, None]]:
    @wraps(method)
    def call(
        self: SyncClient, /, *args: P.args, **options: P.kwargs
    ) -> Generator[Event, None, None]:
        events, turn = method(self._client, *args, **options), asyncio.Lock()

        async def next_event() -> Event | None:
            async with turn:
                return await anext(events, None)

        async def end() -> None:
            async with turn:  # an interrupted wait ends first
                await events.aclose()

        try:
            while event := self._result(next_event):
                yield event
        finally:
            self._close_stream(end)

    return call


class _Closed(RuntimeError):
    """The client is closed, or of another process."""


class SyncClient:
    """The methods of `Client`, which block; `stream` is an iterator; its `close` cancels the call.

    Arguments and errors are those of `Client`. Any number of threads may call it. Close it, or use
    it as a context manager: its thread runs until then. A closed client raises RuntimeError, and so
    does one in a forked process, which lacks the thread: create it after the fork.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50050",
        *,
        timeout_s: float = 300.0,
        retries: Retries | None = None,
        **credentials: Unpack[Credentials],
    ) -> None:
        self._pid = os.getpid()
        # No call starts once `_end` has started. Reentrant, as the garbage collector may close a
        # stream in a thread that holds it.
        self._starting = threading.RLock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._closing = set[asyncio.Task[None]]()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specrej-client", daemon=True
        )
        self._thread.start()

        async def client() -> Client:
            return Client(address, timeout_s=timeout_s, retries=retries, **credentials)

        try:
            self._client = self._result(client)
        except BaseException:
            self._stop()
            raise

    generate = _blocking(Client.generate)
    stream = _iterating(Client.stream)
    describe = _blocking(Client.describe)
    is_serving = _blocking(Client.is_serving)
    record = _blocking(Client.record)
    records = _blocking(Client.records)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running calls and disconnect; no effect if it is closed."""
        self._check_process()
        with self._starting:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._stop()

    async def _end(self) -> None:
        await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _close_stream(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End a stream; in the client's own thread, which may garbage-collect one, do not wait."""
        if sys.is_finalizing():  # the thread has ended, and the connection ends with the process
            return
        if threading.current_thread() is self._thread:
            closing = self._loop.create_task(end())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        else:
            with suppress(_Closed):  # its end has closed the stream
                self._result(end)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # a lock of another process may be held for ever
            raise _Closed("the client is of another process: create it after the fork")

    def _result(self, start: Callable[[], Awaitable[T]]) -> T:
        """Raises RuntimeError: the client is closed, or of another process."""

        async def awaited() -> T:
            return await start()

        self._check_process()
        with self._starting:
            if self._is_closed:
                raise _Closed("the client is closed")
            running = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return running.result()
        finally:
            running.cancel()  # no effect unless the wait was interrupted
