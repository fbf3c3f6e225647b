"""The cache on a real Valkey that works: what is stored, how long, over which connections."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import replace

import pytest
import redis

from orchestrator.cache.answers import MAX_BYTES, pack
from specrej.contracts import Degradation
from tests.orchestrator.caching import (
    SECRET,
    CacheEvents,
    generation,
    new_cache,
    new_key,
    open_cache,
    text_of,
)
from tests.orchestrator.tcp import hang, scripted
from tests.serving import turns, until


async def test_entries_expire_at_different_times(redis_url: str, admin: redis.Redis) -> None:
    """Guards against keys without expiry, and against all of them expiring at once.

    40 uniform times agreeing to 20 s, or leaving their range: never by chance.
    """
    async with open_cache(redis_url, ttl_s=1000) as cache:
        for number in range(40):
            await cache.put(f"k{number}", generation())
    lives_ms = [admin.pttl(f"k{number}") for number in range(40)]
    assert all(890_000 < life_ms <= 1_100_000 for life_ms in lives_ms)
    assert max(lives_ms) - min(lives_ms) > 20_000


async def test_weaker_cached_and_large_answers_are_not_stored(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against weak answers kept for an hour, entries that renew themselves, huge ones."""
    async with open_cache(redis_url) as cache:
        for answer in (
            replace(generation(), degradations=(Degradation.REWARD,)),
            replace(generation(), hurried=True),
            replace(generation(), cached=True),
            generation("x" * MAX_BYTES),
        ):
            assert not await cache.put("k", answer)
    assert admin.dbsize() == 0


_VALUE, _MOVED = (pack(generation(), key, SECRET) for key in ("k", "other"))
_FOREIGN = (b"garbage", b"x" * (2 << 20), zlib.compress(b"{}"), b"\0", ["a list"])
_CHANGED = (_VALUE[:-1], _VALUE[:-1] + bytes([_VALUE[-1] ^ 1]))
_FORGED = bytes(32) + _VALUE[32:]  # with another MAC


@pytest.mark.parametrize("value", [*_FOREIGN, *_CHANGED, _FORGED, _MOVED])
async def test_a_bad_entry_is_a_miss_and_is_replaced(
    redis_url: str, admin: redis.Redis, cache_events: CacheEvents, value: bytes | list[str]
) -> None:
    """Guards against a bad entry that raises, is served, prevents a good one or the next call."""
    if isinstance(value, bytes):
        admin.set("k", value)
    else:
        admin.lpush("k", *value)
    async with open_cache(redis_url, cool_down_s=0.0) as cache:
        assert await cache.get("k") is None
        assert cache_events.results == {"invalid" if isinstance(value, bytes) else "error": 1}
        assert await cache.get("absent") is None and cache_events.results["miss"] == 1
        await cache.put("k", generation())
        assert await cache.get("k")


async def test_a_huge_entry_is_not_fetched(
    redis_url: str, admin: redis.Redis, cache_events: CacheEvents
) -> None:
    """Guards against megabytes that are read into memory only to be rejected."""
    admin.setrange("k", 64 << 20, "x")
    before = admin.info("stats")["total_net_output_bytes"]
    async with open_cache(redis_url) as cache:
        assert await cache.get("k") is None
    assert cache_events.results == {"invalid": 1}
    assert admin.info("stats")["total_net_output_bytes"] - before < 2 * MAX_BYTES


# Connections


async def test_a_cancellation_at_any_point_costs_no_connection(
    redis_url: str, admin: redis.Redis, cache_events: CacheEvents
) -> None:
    """Guards the pool against a cancellation after any number of turns of the loop.

    Connecting included: every other round begins with fresh connections. A connection lost from
    the pool would leave the last reads without one.
    """
    async with open_cache(redis_url, max_connections=2, cool_down_s=0.0) as cache:
        places = [new_key() for _ in range(4)]
        for number in range(100):
            if number % 2:
                admin.client_kill_filter(_type="normal", skipme=True)
            tasks: list[asyncio.Task[object]] = []
            for place in places:
                tasks.append(asyncio.create_task(cache.get(place)))
                tasks.append(asyncio.create_task(cache.put(place, generation())))
            await turns(number // 2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for number, place in enumerate(places):
            assert await cache.put(place, generation(f"answer {number}"))
        hits = await asyncio.gather(*(cache.get(place) for place in places))
        assert [text_of(hit) for hit in hits] == [f"answer {n}" for n in range(4)]
    assert not cache_events.results["invalid"]


async def test_a_closed_cache_is_off() -> None:
    """Guards against connections after the end, and a drain that a dead Redis delays."""
    async with scripted(hang) as (url, counts):
        cache = new_cache(url, timeout_s=2)
        lookup = asyncio.create_task(cache.get("k"))
        await until(lambda: counts["commands"] == 1)
        began = time.monotonic()
        await cache.redis.close()
        await cache.redis.close()
        assert time.monotonic() - began < 10
        assert await lookup is None
        assert await cache.get("k") is None and not await cache.redis.available()
        assert counts["connections"] <= 2  # redis-py tries the broken call again, once
