"""Final best responses in Redis, cache-aside: whatever is wrong with Redis, callers see a miss.

The only file that knows redis. It decides what a key is and what a stored value looks like; when
to look and when to store is its caller's business.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import ConfigDict, TypeAdapter
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ResponseError

from specrej import telemetry
from specrej.contracts import (
    Algorithm,
    Generation,
    GenerationRequest,
    Normalization,
    Schedule,
    WeightedReward,
)

log = logging.getLogger(__name__)

FORMAT_VERSION = 3  # of keys and values; raise it when either changes
ALGORITHM_VERSION = 1  # raise it when the same request would get another answer
COMPRESS_ABOVE_BYTES = 1024

# The fields that count for each kind of schedule, and of normalization.
_FIELDS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "memory": (),
    "tokens": ("tokens",),
    "geometric": ("first", "factor"),
    "none": (),
    "fixed": ("mean", "deviation"),
    "batch": (),
}


def tenant_digest(tenant: str) -> str:
    """32 characters that stand for a tenant wherever its name has no business."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def cache_key(
    request: GenerationRequest,
    *,
    tenant: str,
    generator_fingerprint: str,
    reward_fingerprint: str,
) -> str:
    """The key of a request whose defaults are filled in; holds no text of prompt or tenant.

    Requests that must get the same answer have the same key, whatever the order of their rewards.
    No tenant can name another's key: the tenant's place is a digest, other parts are escaped.
    """
    parts = (
        f"v{FORMAT_VERSION}",
        tenant_digest(tenant),
        generator_fingerprint,
        reward_fingerprint,
        f"a{ALGORITHM_VERSION}",
        _digest(request),
    )
    return "specrej:" + ":".join(quote(part, safe="") for part in parts)


def _digest(request: GenerationRequest) -> str:
    """SHA-256 of what the answer depends on; a field new to the contract counts by itself."""
    fields = asdict(request)
    # The generator's fingerprint says more than the model's name does.
    del fields["cache"], fields["model"]
    selection = fields["selection"]
    rewards = sorted(request.selection.rewards, key=lambda reward: reward.name)
    selection["rewards"] = [_reward_fields(reward) for reward in rewards]
    selection["schedule"] = _fields_of(request.selection.schedule)
    if request.selection.algorithm is Algorithm.BEST_OF_N:
        del selection["alpha"], selection["schedule"]
    # Escaped to ASCII, so that NFC and NFD stay apart and no text is too strange to encode.
    canonical = json.dumps(_canonical(fields), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _reward_fields(reward: WeightedReward) -> dict[str, object]:
    return {**asdict(reward), "normalization": _fields_of(reward.normalization)}


def _fields_of(value: Schedule | Normalization) -> dict[str, object]:
    """The fields that count for its kind."""
    fields = {name: getattr(value, name) for name in _FIELDS_OF_KIND[value.kind]}
    return {"kind": value.kind, **fields}


def _canonical(value: Any) -> Any:
    """Enums as their values; one spelling for equal numbers (1 and 1.0, 0.0 and -0.0)."""
    match value:
        case dict():
            return {name: _canonical(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_canonical(inner) for inner in value]
        case Enum():
            return value.value
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


@dataclass(frozen=True, slots=True)
class _Envelope:
    """What is stored: the key goes along, so that a value under a wrong key is found out."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False
    )
    version: int
    key: str
    generation: Generation


_ENVELOPE = TypeAdapter(_Envelope)


def pack(key: str, generation: Generation, max_bytes: int) -> bytes:
    """A value to store: JSON in a zlib stream, at most `max_bytes` of either.

    The stream's first bytes mark how hard it is compressed (not at all up to 1 KiB) and its last
    ones are a checksum, so that short and long values are read, and checked, in one way.

    Raises:
        ValueError: too large, not finite, or otherwise not readable again.
    """
    text = _ENVELOPE.dump_json(_Envelope(FORMAT_VERSION, key, generation))
    _ENVELOPE.validate_json(text)  # numbers that are not finite can be written, but never read
    # The fastest level: this runs on the event loop.
    stored = zlib.compress(text, level=1 if len(text) > COMPRESS_ABOVE_BYTES else 0)
    if max(len(text), len(stored)) > max_bytes:
        raise ValueError(f"{len(text)} bytes, {max_bytes} allowed")
    return stored


def unpack(key: str, stored: object, max_bytes: int) -> Generation:
    """The answer in a stored value; never unpacks more than `max_bytes`.

    Raises:
        ValueError: anything else than a whole value of this format, stored under this key.
    """
    if not isinstance(stored, bytes) or len(stored) > max_bytes:
        raise ValueError("not a value of this cache")
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stored, max_bytes + 1)
    except zlib.error as error:
        raise ValueError("corrupt") from error
    if not inflater.eof or inflater.unused_data or len(text) > max_bytes:
        raise ValueError("truncated, too large or followed by something else")
    envelope = _ENVELOPE.validate_json(text)
    if (envelope.version, envelope.key) != (FORMAT_VERSION, key):
        raise ValueError("stored under another key")
    if not envelope.generation.candidates:
        raise ValueError("no answer in it")
    return envelope.generation


@dataclass(slots=True)
class CacheCounts:
    """What happened so far; each `get` ends as one of the first four, `failures` are Redis calls.

    `invalid` are entries found but unusable. `rejected` are answers that were not to be stored.
    """

    hits: int = 0
    misses: int = 0
    invalid: int = 0
    unanswered: int = 0
    stored: int = 0
    rejected: int = 0
    failures: int = 0


class Cache:
    """Answers kept in Redis for a while; an empty URL switches it off.

    No method raises anything but CancelledError, or takes longer than `timeout_s` seconds. Once
    Redis could not be reached, did not answer in time or broke off, it is left alone for
    `cool_down_s` seconds; then one call probes it. An error reply (READONLY, OOM, NOPERM, ...) is
    an answer in time: only its own call fails, as a server that cannot store can still be read.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float = 3600,
        ttl_jitter: float = 0.1,
        timeout_s: float = 0.25,
        cool_down_s: float = 1.0,
        max_bytes: int = 1 << 20,
        max_connections: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_jitter` is the fraction by which times to live differ, lest all end at once.

        `max_bytes` bounds a value, compressed and not. `clock` tells seconds.

        Raises:
            ValueError: `url` is not a Redis URL.
        """
        self.counts = CacheCounts()
        self._redis = _client(url, timeout_s, max_connections) if url else None
        # The pool alone would refuse the one connection too many. Its own blocking kind can lose
        # a connection for good when a task is cancelled while it waits to give one back.
        self._connections = asyncio.Semaphore(max_connections)
        self._ttl_s = ttl_s
        self._ttl_jitter = ttl_jitter
        self._timeout_s = timeout_s
        self._cool_down_s = cool_down_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._rest_until = clock()
        self._failing: set[str] = set()

    async def get(self, key: str) -> Generation | None:
        """The answer stored under `key`, marked as cached; None if there is none to be had.

        A bad entry is left where it is: the answer made instead will replace it.
        """
        # A missing key reads as empty. One byte more than allowed tells a value that is too large
        # without fetching all of it.
        stored = await self._call("read", "GETRANGE", key, 0, self._max_bytes)
        if stored is None:
            self.counts.unanswered += 1
            return None
        if stored == b"":
            self.counts.misses += 1
            return None
        try:
            generation = unpack(key, stored, self._max_bytes)
        except ValueError:
            self.counts.invalid += 1
            return None
        self.counts.hits += 1
        return replace(generation, cached=True)

    async def put(self, key: str, generation: Generation) -> None:
        """Store an answer; not one that is degraded, came from the cache, or is too large."""
        if self._redis is None:
            return
        try:
            if generation.degraded or generation.cached:
                raise ValueError("not the answer to keep")
            stored = pack(key, generation, self._max_bytes)
        except ValueError:
            self.counts.rejected += 1
            return
        if await self._call("write", "SET", key, stored, "PX", self._ttl_ms()) is True:
            self.counts.stored += 1

    async def available(self) -> bool:
        """Whether Redis answers; False while it is left alone, or switched off."""
        return await self._call("ping", "PING") is True

    async def close(self) -> None:
        """Close all connections; from then on the cache is switched off."""
        redis, self._redis = self._redis, None
        if redis is not None:
            with suppress(Exception):  # a connection that breaks while closing is closed
                async with asyncio.timeout(self._timeout_s):
                    await redis.aclose()

    async def _call(self, purpose: str, *command: str | bytes | int) -> object | None:
        """The reply (True for OK and PONG); None if there is none, for whatever reason."""
        if self._redis is None or self._resting():
            return None
        with telemetry.span(f"cache.{purpose}") as span:
            try:
                async with asyncio.timeout(self._timeout_s), self._connections:
                    reply: object = await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            except ResponseError as error:
                self._works("connection")
                self._fails(purpose, error, span)
                return None
            except Exception as error:
                self._rest_until = self._clock() + self._cool_down_s
                self._fails("connection", error, span)
                return None
        self._works("connection")
        self._works(purpose)
        return reply

    def _resting(self) -> bool:
        """Whether Redis is being left alone; if that is just over, the one who asks may probe."""
        if "connection" not in self._failing:
            return False
        now = self._clock()
        if now < self._rest_until:
            return True
        self._rest_until = now + max(self._cool_down_s, self._timeout_s)
        return False

    def _fails(self, what: str, error: Exception, span: telemetry.Span) -> None:
        self.counts.failures += 1
        # Only the error's kind: its text can quote the command.
        kind = type(error).__name__
        span.add_event("cache failure", {"what": what, "error": kind})
        if what not in self._failing:
            self._failing.add(what)
            log.warning("cache %s fails, going on without it: %s", what, kind)

    def _works(self, what: str) -> None:
        if what in self._failing:
            self._failing.remove(what)
            log.info("cache %s works again", what)

    def _ttl_ms(self) -> int:
        spread = random.uniform(1 - self._ttl_jitter, 1 + self._ttl_jitter)
        return max(1, round(self._ttl_s * spread * 1000))


def _client(url: str, timeout_s: float, max_connections: int) -> Redis:
    """A client that never retries, and whose connections need no handshake but AUTH and SELECT."""
    pool: ConnectionPool = ConnectionPool.from_url(
        url,
        max_connections=max_connections,
        socket_connect_timeout=timeout_s,
        # The caller's timeout bounds reads and writes. redis-py's own goes through
        # asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
        socket_timeout=None,
        # Protocol 3 switches on maintenance notifications, and with them off the check that a
        # pooled connection has no unread reply.
        protocol=2,
        driver_info=None,
    )
    return Redis.from_pool(pool)
