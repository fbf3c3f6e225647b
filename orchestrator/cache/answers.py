"""The answer cache: final best responses in Redis, cache-aside. Every failure of Redis is a miss.

It decides what is stored and for how long. docs/configuration.md describes the stored format.
"""

from __future__ import annotations

import hmac
import random
import zlib
from dataclasses import replace
from functools import partial

from pydantic import ConfigDict, TypeAdapter

from orchestrator.background import converted
from orchestrator.cache.redis_client import RedisClient
from orchestrator.cache.secret import Secret
from specrej import telemetry
from specrej.contracts import Generation
from specrej.telemetry import names

MAX_BYTES = 1 << 20  # of a value, compressed and not
_MAC_BYTES = 32
_JITTER = 0.1  # of times to live, so that answers do not expire together
# A list of one: pydantic takes no configuration for a dataclass itself. Numbers that are not finite
# are written as null, which is a miss when it is read.
_STORED = TypeAdapter(
    tuple[Generation],
    config=ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    ),
)


def pack(generation: Generation, key: str, secret: Secret) -> bytes:
    """The value to store under `key`: a MAC of key and stream, then the JSON in that zlib stream.

    Raises:
        ValueError: the answer is too large.
    """
    text = _STORED.dump_json((generation,))
    # Level 1 is the fastest that compresses: small answers are packed on the event loop.
    stream = zlib.compress(text, level=1)
    if max(len(text), _MAC_BYTES + len(stream)) > MAX_BYTES:
        raise ValueError(f"{len(text)} bytes, {MAX_BYTES} allowed")
    return mac(key, stream, secret) + stream


def unpack(key: str, stored: object, secret: Secret) -> Generation:
    """The answer in a stored value; decompresses at most `MAX_BYTES`.

    Raises:
        ValueError: not a whole value of this format, stored under this key with this secret.
    """
    if not isinstance(stored, bytes) or len(stored) > MAX_BYTES:
        raise ValueError("not a string of an allowed size")
    stream = stored[_MAC_BYTES:]
    if not hmac.compare_digest(stored[:_MAC_BYTES], mac(key, stream, secret)):
        raise ValueError("corrupt, stored under another key or with another secret")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stream, MAX_BYTES + 1)
    except zlib.error as error:
        raise ValueError("corrupt") from error
    if not inflater.eof or inflater.unused_data or len(text) > MAX_BYTES:
        raise ValueError("truncated, too large or followed by other bytes")
    (generation,) = _STORED.validate_json(text)
    if not generation.candidates:
        raise ValueError("without an answer")
    return generation


def mac(key: str, stream: bytes, secret: Secret) -> bytes:
    """The MAC of a stream under `key`, which has the format's version and contains no NUL."""
    return secret.hash("answer", key.encode() + b"\0" + stream)


class Cache:
    """Stored answers. No method raises anything but CancelledError, as `redis` bounds each call."""

    def __init__(
        self, redis: RedisClient, *, ttl_s: float = 3600, secret: Secret | None = None
    ) -> None:
        """Answers stay for `ttl_s` seconds, plus or minus 10 %."""
        self.redis = redis
        self.secret = secret or Secret()
        self._ttl_s = ttl_s

    async def get(self, key: str) -> Generation | None:
        """The answer stored under `key`, marked as cached, or None.

        A bad value stays where it is: the next answer to be stored replaces it.
        """
        # GETRANGE returns an empty string for a missing key. One byte more than allowed detects a
        # value that is too large without fetching all of it.
        stored = await self.redis.call("read", "GETRANGE", key, 0, MAX_BYTES)
        found = None
        if stored is None:
            result = "error" if self.redis.is_on else "off"
        elif stored == b"":
            result = "miss"
        else:
            unpacking = partial(unpack, key, secret=self.secret)
            try:
                found = replace(await converted(unpacking, stored), cached=True)
                result = "hit"
            except ValueError:
                result = "invalid"
        telemetry.metrics.add(names.CACHE_RESULTS, result=result)
        return found

    async def put(self, key: str, generation: Generation) -> bool:
        """Store an answer, unless it is weak, cached or too large; returns whether."""
        is_weak = generation.reduced or generation.degraded or generation.hurried
        if not self.redis.is_on or generation.cached or is_weak:
            return False
        try:
            stored = await converted(partial(pack, key=key, secret=self.secret), generation)
        except ValueError:
            return False
        life_ms = max(1, round(self._ttl_s * random.uniform(1 - _JITTER, 1 + _JITTER) * 1000))
        return await self.redis.call("write", "SET", key, stored, "PX", life_ms) is True
