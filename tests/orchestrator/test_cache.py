"""The cache on a real Valkey that works: what is stored, how long, over which connections."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache import Secret
from orchestrator.cache.answers import MAX_BYTES, mac, pack, unpack
from specrej.contracts import Degradation, Generation, TokenLogprob, TopLogprobs
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


# Stored values: what is written is read again, and anything else is rejected


def packed(generation: Generation) -> bytes:
    return pack(generation, "k", SECRET)


def unpacked(value: object) -> Generation:
    return unpack("k", value, SECRET)


def sealed(stream: bytes) -> bytes:
    """The value of a stream, with a valid MAC."""
    return mac("k", stream, SECRET) + stream


def text_in(value: bytes) -> bytes:
    """The JSON in a value."""
    return zlib.decompress(value[32:])


_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.text(), _FLOATS, st.lists(_FLOATS, max_size=5), st.binary(max_size=5))
def test_any_finite_answer_survives_packing(
    text: str, score: float, logprobs: list[float], token: bytes
) -> None:
    """Guards against rounded numbers, altered texts or lost tokens, such as half a character."""
    answer = generation(text, score)
    ids = tuple(range(len(logprobs)))
    top = tuple(TopLogprobs((TokenLogprob(i, token, logprobs[i]),)) for i in ids)
    best = replace(
        answer.best,
        token_ids=ids,
        logprobs=tuple(logprobs),
        tokens=(token,) * len(ids),
        top_logprobs=top,
    )
    answer = replace(answer, candidates=(best,))
    assert unpacked(packed(answer)) == answer


def test_a_value_of_another_length_is_rejected() -> None:
    """Guards against half an answer, and bytes after it: every other length is rejected."""
    value = packed(generation())
    for wrong in (value + b"\0", *(value[:length] for length in range(len(value)))):
        with pytest.raises(ValueError):
            unpacked(wrong)


def test_a_value_is_bound_to_its_key_and_secret(tmp_path: Path) -> None:
    """Guards against an answer that another program wrote, or moved to another key."""
    secrets = [SECRET]
    for number in range(2):
        file = tmp_path / f"secret-{number}"
        file.write_bytes(bytes([65 + number]) * 32)
        secrets.append(Secret(file))
    entry = generation()
    for writer in secrets:
        value = pack(entry, "k", writer)
        for reader in secrets:
            for key in ("k", "other"):
                if (reader, key) == (writer, "k"):
                    assert unpack(key, value, reader) == entry
                else:
                    with pytest.raises(ValueError, match="another"):
                        unpack(key, value, reader)


def _altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A value whose JSON is changed."""
    stored = json.loads(text_in(packed(generation())))
    change(stored[0])
    return sealed(zlib.compress(json.dumps(stored).encode()))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(more=1),
        lambda e: e.update(candidates=[]),
        lambda e: e.pop("usage"),
        lambda e: e["candidates"][0].update(score=float("nan")),
        lambda e: e["candidates"][0].update(score=None),
        lambda e: e["candidates"][0].update(finish="other"),
        lambda e: e["candidates"][0].update(token_ids=["7"]),
        lambda e: e["candidates"][0].update(logprobs=[float("-inf")]),
        lambda e: e["candidates"][0].update(vetoed=1),
    ],
)
def test_a_wrong_value_is_rejected(change: Callable[[dict[str, Any]], object]) -> None:
    """Guards against missing answers and infinite numbers."""
    assert unpacked(_altered(lambda e: None)) == generation()
    with pytest.raises(ValueError):
        unpacked(_altered(change))


def test_decompression_is_bounded() -> None:
    """Guards against a megabyte that inflates to a gigabyte in memory."""
    bomb = sealed(zlib.compress(b"\0" * (64 << 20)))
    assert len(bomb) < MAX_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="too large"):
            unpacked(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    finally:
        tracemalloc.stop()


def test_the_size_limit_is_the_same_for_reading_and_writing() -> None:
    """Guards against a value of the permitted size that can be written but never read."""
    num_others = len(text_in(packed(generation(""))))
    answer = generation("x" * (MAX_BYTES - num_others))
    assert unpacked(packed(answer)) == answer
    with pytest.raises(ValueError):
        packed(generation(answer.best.text + "x"))
