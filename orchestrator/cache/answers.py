"""The answer cache: final best responses in Redis, cache-aside. Every failure of Redis is a miss.

It decides what is stored, for how long and how much of each tenant, and which stored answer may
serve a request. docs/cache.md describes the stored format.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.background import num_values, packed, unpacked
from orchestrator.cache.keys import Keys
from orchestrator.cache.redis_client import Command, RedisClient
from orchestrator.cache.secret import Secret, seal, unseal
from specrej import telemetry
from specrej.contracts import FinishReason, Generation
from specrej.telemetry import names

MAX_LISTED = 64  # answers in the index of comparable requests
MAX_TRIES = 4  # listed answers that one lookup reads
# Of an answer beside its value: its key, its places in two indexes, Redis's own structures.
ENTRY_OVERHEAD_BYTES = 1024

# Adds an answer to its tenant's index, and deletes the oldest answers above the budget. An answer's
# score is the number of bytes stored before it; the empty member's is the number of all bytes so
# far. A replaced or expired answer counts until all older answers are deleted.
_CHARGE = """
local start = tonumber(redis.call('ZSCORE', KEYS[1], '') or 0)
local total = start + ARGV[2]
redis.call('ZADD', KEYS[1], start, ARGV[1], total, '')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
local over = '(' .. string.format('%.0f', total - ARGV[3])
for round = 1, 20 do
  local oldest = redis.call('ZRANGE', KEYS[1], '-inf', over, 'BYSCORE', 'LIMIT', 0, 100)
  if #oldest > 0 then
    redis.call('DEL', unpack(oldest))
    redis.call('ZREM', KEYS[1], unpack(oldest))
  end
  if #oldest < 100 then break end
end
"""

_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    ser_json_bytes="base64",
    ser_json_inf_nan="constants",
    val_json_bytes="base64",
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A stored answer; `index` detects one that is listed in another index."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    index: str  # key of the index that lists it; empty: none
    returned: int  # the request's `return_candidates`; there may be fewer
    stored_at: float  # seconds since the epoch, on the clock of the process that stored it
    generation: Generation


@dataclass(frozen=True, slots=True)
class Summary:
    """What the index of comparable requests stores of an answer."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    n: int  # candidates at the start
    score: float
    complete: bool  # ended by itself, not at max_tokens
    vetoed: bool
    returned: int

    @classmethod
    def of(cls, entry: CacheEntry) -> Summary:
        best, is_complete = entry.generation.best, entry.generation.best.finish is FinishReason.STOP
        return cls(entry.generation.n, best.score, is_complete, best.vetoed, entry.returned)

    def merit(self, keys: Keys) -> tuple[bool, bool, float]:
        """Sort key, best last: the order of `rejection.rank`, as the request has it."""
        return not self.vetoed, self.complete or not keys.prefer_complete, self.score

    def may_serve(self, keys: Keys, own: Summary | None) -> bool:
        """Whether the answer may be returned in place of `own`, the request's stored answer.

        Without one, it must come from a search at least as large; with one, it must be better.
        """
        if self.vetoed or keys.n == 0 or self.returned < keys.return_candidates:
            return False
        return self.n >= keys.n if own is None else self.merit(keys) > own.merit(keys)


_ENTRY = TypeAdapter(CacheEntry)
_SUMMARY = TypeAdapter(Summary)


def pack(entry: CacheEntry, key: str, secret: Secret, max_bytes: int) -> bytes:
    """The value to store under `key`: a MAC of key and stream, then JSON in that zlib stream.

    Up to 1 KiB the stream is not compressed. Both sizes are limited to `max_bytes`.

    Raises:
        ValueError: the entry is too large or has a number that is not finite.
    """
    least = 2 * num_values(entry) + sum(len(c.text) for c in entry.generation.candidates)
    if least > max_bytes:
        raise ValueError(f"at least {least} bytes, {max_bytes} allowed")
    text = _ENTRY.dump_json(entry)
    # pydantic writes numbers that are not finite, but does not read them.
    if b"NaN" in text or b"Infinity" in text:
        _ENTRY.validate_json(text)
    return seal(text, key, secret, max_bytes)


def unpack(key: str, stored: object, secret: Secret, max_bytes: int) -> CacheEntry:
    """The entry in a stored value; decompresses at most `max_bytes`.

    Raises:
        ValueError: not a whole value of this format, stored under this key with this secret.
    """
    entry = _ENTRY.validate_json(unseal(key, stored, secret, max_bytes))
    if not entry.generation.candidates:
        raise ValueError("without an answer")
    return entry


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer, marked as cached; `stale` if older than its time to live."""

    generation: Generation
    stale: bool
    entry: CacheEntry


def is_shareable(generation: Generation) -> bool:
    """Whether any caller would have got this answer: neither degraded nor deadline-adjusted."""
    return not (generation.degraded or generation.hurried)


class Cache:
    """Stored answers. No method raises anything but CancelledError, as `redis` bounds each call."""

    def __init__(
        self,
        redis: RedisClient,
        *,
        ttl_s: float = 3600,
        ttl_jitter: float = 0.1,
        stale_s: float = 0,
        max_bytes: int = 1 << 20,
        tenant_bytes: int = 0,
        secret: Secret | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Times to live vary by the fraction `ttl_jitter`, so that entries do not expire together.

        Entries stay for `stale_s` seconds more, and are stale then. `max_bytes` bounds a value,
        compressed and not, and `tenant_bytes` all answers of a tenant; 0: no bound. `wall_clock`
        returns seconds since the epoch.
        """
        self.redis = redis
        self.secret = secret or Secret()
        self._tenant_bytes = tenant_bytes
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._jitter = ttl_jitter
        self._stale_s = stale_s
        self._wall_clock = wall_clock

    async def get(self, key: str) -> Hit | None:
        """The answer stored under `key`, or None.

        A bad entry stays where it is: the next answer to be stored replaces it.
        """
        hit, result = await self._find(key)
        telemetry.metrics.add(names.CACHE_RESULTS, result=result)
        return hit

    async def _find(self, key: str) -> tuple[Hit | None, str]:
        """The answer stored under `key`, and the result as in the metric."""
        # GETRANGE returns an empty string for a missing key. One byte more than allowed detects a
        # value that is too large without fetching all of it.
        reply = await self.redis.call("read", "GETRANGE", key, 0, self.max_bytes)
        hit = None
        if reply is None:
            result = "error" if self.redis.is_on else "off"
        elif reply.value == b"":
            result = "miss"
        elif hit := await self.read(key, reply.value):
            result = "stale" if hit.stale else "hit"
        else:
            result = "invalid"
        return hit, result

    async def get_better(self, keys: Keys) -> Hit | None:
        """The best stored answer that may serve the request: its own, or a comparable one's."""
        own, result = await self._find(keys.answer)
        better = None
        if keys.index:
            # One bound for all of its calls: there can be nine.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.redis.timeout_s):
                    better = await self._better(keys, own)
        telemetry.metrics.add(names.CACHE_RESULTS, result="hit" if better else result)
        return better or own

    async def read(self, key: str, stored: object) -> Hit | None:
        """The answer in the value of `key`; None unless it is whole and valid."""
        unpacking = partial(unpack, key, secret=self.secret, max_bytes=self.max_bytes)
        try:
            entry = await unpacked(unpacking, stored)
        except ValueError:
            return None
        age_s = self._wall_clock() - entry.stored_at
        # With no stale period, Redis's own expiry decides alone.
        is_stale = self._stale_s > 0 and age_s > self._ttl_s
        return Hit(replace(entry.generation, cached=True), is_stale, entry)

    async def put(self, keys: Keys, generation: Generation) -> bool:
        """Store an answer, unless it is cached, not shareable, reduced or too large; returns
        whether."""
        may_store = not (generation.cached or generation.reduced) and is_shareable(generation)
        if not self.redis.is_on or not may_store:
            return False
        if generation.relative_scores:  # another answer's score would not compare
            keys = replace(keys, index="")
        returned, now = keys.return_candidates, self._wall_clock()
        entry = CacheEntry(keys.index, returned, now, generation)
        try:
            sealing = partial(pack, key=keys.answer, secret=self.secret, max_bytes=self.max_bytes)
            stored = await packed(sealing, entry)
        except ValueError:
            return False
        size = len(stored) + ENTRY_OVERHEAD_BYTES
        is_bounded = bool(keys.tenant and self._tenant_bytes)
        if is_bounded and size > self._tenant_bytes:
            return False
        jitter = random.uniform(1 - self._jitter, 1 + self._jitter)
        commands: list[Command] = [("SET", keys.answer, stored, "PX", self._life_ms(jitter))]
        if is_bounded:
            charged = (size, self._tenant_bytes)
            life_ms = self._life_ms(1 + self._jitter)
            commands.append(("EVAL", _CHARGE, 1, keys.tenant, keys.answer, *charged, life_ms))
        if keys.index:
            digest, summary = keys.answer.rpartition(":")[2], Summary.of(entry)
            commands.append(("HSET", keys.index, digest, _SUMMARY.dump_json(summary)))
            # The index outlives every answer that it lists.
            commands.append(("PEXPIRE", keys.index, self._life_ms(1 + self._jitter)))
            commands.append(("HLEN", keys.index))
        reply, *listed = await self.redis.pipeline("write", *commands)
        if listed and (length := listed[-1]) and isinstance(length.value, int):
            await self._trim(keys, length.value)
        return reply is not None and reply.value is True

    def _life_ms(self, jitter: float) -> int:
        return max(1, round((self._ttl_s * jitter + self._stale_s) * 1000))

    async def _better(self, keys: Keys, own: Hit | None) -> Hit | None:
        """The best listed answer that may serve; if the request prefers complete answers, a
        truncated one only if none is complete."""
        own_summary = Summary.of(own.entry) if own else None
        listed = await self._listed(keys.index)
        some_complete = keys.prefer_complete and any(
            answer.complete and not answer.vetoed for answer in listed.values()
        )
        serving = {
            digest: summary.merit(keys)
            for digest, summary in listed.items()
            if summary.may_serve(keys, own_summary) and (summary.complete or not some_complete)
        }
        for digest in sorted(serving, key=serving.__getitem__, reverse=True)[:MAX_TRIES]:
            # Only the digest is the index's: it cannot name another tenant's or model's answer.
            key = f"{keys.answer.rpartition(':')[0]}:{digest}"
            reply = await self.redis.call("read", "GETRANGE", key, 0, self.max_bytes)
            if reply is None:
                return None
            hit = await self.read(key, reply.value)
            is_listed = hit and not hit.stale and hit.entry.index == keys.index
            if hit and is_listed and Summary.of(hit.entry).may_serve(keys, own_summary):
                top = hit.generation.candidates[: keys.return_candidates]
                return replace(hit, generation=replace(hit.generation, candidates=top))
            await self.redis.call("index", "HDEL", keys.index, digest)  # the index was wrong
        return None

    async def _listed(self, index: str) -> dict[str, Summary]:
        """The readable summaries of an index by digest; bounded, unlike HGETALL."""
        reply = await self.redis.call("index", "HRANDFIELD", index, 2 * MAX_LISTED, "WITHVALUES")
        flat = reply.value if reply and isinstance(reply.value, list) else []
        listed = {}
        for field, value in zip(flat[::2], flat[1::2], strict=False):
            with suppress(ValueError, AttributeError):  # not written by this cache
                listed[field.decode()] = _SUMMARY.validate_json(value)
        return listed

    async def _trim(self, keys: Keys, size: int) -> None:
        """Drop the worst answers of an index that lists too many."""
        listed = await self._listed(keys.index) if size > MAX_LISTED else {}
        best_first = sorted(listed, key=lambda digest: listed[digest].merit(keys), reverse=True)
        if excess := best_first[MAX_LISTED:]:
            await self.redis.call("index", "HDEL", keys.index, *excess)
