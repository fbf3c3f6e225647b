"""Final best responses in Redis, cache-aside: whatever is wrong with Redis, callers see a miss.

It decides what is stored, for how long, and what may be served. When to look and when to store is
its caller's business; keys, values and calls have files of their own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator import family as families
from orchestrator.envelope import Envelope, enclosed, pack, unpack
from orchestrator.family import Member
from orchestrator.keys import Family, Keys
from orchestrator.store import Access, Store
from specrej import telemetry
from specrej.contracts import Generation
from specrej.telemetry import names

MAX_MEMBERS = 64  # of a family's index
# Entries of an index whose answers are gone or wrong are dropped, and the next is tried; in the end
# the caller gets what its own key has.
MAX_TRIES = 4


@dataclass(slots=True)
class CacheCounts:
    """What happened so far; each look for a key ends as one of the first four.

    `invalid` are entries found but unusable. `stale` hits were older than their time to live.
    `upgraded` requests were served another's answer, whatever their own key had. `rejected` are
    answers that were not to be stored.
    """

    hits: int = 0
    misses: int = 0
    invalid: int = 0
    unanswered: int = 0
    stale: int = 0
    upgraded: int = 0
    stored: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer, marked as cached; `stale`: older than its time to live."""

    generation: Generation
    stale: bool
    member: Member


def is_as_asked(generation: Generation) -> bool:
    """Whether it is what any caller would have got: neither degraded nor hurried by a deadline."""
    return not (generation.degraded or generation.hurried)


class Cache:
    """Answers kept in Redis for a while; an empty URL switches it off.

    No method raises anything but CancelledError. Each call to Redis is bounded, and once one was
    not answered none is made for a while; see `Store`.
    """

    def __init__(
        self,
        access: Access | str,
        *,
        ttl_s: float = 3600,
        ttl_jitter: float = 0.1,
        stale_s: float = 0,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_bytes: int = 1 << 20,
        max_connections: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`access` may be just a URL.

        `ttl_jitter` is the fraction by which times to live differ, lest all end at once. Answers
        are kept for `stale_s` seconds more. `max_bytes` bounds a value, compressed and not.
        `clock` and `wall_clock` tell seconds, the latter since the epoch.

        Raises:
            ValueError: `access` contradicts itself, or its URL is none of Redis.
        """
        self.counts = CacheCounts()
        self.max_bytes = max_bytes
        self.store = Store(
            Access(access) if isinstance(access, str) else access,
            timeout_s=timeout_s,
            cool_down_s=cool_down_s,
            max_connections=max_connections,
            clock=clock,
        )
        self._timeout_s = timeout_s
        self._ttl_s = ttl_s
        self._ttl_jitter = ttl_jitter
        self._stale_s = stale_s
        self._wall_clock = wall_clock

    async def get(self, key: str) -> Hit | None:
        """The answer stored under `key`; None if there is none to be had.

        A bad entry is left where it is: the answer made instead will replace it.
        """
        # A missing key reads as empty. One byte more than allowed tells a value that is too large
        # without fetching all of it.
        reply = await self.store.call("read", "GETRANGE", key, 0, self.max_bytes)
        if reply is None:
            self.counts.unanswered += 1
            return _looked("error" if self.store.is_on else "off")
        if reply.value == b"":
            self.counts.misses += 1
            return _looked("miss")
        hit = self.read(key, reply.value)
        if hit is None:
            self.counts.invalid += 1
            return _looked("invalid")
        self.counts.hits += 1
        self.counts.stale += hit.stale
        return _looked("stale" if hit.stale else "hit", hit)

    async def get_better(self, keys: Keys) -> Hit | None:
        """The best answer of the family that may serve the request: perhaps its own."""
        own = await self.get(keys.answer)
        if keys.family is None:
            return own
        try:
            # All its calls together: each may be slow, and there can be some.
            async with asyncio.timeout(self._timeout_s):
                better = await self._better(keys.answer, keys.family, own)
        except TimeoutError:
            return own
        self.counts.upgraded += better is not None
        return better or own

    def read(self, key: str, stored: object) -> Hit | None:
        """What Redis said `key` holds; None for everything but a whole, good answer."""
        try:
            envelope = unpack(key, stored, self.max_bytes)
        except ValueError:
            return None
        return self._hit(envelope)

    async def put(self, keys: Keys, generation: Generation) -> bool:
        """Store an answer; not one that is degraded, hurried, from the cache, or too large.

        Returns whether others can have it now.
        """
        if not self.store.is_on:
            return False
        try:
            if generation.cached or not is_as_asked(generation):
                raise ValueError("not the answer to keep")
            envelope = enclosed(keys, generation, self._wall_clock())
            stored = pack(envelope, self.max_bytes)
        except ValueError:
            self.counts.rejected += 1
            return False
        written = await self._write(envelope, stored)
        self.counts.stored += written
        return written

    async def available(self) -> bool:
        """Whether Redis answers; False while it is left alone, or switched off."""
        return await self.store.available()

    async def close(self) -> None:
        """Close all connections; from then on the cache is switched off."""
        await self.store.close()

    async def _write(self, envelope: Envelope, stored: bytes) -> bool:
        spread = random.uniform(1 - self._ttl_jitter, 1 + self._ttl_jitter)
        life_ms = _milliseconds(self._ttl_s * spread + self._stale_s)
        answer = ("SET", envelope.key, stored, "PX", life_ms)
        member, index = families.member_of(envelope), envelope.family
        if not index:
            reply = await self.store.call("write", *answer)
        else:
            # The index outlives every answer it lists.
            longest_ms = _milliseconds(self._ttl_s * (1 + self._ttl_jitter) + self._stale_s)
            reply, _, _, size = await self.store.pipeline(
                "write",
                answer,
                ("HSET", index, _digest_of(envelope.key), families.packed(member)),
                ("PEXPIRE", index, longest_ms),
                ("HLEN", index),
            )
            if size is not None and isinstance(size.value, int) and size.value > MAX_MEMBERS:
                await self._trim(index)
        return reply is not None and reply.value is True

    async def _better(self, key: str, asked: Family, own: Hit | None) -> Hit | None:
        """The best answer that may stand in for the request's own; None if there is none."""
        members, mine = await self._members(asked.key), own.member if own else None
        for name in families.better_ones(members, asked, mine)[:MAX_TRIES]:
            # Only the digest comes from the index: it cannot lead to another tenant or model.
            other = f"{_without_digest(key)}{name}"
            reply = await self.store.call("read", "GETRANGE", other, 0, self.max_bytes)
            if reply is None:
                return None
            if hit := self._stand_in(other, reply.value, asked, mine):
                return hit
            await self.store.call("index", "HDEL", asked.key, name)
        return None

    async def _members(self, index: str) -> dict[str, Member]:
        """The readable entries of a family's index."""
        entries = await self._entries(index)
        return {name: member for name, member in entries.items() if member is not None}

    async def _entries(self, index: str) -> dict[str, Member | None]:
        # Unlike HGETALL, at most so many, whatever somebody has put there.
        reply = await self.store.call("index", "HRANDFIELD", index, 2 * MAX_MEMBERS, "WITHVALUES")
        if reply is None or not isinstance(reply.value, list):
            return {}
        flat = reply.value
        return {
            name.decode(): families.unpacked(text)
            for name, text in zip(flat[::2], flat[1::2], strict=False)
            if isinstance(name, bytes) and name.isalnum()
        }

    async def _trim(self, index: str) -> None:
        """Drop the entries that are of least merit, or none."""
        entries = await self._entries(index)
        worst_first = sorted(
            entries,
            key=lambda name: (m is not None, m.merit) if (m := entries[name]) else (False, ()),
        )
        if excess := worst_first[: max(0, len(entries) - MAX_MEMBERS)]:
            await self.store.call("index", "HDEL", index, *excess)

    def _stand_in(self, key: str, stored: object, asked: Family, own: Member | None) -> Hit | None:
        """A listed answer, unless it is gone, stale, or not what its index says."""
        try:
            envelope = unpack(key, stored, self.max_bytes)
        except ValueError:
            return None
        hit = self._hit(envelope)
        if hit.stale or envelope.family != asked.key:
            return None
        if not families.may_serve(hit.member, asked, own):
            return None
        cut = hit.generation.candidates[: asked.return_candidates]
        return replace(hit, generation=replace(hit.generation, candidates=cut))

    def _hit(self, envelope: Envelope) -> Hit:
        age_s = self._wall_clock() - envelope.stored_at
        return Hit(
            replace(envelope.generation, cached=True),
            # Without a time to be stale in, Redis's own clock alone decides.
            stale=self._stale_s > 0 and age_s > self._ttl_s,
            member=families.member_of(envelope),
        )


def _looked(result: str, hit: Hit | None = None) -> Hit | None:
    """What a look for a key found, counted."""
    telemetry.metrics.add(names.CACHE_RESULTS, result=result)
    return hit


def _digest_of(key: str) -> str:
    return key.rpartition(":")[2]


def _without_digest(key: str) -> str:
    return "".join(key.rpartition(":")[:2])


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
