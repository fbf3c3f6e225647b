"""A client that blocks: `specrej.client.Client` on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from specrej.client.client import Client, Retries
from specrej.contracts import Event
from specrej.security import Credentials

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]:
    @wraps(method)
    def call(self: SyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        return self._wait(lambda: method(self._client, *args, **options))

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
            while event := self._wait(next_event):
                yield event
        finally:
            # Without a wait: the garbage collector may close a stream in the client's own thread.
            if not sys.is_finalizing():
                with suppress(RuntimeError):  # the end of the client has closed the stream
                    self._start(end)

    return call


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
        async def client() -> Client:
            return Client(address, timeout_s=timeout_s, retries=retries, **credentials)

        self._pid, self._is_closed = os.getpid(), False
        self._starting = threading.RLock()  # reentrant: a collected stream ends in any thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specrej-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = self._wait(client)
        except BaseException:
            self._stop()
            raise

    generate = _blocking(Client.generate)
    reply = _blocking(Client.reply)
    stream = _iterating(Client.stream)
    score = _blocking(Client.score)
    describe = _blocking(Client.describe)
    is_serving = _blocking(Client.is_serving)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running calls and disconnect; no effect if closed, or in a forked process."""
        with suppress(RuntimeError):
            with self._starting:
                ending = self._start(self._end)
                self._is_closed = True  # no call starts behind the end
            ending.result()
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

    def _start(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Raises RuntimeError: the client is closed, or of another process."""
        if os.getpid() != self._pid:  # before the lock, which another thread may have held
            raise RuntimeError("the client is of another process: create it after the fork")
        with self._starting:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            return asyncio.run_coroutine_threadsafe(begin(), self._loop)

    def _wait(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        running = self._start(begin)
        try:
            return running.result()
        finally:
            running.cancel()  # no effect unless the wait was interrupted
