"""Work in the background that nobody waits for: bounded, one per key, over when it is closed."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from specrej.errors import SpecrejError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RefreshCounts:
    """What became of refreshes; `skipped` were one too many."""

    done: int = 0
    failed: int = 0
    skipped: int = 0


class Refreshes:
    """Answers that are being made anew."""

    def __init__(
        self,
        *,
        limit: int = 4,
        deadline_s: float = 600.0,
        what: str = "an answer could not be made anew",
    ) -> None:
        """At most `limit` run at once, each for at most `deadline_s` seconds.

        `what`: how the log puts it that one of them failed.
        """
        self.counts = RefreshCounts()
        self._limit = limit
        self._deadline_s = deadline_s
        self._what = what
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def num_running(self) -> int:
        """Refreshes under way."""
        return len(self._tasks)

    def start(self, key: str, work: Callable[[], Awaitable[None]]) -> None:
        """Begin `work`, unless that of its key is under way or there are too many already."""
        if key in self._tasks:
            return
        if self._closed or len(self._tasks) >= self._limit:
            self.counts.skipped += 1
            return
        # In a context of its own: neither the span nor anything else of the request that set it
        # off is its business.
        task = asyncio.create_task(self._run(work), context=contextvars.Context())
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def aclose(self) -> None:
        """Cancel what runs, wait until it has ended, start nothing any more."""
        self._closed = True
        if tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await work()
        except (SpecrejError, TimeoutError) as error:
            # The caller has had the old answer; the next one sets off the next attempt.
            self.counts.failed += 1
            log.info("%s: %s", self._what, type(error).__name__)
        except Exception:
            self.counts.failed += 1
            log.exception("%s", self._what)
        else:
            self.counts.done += 1
