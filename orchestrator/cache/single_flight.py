"""Single flight: equal requests at the same time are one generation.

`SingleFlight` is within this process, `locked` among all orchestrators of one Redis. The leader
runs the generation in its own task, with its own deadline. One without progress loses the lead.
`Answers` combines both with the cache.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from orchestrator.cache.answers import Cache
from orchestrator.cache.keys import PREFIX
from orchestrator.cache.redis_client import RedisClient, Reply
from specrej import telemetry
from specrej.contracts import AnswerSource, CacheControl, Degradation, Generation
from specrej.contracts.errors import Cancelled, DeadlineExceeded, TooLate
from specrej.telemetry import names

log = logging.getLogger(__name__)

T = TypeVar("T")

# Errors that concern the leader alone: the next in line can still succeed. CancelledError and
# GeneratorExit, which are not an `Exception`, are treated alike.
OWN_REASONS = (TimeoutError, DeadlineExceeded, TooLate, Cancelled)
# Appended to the key of a flight for those that cannot wait for it.
_BESIDE = ":beside"
LOCK_S = 5.0  # of a process that died
_PAUSE_S = 0.05  # between two attempts to get a lock


class Flight(Generic[T]):
    """One generation under way, or its result."""

    def __init__(
        self, lead_s: float, lose: Callable[[], None], left_s: Callable[[], float | None]
    ) -> None:
        """`lose` is called after `lead_s` seconds without progress; `left_s`: seconds to the
        leader's deadline."""
        self.left_s = left_s
        self.is_beside = False  # whether another flight of this process has the key
        self.is_published = self.is_lost = False
        self.result: T | None = None  # None until it is published
        self._within_s = math.inf
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._lead_s = lead_s
        self._lose = lose
        self._timer = self._loop.call_later(lead_s, lose)
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None
        self._over = asyncio.Event()

    def pause_timer(self) -> None:
        """Keep the lead while its request is queued, until `note_progress` is called."""
        self._timer.cancel()

    def note_progress(self) -> None:
        """Keep the lead: the generation has advanced."""
        if not self.is_lost:
            self._timer.cancel()
            self._timer = self._loop.call_later(self._lead_s, self._lose)

    def publish(self, result: T, *, is_final: bool = True) -> None:
        """Publish the result: waiting callers return now, even if the leader continues.

        A result that more time would have improved is not final: it serves only callers with at
        most as much time left as it took, and they receive it when the leader leaves.
        """
        self.result, self.is_published = result, True
        if is_final:
            self._over.set()
        else:
            self._within_s = self._loop.time() - self._began


class SingleFlight(Generic[T]):
    """The flights of this process, by key.

    Use:
        async with flights.join(key) as flight:
            if flight.is_published:
                return flight.result
            async for event in run(...):  # this caller leads
                ...
            flight.publish(generation)
    """

    def __init__(self, lead_s: float = 120.0) -> None:
        """A leader without progress for `lead_s` seconds loses the lead to one that waits."""
        self._lead_s = lead_s
        self._flights: dict[str, Flight[T]] = {}
        self.num_waiting = 0  # callers, over all flights

    @property
    def num_flying(self) -> int:
        """Keys with a leader."""
        return len(self._flights)

    @asynccontextmanager
    async def join(
        self, key: str, left_s: Callable[[], float | None] = lambda: None
    ) -> AsyncIterator[Flight[T]]:
        """Lead the flight of `key` if it has no leader (`is_published` is False), else wait for it.

        `left_s`: seconds to the caller's deadline.

        If the leader is cancelled, runs out of time or leaves without a result, one of those that
        wait leads a new flight. A caller with less than half of the leader's time left leads
        one beside it after half of its own.

        Raises:
            Exception: the leader's error, of any other kind.
        """
        # A flight is removed from the dict before its waiters wake. They find none, or a new one,
        # so no wake-up is lost if one of them is cancelled at that moment.
        if key in self._flights:
            telemetry.metrics.add(names.FLIGHT_WAITS, where="here")
        while (flight := self._flights.get(key)) is not None:
            self.num_waiting += 1
            try:
                async with asyncio.timeout(_patience_s(left_s(), flight.left_s())):
                    await flight._over.wait()
            except TimeoutError:
                key += _BESIDE
                continue
            finally:
                self.num_waiting -= 1
            own_s = left_s()
            if flight.is_published and (math.inf if own_s is None else own_s) <= flight._within_s:
                yield flight
                return
            if flight._error is not None:
                # Reset the traceback: otherwise it grows with every waiter that raises it.
                raise flight._error.with_traceback(flight._traceback)
        flight = self._flights[key] = Flight(self._lead_s, partial(self._lose, key), left_s)
        flight.is_beside = key.endswith(_BESIDE)
        try:
            yield flight
        except OWN_REASONS:
            raise
        except Exception as error:
            flight._error, flight._traceback = error, error.__traceback__
            raise
        finally:
            flight._timer.cancel()
            if not flight.is_lost:
                del self._flights[key]
                flight._over.set()

    def _lose(self, key: str) -> None:
        """Wake those that wait for `key`: one of them leads, and the old leader continues."""
        flight = self._flights.pop(key)
        flight.is_lost = True
        flight._over.set()
        log.warning("a run has not advanced for %g s: equal requests wait no longer", self._lead_s)


@asynccontextmanager
async def locked(redis: RedisClient, key: str, flight: Flight[Any]) -> AsyncIterator[bool]:
    """Hold the lock of an answer's key; the value is whether another process held it before.

    A caller that has waited does not hold it: it looks for the stored answer, and without one it
    runs at once, as those do that cannot use Redis, have waited for half of their time, or whose
    flight is beside another one of this process. The lock is renewed until the flight is lost.
    """
    lock = None if flight.is_beside else redis.lock(lock_key(key), LOCK_S)
    if lock is None:
        yield False
        return
    acquire = partial(redis.attempt, "lock", "SET", partial(lock.acquire, blocking=False))
    release = partial(redis.attempt, "unlock", "EVALSHA", lock.release)
    left_s, now = flight.left_s(), asyncio.get_running_loop().time
    until = math.inf if left_s is None else now() + left_s / 2
    has_waited = False
    while (reply := await acquire()) == Reply(False) and now() < until:
        if not has_waited:
            telemetry.metrics.add(names.FLIGHT_WAITS, where="elsewhere")
        has_waited = True
        flight.note_progress()  # a leader without progress loses its lock by itself
        await asyncio.sleep(_PAUSE_S)
    if has_waited and reply == Reply(True):
        await release()
    if has_waited or reply != Reply(True):
        yield has_waited
        return
    renewing = asyncio.create_task(_renew(redis, lock.reacquire, flight))
    try:
        yield False
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})  # its last renewal must not follow the release
        await release()


def lock_key(answer_key: str) -> str:
    """The key of the lock of the process that computes the answer of `answer_key`."""
    return f"{PREFIX}:flight:{answer_key.removeprefix(f'{PREFIX}:')}"


async def _renew(
    redis: RedisClient, reacquire: Callable[[], Awaitable[Any]], flight: Flight[Any]
) -> None:
    while not flight.is_lost:
        await asyncio.sleep(LOCK_S / 3)
        await redis.attempt("lock", "EVALSHA", reacquire)


def _patience_s(left_s: float | None, leader_left_s: float | None) -> float | None:
    """Seconds that a caller waits for a leader; None: no limit. The leader regards its own deadline
    only, so a caller with less than half of its time keeps half of its own for a run."""
    if left_s is None or (leader_left_s is not None and left_s >= leader_left_s / 2):
        return None
    return left_s / 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """The answer that a request needs.

    `left_s` returns seconds to its deadline. Requests of one key share a run only if their `group`
    is the same. A refresh has no `on_stale`: it computes an answer in place of a stale one.
    `fits`: whether the key names what made an answer.
    """

    key: str
    group: str
    control: CacheControl
    left_s: Callable[[], float | None]
    fits: Callable[[Generation], bool]
    on_stale: Callable[[], None] | None


class Answers:
    """Answers of the cache, of equal requests or of a run; each is looked for once."""

    def __init__(self, cache: Cache, flights: SingleFlight[Generation]) -> None:
        self._cache = cache
        self._flights = flights

    async def get_or_run(
        self, wanted: Wanted, run: Callable[[Callable[[], None]], Awaitable[Generation]]
    ) -> tuple[Generation, AnswerSource]:
        """An answer and its source; `run` computes it, and calls its argument as it advances."""
        flight = None
        async with AsyncExitStack() as stack:
            if wanted.control is CacheControl.USE:
                with telemetry.span(names.SPAN_FLIGHT):
                    joining = self._flights.join(f"{wanted.key}:{wanted.group}", wanted.left_s)
                    flight = await stack.enter_async_context(joining)
                if flight.is_published and flight.result:
                    return replace(flight.result, cached=True), AnswerSource.FLIGHT
                if found := await self._find(wanted, flight, stack):
                    flight.publish(found[0])
                    return found
                flight.pause_timer()
            generation = await run(flight.note_progress if flight else lambda: None)
            if flight:  # those that wait here need not wait for the cache
                # An answer degraded only by a reward is final: all of a flight allow that.
                is_degraded = {*generation.degradations} - {Degradation.REWARD}
                flight.publish(generation, is_final=not (generation.hurried or is_degraded))
            if wanted.control is not CacheControl.BYPASS and wanted.fits(generation):
                left_s = wanted.left_s()
                with telemetry.span(names.SPAN_STORE), suppress(TimeoutError):
                    async with asyncio.timeout(None if left_s is None else left_s / 2):
                        await self._cache.put(wanted.key, generation)
        return generation, AnswerSource.RUN

    async def _find(
        self, wanted: Wanted, flight: Flight[Generation], stack: AsyncExitStack
    ) -> tuple[Generation, AnswerSource] | None:
        """The stored answer; None if the request must run, with the lock on the stack."""
        hit, source = None, AnswerSource.CACHE
        if wanted.on_stale:
            with telemetry.span(names.SPAN_LOOKUP):
                hit = await self._cache.get(wanted.key)
        if hit is None:
            locking = locked(self._cache.redis, wanted.key, flight)
            with telemetry.span(names.SPAN_SHARED_FLIGHT):
                has_waited = await stack.enter_async_context(locking)
            if has_waited:
                source, hit = AnswerSource.FLIGHT, await self._cache.get(wanted.key)
        if hit is None or (hit.stale and not wanted.on_stale):
            return None
        if hit.stale and wanted.on_stale:
            wanted.on_stale()
        return hit.generation, source
