"""A bounded number of requests run, a bounded number wait in line, the rest are refused at once.

Standard library and the exception tree only. It knows no request, only how many there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from specrej.errors import Overloaded

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0
_UNKNOWN_SERVICE_S = 1.0
_RECENT = 0.1  # weight of the latest service time in their moving mean


class Admission:
    """Permits for `max_running` requests, first come first served, and `max_queued` places in line.

    Invariant: somebody waits only while all permits are held. A permit given back goes straight
    to the head of the line, so that no newcomer can take it and no cancellation can lose it.
    """

    def __init__(
        self, max_running: int, max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` tells seconds.

        Raises:
            ValueError: fewer than 1 permit or 0 places.
        """
        if max_running < 1 or max_queued < 0:
            raise ValueError(f"max_running {max_running} < 1 or max_queued {max_queued} < 0")
        self.running = 0
        self._max_running = max_running
        self._max_queued = max_queued
        self._clock = clock
        self._line: deque[asyncio.Future[None]] = deque()
        self._mean_service_s: float | None = None

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return sum(not place.done() for place in self._line)

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Hold a permit; waits for it in line. Leaving the context, however, gives it back.

        Raises:
            Overloaded: the line is full; after `retry_after_s` seconds it should have moved on.
        """
        await self._acquire()
        started = self._clock()
        try:
            yield
        finally:
            self._note_service(self._clock() - started)
            self._release()

    async def _acquire(self) -> None:
        if self.running < self._max_running:
            self.running += 1
            return
        queued = self.queued
        if queued >= self._max_queued:
            raise Overloaded(
                f"{self.running} requests run and {queued} wait",
                retry_after_s=self._wait_s(queued + 1),
            )
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(place)
            else:  # cancelled between getting the permit and waking up
                self._release()
            raise

    def _release(self) -> None:
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    def _leave(self, place: asyncio.Future[None]) -> None:
        if place in self._line:  # a release may have passed over it already
            self._line.remove(place)

    def _wait_s(self, position: int) -> float:
        """Seconds until the request at `position` (1: next) of the line would get a permit."""
        service_s = _UNKNOWN_SERVICE_S if self._mean_service_s is None else self._mean_service_s
        return min(max(service_s * position / self._max_running, _MIN_RETRY_S), _MAX_RETRY_S)

    def _note_service(self, service_s: float) -> None:
        mean_s = service_s if self._mean_service_s is None else self._mean_service_s
        self._mean_service_s = mean_s + _RECENT * (service_s - mean_s)
