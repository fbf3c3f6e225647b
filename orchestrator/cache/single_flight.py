"""Single flight: equal requests at the same time are one generation.

`SingleFlight` is within this process, `locked` among all orchestrators of one Redis. The leader
runs the generation in its own task, with its own deadline. `Answers` combines both with the cache.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from orchestrator.cache.answers import Cache
from orchestrator.cache.keys import PREFIX
from orchestrator.cache.redis_client import RedisClient
from specrej import telemetry
from specrej.contracts import AnswerSource, CacheControl, Degradation, Generation
from specrej.contracts.errors import Cancelled, DeadlineExceeded, TooLate
from specrej.telemetry import names
from specrej.threads import ended

T = TypeVar("T")

# Errors that concern the leader alone: the next in line can still succeed. CancelledError and
# GeneratorExit, which are not an `Exception`, are treated alike.
OWN_REASONS = (TimeoutError, DeadlineExceeded, TooLate, Cancelled)
_BESIDE = ":beside"  # appended to the key of a flight for those that cannot wait for it
LOCK_S = 5.0  # of a process that died


@dataclass(eq=False, slots=True)
class Flight(Generic[T]):
    """One generation under way, or its result."""

    left_s: Callable[[], float]  # to the leader's deadline; inf: there is none
    is_beside: bool = False  # whether another flight of this process has the key
    result: T | None = None  # None until it is published
    _within_s: float = math.inf  # callers with more time left do not share the result
    _began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _over: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def publish(self, result: T, *, is_final: bool = True) -> None:
        """Publish the result: waiting callers return now, even if the leader continues.

        A result that more time would have improved is not final: it serves only callers with at
        most as much time left as it took, and they receive it when the leader leaves.
        """
        self.result = result
        if is_final:
            self._over.set_result(None)
        else:
            self._within_s = asyncio.get_running_loop().time() - self._began_s


class SingleFlight(Generic[T]):
    """The flights of this process, by key."""

    def __init__(self) -> None:
        self.flying: dict[str, Flight[T]] = {}  # by key: those with a leader
        self.num_waiting = 0  # callers, over all flights

    @asynccontextmanager
    async def join(
        self, key: str, left_s: Callable[[], float] = lambda: math.inf
    ) -> AsyncIterator[Flight[T]]:
        """Lead the flight of `key` if it has no leader (`result` is None), else wait for it.

        If the leader is cancelled, runs out of time or leaves without a result, one of those that
        wait leads a new flight. A caller with less than half of the leader's time left (`left_s`
        returns seconds) leads one beside it after half of its own.

        Raises:
            Exception: the leader's error, of any other kind.
        """
        # A flight is removed from the dict before its waiters wake. They find none, or a new one,
        # so no wake-up is lost if one of them is cancelled at that moment.
        if key in self.flying:
            telemetry.metrics.add(names.FLIGHT_WAITS, where="here")
        while (flight := self.flying.get(key)) is not None:
            self.num_waiting += 1
            try:
                await asyncio.wait({flight._over}, timeout=_patience_s(left_s(), flight.left_s()))
            finally:
                self.num_waiting -= 1
            if not flight._over.done():
                key += _BESIDE
                continue
            if flight.result and left_s() <= flight._within_s:
                yield flight
                return
            flight._over.result()  # raises the leader's error
        flight = self.flying[key] = Flight(left_s, key.endswith(_BESIDE))
        try:
            yield flight
        except Exception as error:
            if not isinstance(error, OWN_REASONS) and not flight._over.done():
                flight._over.set_exception(error)
                flight._over.exception()  # otherwise asyncio logs it if no caller waits
            raise
        finally:
            del self.flying[key]
            if not flight._over.done():
                flight._over.set_result(None)


@asynccontextmanager
async def locked(redis: RedisClient, key: str, flight: Flight[Any]) -> AsyncIterator[bool]:
    """Hold the lock of an answer's key; the value is whether another process held it before.

    A caller that waits, until the lock is free or half of its time is over, does not hold it: it
    looks for the stored answer, and without one it runs at once. So do those that cannot use Redis,
    and those whose flight is beside another one of this process.
    """
    lock = None if flight.is_beside else redis.lock(lock_key(key), LOCK_S)
    if lock is None:
        yield False
        return
    release = partial(redis.attempt, "unlock", "EVALSHA", lock.release)
    acquire = partial(redis.attempt, "lock", "SET", partial(lock.acquire, blocking=False))
    acquiring = asyncio.create_task(acquire())

    async def undo() -> None:
        if await acquiring:
            await release()

    try:
        is_held = await asyncio.shield(acquiring)
    except asyncio.CancelledError:
        await asyncio.wait({asyncio.create_task(undo())})
        raise
    now = asyncio.get_running_loop().time
    if is_held is False:
        telemetry.metrics.add(names.FLIGHT_WAITS, where="elsewhere")
        until = now() + flight.left_s() / 2
        while now() < until:
            if not await redis.attempt("lock", "GET", lock.locked):
                break
            await asyncio.sleep(0.05)
    if not is_held:
        yield is_held is False
        return
    renewing = asyncio.create_task(_renew(redis, lock.reacquire))

    async def end() -> None:
        await ended(renewing)  # its last renewal must not follow the release
        await release()

    try:
        yield False
    finally:
        await asyncio.wait({asyncio.create_task(end())})  # which no cancellation stops


def lock_key(answer_key: str) -> str:
    """The key of the lock of the process that computes the answer of `answer_key`."""
    return f"{PREFIX}:flight:{answer_key.removeprefix(f'{PREFIX}:')}"


async def _renew(redis: RedisClient, reacquire: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await asyncio.sleep(LOCK_S / 3)
        await redis.attempt("lock", "EVALSHA", reacquire)


def _patience_s(left_s: float, leader_left_s: float) -> float | None:
    """Seconds that a caller waits for a leader; None: no limit. The leader regards its own deadline
    only, so a caller with less than half of its time keeps half of its own for a run."""
    return None if left_s >= leader_left_s / 2 else left_s / 2


class Answers:
    """Answers of the cache, of equal requests or of a run; each is looked for once."""

    def __init__(self, cache: Cache) -> None:
        self.flights: SingleFlight[Generation] = SingleFlight()
        self._cache = cache

    async def get_or_run(
        self,
        key_of: Callable[[str, str], str],
        run: Callable[[], Awaitable[Generation]],
        *,
        group: str,
        control: CacheControl,
        left_s: Callable[[], float],
        made_by: tuple[str, str],
    ) -> tuple[Generation, AnswerSource]:
        """The answer of a key and its source; `run` computes it.

        `key_of` returns the key by the fingerprints of generator and rewards: `made_by` to look for
        an answer, its own to store it; they differ during a rollout. Requests of one key share a
        run only if their `group` is the same. `left_s` returns seconds to the deadline.
        """
        flight, key = None, key_of(*made_by)
        async with AsyncExitStack() as stack:
            if control is CacheControl.USE:
                with telemetry.span(names.SPAN_FLIGHT):
                    joining = self.flights.join(f"{key}:{group}", left_s)
                    flight = await stack.enter_async_context(joining)
                if flight.result:
                    return replace(flight.result, cached=True), AnswerSource.FLIGHT
                with telemetry.span(names.SPAN_LOOKUP):
                    found, source = await self._cache.get(key), AnswerSource.CACHE
                if found is None:
                    locking = locked(self._cache.redis, key, flight)
                    with telemetry.span(names.SPAN_SHARED_FLIGHT):
                        has_waited = await stack.enter_async_context(locking)
                    if has_waited:
                        found, source = await self._cache.get(key), AnswerSource.FLIGHT
                if found:
                    flight.publish(found)
                    return found, source
            generation = await run()
            if flight:  # those that wait here need not wait for the cache
                # An answer degraded only by a reward is final: all of a flight allow that.
                is_degraded = {*generation.degradations} - {Degradation.REWARD}
                flight.publish(generation, is_final=not (generation.hurried or is_degraded))
            made = generation.generator_fingerprint, generation.reward_fingerprint
            if control is not CacheControl.BYPASS:
                key = key if made == made_by else key_of(*made)
                with telemetry.span(names.SPAN_STORE), suppress(TimeoutError):
                    async with asyncio.timeout(left_s() / 2):
                        await self._cache.put(key, generation)
        return generation, AnswerSource.RUN
