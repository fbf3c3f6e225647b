"""Requests that hold their permits until a test finishes them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from orchestrator.edge.admission import Admission, Limits
from specrej.contracts.errors import Overloaded
from specrej.security import Share
from tests.orchestrator.caching import Clock
from tests.serving import turns, until

BOUND_S = 5.0


class Requests:
    """Numbered requests that hold their permits until the test finishes them."""

    def __init__(self, max_running: int, max_queued: int, **limits: int) -> None:
        self.clock = Clock()
        self.admission = Admission(Limits(max_running, max_queued, **limits), self.clock)
        self.tasks: list[asyncio.Task[None]] = []
        self.entered: list[int] = []
        self.running = 0
        self.most_running = 0
        self._ends: list[asyncio.Event] = []
        self.unused: Counter[str] = Counter()  # of each request, by tenant

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        return self.admission.running, self.admission.queued

    def start(
        self,
        tenant: str = "",
        tokens: int = 1,
        time_left_s: float = math.inf,
        share: Share | None = None,
    ) -> None:
        end = asyncio.Event()
        work = self._hold(len(self.tasks), end, tenant, tokens, time_left_s, share)
        self.tasks.append(asyncio.create_task(work))
        self._ends.append(end)

    async def arrive(self, count: int = 1, **request: Any) -> None:
        for _ in range(count):
            self.start(**request)
        await turns()

    async def _hold(self, number: int, end: asyncio.Event, *request: Any) -> None:
        async with self.admission.enter(*request) as permit:
            self.entered.append(number)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await end.wait()
            finally:
                self.running -= 1
                permit.unused = self.unused[request[0]]

    async def refused(self, **request: Any) -> Overloaded:
        """The error of one more request."""
        with pytest.raises(Overloaded) as raised:
            async with asyncio.timeout(BOUND_S), self.admission.enter(**request):
                pytest.fail("admitted")
        return raised.value

    def finish(self, number: int) -> None:
        self._ends[number].set()

    async def end(self, *numbers: int) -> None:
        """Finish requests, one after the other; others may then run."""
        for number in numbers:
            self.finish(number)
            await turns()

    async def next(self) -> int:
        """Finish the request that ran first of those that run; returns the one that runs next."""
        num_entered = len(self.entered)
        self.finish(next(n for n in self.entered if not self.tasks[n].done()))
        await until(lambda: len(self.entered) > num_entered, every_s=0)
        return self.entered[-1]

    async def finish_all(self) -> list[BaseException | None]:
        """Exceptions of all requests."""
        for end in self._ends:
            end.set()
        async with asyncio.timeout(BOUND_S):
            return await asyncio.gather(*self.tasks, return_exceptions=True)
