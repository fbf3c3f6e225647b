"""Single flight: equal requests at the same time are one generation. One process, one event loop.

Standard library and the exception tree only. It starts no task: the first caller flies the plane
in its own task, with its own deadline, free to tell its client of events as it goes; the others
wait. What is generated, and what a key is, it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Generic, TypeVar

from specrej.errors import Cancelled, DeadlineExceeded, TooLate

T = TypeVar("T")

# How a leader ends for reasons of its own: the next in line can still succeed. Leaving by
# CancelledError or GeneratorExit, which are no `Exception`s, counts as such too.
OWN_REASONS = (TimeoutError, DeadlineExceeded, TooLate, Cancelled)


class Flight(Generic[T]):
    """One generation under way, or its result."""

    def __init__(self) -> None:
        self.landed = False
        self._result: T | None = None
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None
        self._over = asyncio.Event()

    @property
    def result(self) -> T:
        """What the leader landed with.

        Raises:
            RuntimeError: still in the air.
        """
        if not self.landed:
            raise RuntimeError("still in the air")
        return self._result  # type: ignore[return-value]  # T may itself be optional

    def land(self, result: T) -> None:
        """The leader has the result: the others get it now, whatever the leader still does."""
        self._result = result
        self.landed = True
        self._over.set()


class Flights(Generic[T]):
    """All flights of this process, by key.

    Use:
        async with flights.join(key) as flight:
            if flight.landed:
                return flight.result
            async for event in run(...):  # this caller leads, in its own task
                ...
            flight.land(generation)
    """

    def __init__(self) -> None:
        self._flights: dict[str, Flight[T]] = {}
        self.num_waiting = 0  # callers, of all flights
        self.num_landed = 0  # so far

    @property
    def num_flying(self) -> int:
        """Keys somebody leads."""
        return len(self._flights)

    def is_led(self, key: str) -> bool:
        """Whether whoever joins now has to wait."""
        return key in self._flights

    @asynccontextmanager
    async def join(self, key: str) -> AsyncIterator[Flight[T]]:
        """Lead the flight of `key` if nobody does (`landed` is False), else wait for its result.

        A waiter that leaves disturbs nobody. A leader that is cancelled, runs out of time or leaves
        without landing hands over: one of those who wait leads a new flight.

        Raises:
            Exception: the very error, of any other kind, with which the leader left.
        """
        # Before a flight is over it is out of the dict. Those it wakes therefore find none, or the
        # new one of whoever woke first, and nothing is lost if one of them is cancelled just then.
        while (flight := self._flights.get(key)) is not None:
            self.num_waiting += 1
            try:
                await flight._over.wait()
            finally:
                self.num_waiting -= 1
            if flight.landed:
                yield flight
                return
            if flight._error is not None:
                # Each with the leader's traceback: left alone it would grow with every waiter.
                raise flight._error.with_traceback(flight._traceback)
        flight = self._flights[key] = Flight()
        try:
            yield flight
        except OWN_REASONS:
            raise
        except Exception as error:
            flight._error, flight._traceback = error, error.__traceback__
            raise
        finally:
            self.num_landed += flight.landed
            del self._flights[key]
            flight._over.set()
