"""Work beside the event loop: background tasks that no request waits for, and large messages."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from specrej.contracts import (
    Generation,
    RankedCandidate,
    RequestRecord,
    RoundCompleted,
    RoundTrace,
)
from specrej.contracts.errors import SpecrejError
from specrej.security import current_caller

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

# Packing so many tokens or traced candidates takes about 3 ms.
_LARGE = 1000
_CHARACTERS = 64  # of a text, which are packed as fast as one token
# Reading so many bytes, which are compressed, takes about as long.
_LARGE_BYTES = 8192

# Not the event loop's own threads, which all rounds need.
_THREADS = ThreadPoolExecutor(4, "messages")
_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


async def packed(pack: Callable[[T], R], value: T) -> R:
    """Return `pack(value)`, computed in a thread if the value is large, so that calls and health
    checks do not wait for the event loop."""
    return pack(value) if num_values(value) < _LARGE else await in_thread(pack, value)


async def unpacked(unpack: Callable[[Any], R], stored: object) -> R:
    """`unpack(stored)`; in a thread if it is large, as for `packed`."""
    size = len(stored) if isinstance(stored, bytes) else 0
    return unpack(stored) if size < _LARGE_BYTES else await in_thread(unpack, stored)


async def in_thread(work: Callable[[T], R], value: T) -> R:
    """Return `work(value)`, computed in a thread; one at a time per tenant, so that no tenant
    occupies all threads."""
    turn = _turns.setdefault(current_caller().tenant, asyncio.Lock())
    async with turn:
        working = asyncio.get_running_loop().run_in_executor(_THREADS, work, value)
        try:
            return await asyncio.shield(working)
        finally:
            await asyncio.wait({working})  # after a cancellation, too, the thread is not free yet


def num_values(value: object) -> int:
    """Tokens, traced candidates and parts of texts of an event, an answer or a record."""
    match value:
        case object(generation=Generation(candidates, rounds)):
            return sum(map(num_values, (*rounds, *candidates)))
        case RankedCandidate():
            tokens = len(value.token_ids) + sum(len(top.tokens) for top in value.top_logprobs)
            return tokens + len(value.text) // _CHARACTERS
        case RequestRecord(rounds=recorded):
            return sum(num_values(done.trace) for done in recorded)
        case RoundCompleted(trace, texts=texts):
            return num_values(trace) + sum(len(item.text) for item in texts) // _CHARACTERS
        case RoundTrace():
            return len(value.candidates)
        case _:
            return 0


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, whatever that is.

    `asyncio.wait` does not raise the task's CancelledError. Suppressing it around `await task`
    would also suppress a cancellation of the caller.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # otherwise asyncio logs it as lost


class BackgroundTasks:
    """At most one task per key and `limit` in all, each cancelled after `deadline_s` seconds.

    `purpose` names the work in the log line of a failure. A key whose task has ended has no other
    one for `rest_s` seconds.
    """

    def __init__(
        self, purpose: str, *, limit: int = 4, deadline_s: float = 600.0, rest_s: float = 0.0
    ) -> None:
        self._purpose = purpose
        self._limit = limit
        self._deadline_s = deadline_s
        self._rest_s = rest_s
        self._resting: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def num_running(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def start(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`; do nothing if a task of `key` runs or rests, at the limit, or after close.

        Its context is empty: it inherits neither the span nor the deadline of a request.
        """
        is_known = key in self._tasks or key in self._resting
        if self._closed or is_known or len(self._tasks) >= self._limit:
            return
        task = asyncio.create_task(self._run(work), context=contextvars.Context())
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._end(key))

    async def aclose(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self._closed = True
        await asyncio.gather(*map(ended, self._tasks.values()))

    def _end(self, key: str) -> None:
        del self._tasks[key]
        if self._rest_s:
            self._resting.add(key)
            asyncio.get_running_loop().call_later(self._rest_s, self._resting.discard, key)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await work()
        except (SpecrejError, TimeoutError) as error:
            log.info("%s failed: %s", self._purpose, type(error).__name__)
        except Exception:
            log.exception("%s failed", self._purpose)
