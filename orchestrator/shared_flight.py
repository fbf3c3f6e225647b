"""Single flight across orchestrator processes: equal requests are one generation, whoever asks.

What `flight.py` is in one process, by a lease in Redis. A process that gets the lease leads; the
others look, with growing pauses, for the answer it stores, and for the lease: when that is gone,
they try to take it. Whenever Redis fails, a caller stops waiting and goes on by itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from orchestrator.cache import Cache
from orchestrator.flight import OWN_REASONS
from orchestrator.keys import flight_key
from orchestrator.store import Store
from specrej import telemetry
from specrej.contracts import Generation
from specrej.telemetry import names

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.25
PAUSE_GROWTH = 1.5
# Left in the lease's place by a leader that has no answer for others, for as long as they may take
# to look: each then goes on by itself, where one after another would fail or wait.
_NO_ANSWER = b"none"
_NO_ANSWER_MS = 1000
_TOKEN_CHARACTERS = 32

# Only whoever holds a lease lets go of it: it may have expired, and be another's now.
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


@dataclass(slots=True)
class FlightCounts:
    """How flights went: each ends as one of these, but for those whose caller left while waiting.

    `joined` got an answer that another process made. `alone` were without a lease, as Redis failed
    or the leader had nothing to share.
    """

    led: int = 0
    joined: int = 0
    alone: int = 0


class Turn:
    """What a caller is to do: take `answer`, or if there is none, make it and tell by `land`."""

    def __init__(self, answer: Generation | None, lease: _Lease) -> None:
        self.answer = answer
        self._lease = lease

    async def land(self, stored: bool) -> None:
        """The answer is made, and stored or not: nobody needs to wait any longer."""
        await self._lease.release(handing_over=stored)

    def abandon(self) -> None:
        """There is no time to tell: the lease is left to expire."""
        self._lease.held = False


class SharedFlights:
    """Flights of all processes on one Redis.

    Use:
        async with shared.join(key) as turn:
            if turn.answer is not None:
                return turn.answer
            generation = await run(...)
            await turn.land(await cache.put(...))
    """

    def __init__(self, cache: Cache, *, lease_s: float = 3.0) -> None:
        """A leader that has not renewed its lease for `lease_s` seconds is taken for dead."""
        self.counts = FlightCounts()
        self._cache = cache
        self._lease_s = lease_s

    @asynccontextmanager
    async def join(self, key: str) -> AsyncIterator[Turn]:
        """Wait for another process's answer to `key`, lead, or go on alone.

        Waits as long as its caller lets it. A leader that is cancelled, runs out of time or dies
        hands over to one of those who wait. After one that fails otherwise, or whose answer could
        not be stored, each goes on by itself.
        """
        lease = _Lease(self._cache.store, flight_key(key), self._lease_s)
        try:
            turn = Turn(await self._wait(key, lease), lease)
            if not lease.held or turn.answer is not None:
                yield turn
                return
            async with lease.renewed():
                yield turn
        except OWN_REASONS:
            raise
        except Exception:
            await lease.release(handing_over=False)
            raise
        finally:
            # After landing there is none any more. A leader that left without landing hands over.
            await lease.release(handing_over=True)

    async def _wait(self, key: str, lease: _Lease) -> Generation | None:
        """The answer, or None: then the lease is held, or there is nothing to wait for."""
        pause_s = FIRST_PAUSE_S
        waited = False
        while True:
            stored = await lease.claim(("GETRANGE", key, 0, self._cache.max_bytes))
            # Also a leader looks: the one before it may have just stored, and let go.
            hit = self._cache.read(key, stored)
            if hit and not hit.stale:
                self.counts.joined += 1
                return hit.generation
            if lease.held or lease.nobody_shares:
                self.counts.led += lease.held
                self.counts.alone += not lease.held
                return None
            if not waited:
                waited = True
                telemetry.metrics.add(names.FLIGHT_WAITS, where="elsewhere")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * PAUSE_GROWTH, LONGEST_PAUSE_S)


class _Lease:
    """One process's claim to make the answer of a key."""

    def __init__(self, store: Store, key: str, lease_s: float) -> None:
        self.held = False
        # Redis failed, the last leader had no answer for others, or the key is not one of ours.
        self.nobody_shares = False
        self._store = store
        self._key = key
        self._lease_s = lease_s
        self._lease_ms = max(1, round(lease_s * 1000))
        self._token = secrets.token_hex(_TOKEN_CHARACTERS // 2)
        self._unsure = False  # a claim is under way: it may yet be granted

    async def claim(self, look: tuple[str | int, ...]) -> object:
        """Take the lease if nobody has it; returns what Redis says to `look`, asked after that."""
        self._unsure = True
        claimed, found, holder = await self._store.pipeline(
            "flight",
            ("SET", self._key, self._token, "NX", "PX", self._lease_ms),
            look,
            ("GETRANGE", self._key, 0, _TOKEN_CHARACTERS),
        )
        self._unsure = False
        self.held = claimed is not None and claimed.value is True
        waited_for = claimed and holder and (self.held or _may_be_led(holder.value))
        self.nobody_shares = not waited_for
        return found.value if found else None

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Keeps the lease while the context lasts, however that ends."""
        renewing = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            renewing.cancel()
            # Until it has ended: what it still sends must not come after the release.
            await asyncio.wait([renewing])

    async def release(self, *, handing_over: bool) -> None:
        """Let go of the lease, if it is held: to the next who asks, or so that nobody waits.

        Where scripts are not allowed it expires by itself.
        """
        if self.held or self._unsure:
            self.held = self._unsure = False
            left = b"" if handing_over else _NO_ANSWER
            command = ("EVAL", _RELEASE, 1, self._key, self._token, left, _NO_ANSWER_MS)
            await self._store.call("release", *command)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            holder, _ = await self._store.pipeline(
                "flight",
                ("GETRANGE", self._key, 0, _TOKEN_CHARACTERS),
                # Should it be another's by now, that lasts a little longer: no harm done.
                ("PEXPIRE", self._key, self._lease_ms),
            )
            if holder is not None and holder.value != self._token.encode():
                return


def _may_be_led(holder: object) -> bool:
    """Whether it is a lease, or nothing any more; what else is there may stay for ever."""
    return isinstance(holder, bytes) and len(holder) in (0, _TOKEN_CHARACTERS)
