"""Single flight: equal requests at the same time are one generation.

`SingleFlight` is within this process. `SharedSingleFlight` is across all orchestrators of one
Redis, by a lease: the process that gets it leads; the others poll for the stored answer and for the
lease. If Redis fails, a request stops waiting and runs alone. The leader runs the generation in
its own task, with its own deadline. A leader without progress loses both leads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from orchestrator.cache.answers import Cache
from orchestrator.cache.keys import flight_key
from orchestrator.cache.redis_client import RedisClient, Reply
from specrej import telemetry
from specrej.contracts import Generation
from specrej.contracts.errors import Cancelled, DeadlineExceeded, TooLate
from specrej.telemetry import names

log = logging.getLogger(__name__)

T = TypeVar("T")

# Errors that concern the leader alone: the next in line can still succeed. CancelledError and
# GeneratorExit, which are no `Exception`s, are treated alike.
OWN_REASONS = (TimeoutError, DeadlineExceeded, TooLate, Cancelled)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.25
PAUSE_GROWTH = 1.5
# Replaces the lease of a leader without a shareable answer, until all that wait have polled once:
# each of them then runs alone, instead of one after another.
_NO_ANSWER = b"none"
_NO_ANSWER_MS = 1000
# A token begins with its process's deadline: 8 hexadecimal digits of seconds since the epoch.
_TOKEN_CHARACTERS = 32
_NO_END = 0xFFFFFFFF
# Appended to the key of a flight for those that cannot wait for it.
_BESIDE = ":beside"

# Compares the token first: the lease may have expired and be held by another process.
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class Flight(Generic[T]):
    """One generation under way, or its result."""

    def __init__(
        self,
        lead_s: float,
        lose: Callable[[], None],
        left_s: Callable[[], float | None],
    ) -> None:
        """`lose` is called after `lead_s` seconds without progress; `left_s`: seconds to the
        leader's deadline."""
        self.left_s = left_s
        self.is_beside = False  # whether another flight of this process has the key
        self.is_published = self.is_lost = False
        self._within_s = math.inf
        self._began = asyncio.get_running_loop().time()
        self._lead_s = lead_s
        self._lose = lose
        self._timer = asyncio.get_running_loop().call_later(lead_s, lose)
        self._result: T | None = None
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None
        self._over = asyncio.Event()

    @property
    def result(self) -> T:
        """The leader's result.

        Raises:
            RuntimeError: the result is not published.
        """
        if not self.is_published:
            raise RuntimeError("the result is not published")
        return self._result  # type: ignore[return-value]  # T may itself be optional

    def pause_timer(self) -> None:
        """Keep the lead while its request is queued, until `note_progress` is called."""
        self._timer.cancel()

    def note_progress(self) -> None:
        """Keep the lead: the generation has advanced."""
        if not self.is_lost:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._lead_s, self._lose)

    def publish(self, result: T, *, is_final: bool = True) -> None:
        """Publish the result: waiting callers return now, even if the leader continues.

        A result that more time would have improved is not final: it serves only callers with at
        most as much time left as it took, and they receive it when the leader leaves.
        """
        self._result, self.is_published = result, True
        if is_final:
            self._over.set()
        else:
            self._within_s = asyncio.get_running_loop().time() - self._began

    def _is_valid_within(self, left_s: float | None) -> bool:
        return self.is_published and (math.inf if left_s is None else left_s) <= self._within_s


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
            if flight._is_valid_within(left_s()):
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


class SharedSingleFlight:
    """The flights of all processes that use one Redis.

    Use:
        async with shared.join(key, flight) as lease:
            if lease.answer is not None:
                return lease.answer
            generation = await run(...)
            await lease.release(handing_over=await cache.put(...))
    """

    def __init__(self, cache: Cache, *, lease_s: float = 3.0) -> None:
        """A lease that is not renewed expires after `lease_s` seconds."""
        self._cache = cache
        self._lease_s = lease_s

    @asynccontextmanager
    async def join(self, key: str, flight: Flight[Generation]) -> AsyncIterator[Lease]:
        """Wait for another process's answer to `key`; without one, lead or run alone.

        `flight`: this process's; the lease is renewed until that flight loses the lead.

        If the leader is cancelled, runs out of time or dies, one of those that wait leads. If it
        fails otherwise, or its answer could not be stored, each of them runs alone. So does a
        caller with less than half of the leader's time left, after half of its own; at once if its
        flight is beside another one of its process.
        """
        lease = Lease(self._cache.redis, flight_key(key), self._lease_s, flight.left_s())
        try:
            lease.answer = await self._wait(key, lease, flight)
            if lease.answer is not None or not lease.held:
                yield lease
                return
            async with lease.renewed(flight):
                yield lease
        except OWN_REASONS:
            raise
        except Exception:
            await lease.release(handing_over=False)
            raise
        finally:
            # Does nothing after another release. A leader that leaves without one hands over.
            await lease.release(handing_over=True)

    async def _wait(self, key: str, lease: Lease, flight: Flight[Generation]) -> Generation | None:
        """The answer; None if the lease is held or there is no leader to wait for."""
        pause_s = FIRST_PAUSE_S
        leader: object = None
        until: float | None = None  # on the monotonic clock
        while True:
            # Reads after claiming: the previous leader may have stored its answer just before.
            stored = await lease.claim(("GETRANGE", key, 0, self._cache.max_bytes))
            hit = await self._cache.read(key, stored)
            if hit and not hit.stale:
                return hit.generation
            if lease.leader != leader:
                leader, patience_s = lease.leader, _patience_s(flight.left_s(), lease.leader_left_s)
                until = None if patience_s is None else time.monotonic() + patience_s
            is_patient = until is None or time.monotonic() < until
            if lease.held or not lease.is_contended or not is_patient or flight.is_beside:
                return None
            if pause_s == FIRST_PAUSE_S:
                telemetry.metrics.add(names.FLIGHT_WAITS, where="elsewhere")
            flight.note_progress()  # a leader without progress loses its lease by itself
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * PAUSE_GROWTH, LONGEST_PAUSE_S)


class Lease:
    """One process's claim to lead the flight of a key; `answer` if another process has made it."""

    def __init__(self, redis: RedisClient, key: str, lease_s: float, left_s: float | None) -> None:
        """`left_s`: seconds to this process's deadline."""
        self.answer: Generation | None = None
        self.leader: object = None  # its token, as of the last claim
        self.held = False
        # Whether another process may lead: not if Redis failed, or the last leader shared nothing.
        self.is_contended = True
        self._redis = redis
        self._key = key
        self._lease_s = lease_s
        self._lease_ms = max(1, round(lease_s * 1000))
        end = _NO_END if left_s is None else min(int(time.time() + left_s), _NO_END - 1)
        self._token = f"{end:08x}{secrets.token_hex(_TOKEN_CHARACTERS // 2 - 4)}"
        self._claiming: asyncio.Task[Sequence[Reply | None]] | None = None

    def abandon(self) -> None:
        """Leave the lease to expire, without a call to Redis."""
        self.held = False

    async def claim(self, read: tuple[str | int, ...]) -> object:
        """Take the lease if it is free; returns the reply to the command `read`, sent after it."""
        self._claiming = asyncio.create_task(
            self._redis.pipeline(
                "flight",
                ("SET", self._key, self._token, "NX", "PX", self._lease_ms),
                read,
                ("GETRANGE", self._key, 0, _TOKEN_CHARACTERS),
            )
        )
        # After a cancellation the claim continues, so that `release` has its reply.
        claimed, reply, holder = await asyncio.shield(self._claiming)
        self._claiming = None
        self.held = claimed is not None and claimed.value is True
        self.is_contended = bool(claimed and holder and (self.held or _may_be_token(holder.value)))
        self.leader = holder.value if holder else None
        return reply.value if reply else None

    @property
    def leader_left_s(self) -> float | None:
        """Seconds to the leader's deadline; None: it has none."""
        try:
            end = int(self.leader[:8], 16) if isinstance(self.leader, bytes) else _NO_END
        except ValueError:
            end = _NO_END
        return None if end == _NO_END else end - time.time()

    @asynccontextmanager
    async def renewed(self, flight: Flight[Generation]) -> AsyncIterator[None]:
        """Renew the lease while the context lasts, until the flight is lost."""
        renewing = asyncio.create_task(self._renew(flight))
        try:
            yield
        finally:
            renewing.cancel()
            # Wait for its end: a renewal must not be sent after the release.
            await asyncio.wait([renewing])

    async def release(self, *, handing_over: bool) -> None:
        """Release a held lease: to the next that polls, which finds the answer if it was stored, or
        so that those that wait run alone.

        A cancellation is raised after the release: otherwise the others would wait until the lease
        expires, as they do where Redis does not allow scripts.
        """
        if self.held or self._claiming:
            releasing = asyncio.create_task(self._release(handing_over))
            cancelled: asyncio.CancelledError | None = None
            while not releasing.done():  # at most until the calls' timeouts
                try:
                    await asyncio.wait([releasing])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled:
                raise cancelled

    async def _release(self, handing_over: bool) -> None:
        claiming, self.held, self._claiming = self._claiming, False, None
        left = b"" if handing_over else _NO_ANSWER
        command = ("EVAL", _RELEASE, 1, self._key, self._token, left, _NO_ANSWER_MS)
        await self._redis.call("release", *command)
        if claiming and (await claiming)[0] == Reply(True):  # the release may have overtaken it
            await self._redis.call("release", *command)

    async def _renew(self, flight: Flight[Generation]) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if flight.is_lost:
                return
            holder, _ = await self._redis.pipeline(
                "flight",
                ("GETRANGE", self._key, 0, _TOKEN_CHARACTERS),
                # If another process holds it by now, its lease lasts a little longer: harmless.
                ("PEXPIRE", self._key, self._lease_ms),
                traced=False,  # there are hundreds, and the current span has ended
            )
            if holder is not None and holder.value != self._token.encode():
                return


def _patience_s(left_s: float | None, leader_left_s: float | None) -> float | None:
    """Seconds that a caller waits for a leader; None: no limit. The leader regards its own deadline
    only, so a caller with less than half of its time keeps half of its own for a run."""
    if left_s is None or (leader_left_s is not None and left_s >= leader_left_s / 2):
        return None
    return left_s / 2


def _may_be_token(holder: object) -> bool:
    """Whether the key holds a token or nothing; any other value might stay for ever."""
    return isinstance(holder, bytes) and len(holder) in (0, _TOKEN_CHARACTERS)
