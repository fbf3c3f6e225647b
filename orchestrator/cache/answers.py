"""The answer cache: final best responses in Redis, cache-aside. Every failure of Redis is a miss.

It decides what is stored and for how long. docs/cache.md describes the stored format.
"""

from __future__ import annotations

import hmac
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from orchestrator.background import packed, unpacked
from orchestrator.cache.redis_client import RedisClient, Reply
from orchestrator.cache.secret import Secret
from specrej import telemetry
from specrej.contracts import Generation
from specrej.telemetry import names

COMPRESS_ABOVE_BYTES = 1024
_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A stored answer."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_bytes="base64",
        ser_json_inf_nan="constants",
        val_json_bytes="base64",
    )
    stored_at: float  # seconds since the epoch, on the clock of the process that stored it
    generation: Generation


_ENTRY = TypeAdapter(CacheEntry)


def pack(entry: CacheEntry, key: str, secret: Secret, max_bytes: int) -> bytes:
    """The value to store under `key`: a MAC of key and stream, then the JSON in that zlib stream.

    Up to 1 KiB the stream is not compressed. Both sizes are limited to `max_bytes`.

    Raises:
        ValueError: the entry is too large or has a number that is not finite.
    """
    text = _ENTRY.dump_json(entry)
    # pydantic writes numbers that are not finite, but does not read them.
    if b"NaN" in text or b"Infinity" in text:
        _ENTRY.validate_json(text)
    # Level 1 is the fastest that compresses: this may run on the event loop.
    stream = zlib.compress(text, level=1 if len(text) > COMPRESS_ABOVE_BYTES else 0)
    if max(len(text), _MAC_BYTES + len(stream)) > max_bytes:
        raise ValueError(f"{len(text)} bytes, {max_bytes} allowed")
    return mac(key, stream, secret) + stream


def unpack(key: str, stored: object, secret: Secret, max_bytes: int) -> CacheEntry:
    """The entry in a stored value; decompresses at most `max_bytes`.

    Raises:
        ValueError: not a whole value of this format, stored under this key with this secret.
    """
    if not isinstance(stored, bytes) or len(stored) > max_bytes:
        raise ValueError("not a string of an allowed size")
    stream = stored[_MAC_BYTES:]
    if not hmac.compare_digest(stored[:_MAC_BYTES], mac(key, stream, secret)):
        raise ValueError("corrupt, stored under another key or with another secret")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stream, max_bytes + 1)
    except zlib.error as error:
        raise ValueError("corrupt") from error
    if not inflater.eof or inflater.unused_data or len(text) > max_bytes:
        raise ValueError("truncated, too large or followed by other bytes")
    entry = _ENTRY.validate_json(text)
    if not entry.generation.candidates:
        raise ValueError("without an answer")
    return entry


def mac(key: str, stream: bytes, secret: Secret) -> bytes:
    """The MAC of a stream under `key`, which has the format's version and contains no NUL."""
    return secret.hash("answer", key.encode() + b"\0" + stream)


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer, marked as cached; `stale` if older than its time to live."""

    generation: Generation
    stale: bool


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
        secret: Secret | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Times to live vary by the fraction `ttl_jitter`, so that entries do not expire together.

        Entries stay for `stale_s` seconds more, and are stale then. `max_bytes` bounds a value,
        compressed and not. `wall_clock` returns seconds since the epoch.
        """
        self.redis = redis
        self.secret = secret or Secret()
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._jitter = ttl_jitter
        self._stale_s = stale_s
        self._wall_clock = wall_clock

    async def get(self, key: str) -> Hit | None:
        """The answer stored under `key`, or None.

        A bad entry stays where it is: the next answer to be stored replaces it.
        """
        # GETRANGE returns an empty string for a missing key. One byte more than allowed detects a
        # value that is too large without fetching all of it.
        reply = await self.redis.call("read", "GETRANGE", key, 0, self.max_bytes)
        hit = None
        if reply is None:
            result = "error" if self.redis.is_on else "off"
        elif reply.value == b"":
            result = "miss"
        elif hit := await self._read(key, reply.value):
            result = "stale" if hit.stale else "hit"
        else:
            result = "invalid"
        telemetry.metrics.add(names.CACHE_RESULTS, result=result)
        return hit

    async def _read(self, key: str, stored: object) -> Hit | None:
        """The answer in the value of `key`; None unless it is whole and valid."""
        unpacking = partial(unpack, key, secret=self.secret, max_bytes=self.max_bytes)
        try:
            entry = await unpacked(unpacking, stored)
        except ValueError:
            return None
        age_s = self._wall_clock() - entry.stored_at
        # With no stale period, Redis's own expiry decides alone.
        is_stale = self._stale_s > 0 and age_s > self._ttl_s
        return Hit(replace(entry.generation, cached=True), is_stale)

    async def put(self, key: str, generation: Generation) -> bool:
        """Store an answer, unless it is cached, not shareable, reduced or too large; returns
        whether."""
        may_store = not (generation.cached or generation.reduced) and is_shareable(generation)
        if not self.redis.is_on or not may_store:
            return False
        sealing = partial(pack, key=key, secret=self.secret, max_bytes=self.max_bytes)
        try:
            stored = await packed(sealing, CacheEntry(self._wall_clock(), generation))
        except ValueError:
            return False
        jitter = random.uniform(1 - self._jitter, 1 + self._jitter)
        life_ms = max(1, round((self._ttl_s * jitter + self._stale_s) * 1000))
        reply = await self.redis.call("write", "SET", key, stored, "PX", life_ms)
        return reply == Reply(True)
