"""Answers that serve others, and answers that are served when they are old: on a real Valkey."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from orchestrator.cache import MAX_MEMBERS, Cache, Hit
from orchestrator.family import Member
from orchestrator.family import packed as packed_member
from orchestrator.family import unpacked as member_from
from orchestrator.keys import Family, Keys
from specrej.contracts import FinishReason, Generation
from tests.orchestrator.tcp import proxy, scripted
from tests.orchestrator.test_cache import SICK_REPLIES, Clock, generation
from tests.serving import until

BOUND_S = 5.0
_NUMBERS = itertools.count()
PREFIX = "specrej:v4:t:g:w:a1:"
INDEX = "specrej:family:v4:t:g:w:a1:f"


def keys(n: int = 4, returned: int = 1, family: str = INDEX) -> Keys:
    """Those of another request of the family."""
    return Keys(f"{PREFIX}{next(_NUMBERS):064x}", Family(family, n, returned))


def made(
    n: int = 4,
    score: float = 0.5,
    *,
    complete: bool = True,
    vetoed: bool = False,
    candidates: int = 1,
) -> Generation:
    """An answer of a search over `n` candidates."""
    finish = FinishReason.STOP if complete else FinishReason.LENGTH
    whole = generation(f"n={n} score={score}", score)
    best = replace(whole.best, finish=finish, vetoed=vetoed)
    return replace(whole, n=n, candidates=(best,) * candidates)


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Cache]:
    cache = Cache(url, **{"timeout_s": BOUND_S, **options})
    try:
        yield cache
    finally:
        await cache.close()


@pytest.fixture
def admin(redis_url: str) -> Any:
    """A client to look behind the cache's back; the database is empty."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


def text(hit: Hit | None) -> str:
    return hit.generation.best.text if hit else ""


# Upgrades.


async def test_a_larger_search_serves_a_smaller_one(redis_url: str, admin: redis.Redis) -> None:
    """Guards the point of it: of those at least as large, the best; and it says it was cached."""
    async with opened(redis_url) as cache:
        for n, score in ((3, 9.0), (8, 1.0), (16, 2.0), (32, 1.5)):
            assert await cache.put(keys(n), made(n, score))
        hit = await cache.get_better(keys(4))
        assert text(hit) == "n=16 score=2.0" and hit and hit.generation.cached
        assert await cache.get_better(keys(33)) is None
        assert (cache.counts.upgraded, cache.counts.misses) == (1, 2)


async def test_a_better_answer_serves_whatever_its_search(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards the other rule: what is better than the request's own answer, and never worse."""
    async with opened(redis_url) as cache:
        own = keys(8)
        await cache.put(own, made(8, 1.0))
        await cache.put(keys(64), made(64, 0.5))
        assert text(await cache.get_better(own)) == "n=8 score=1.0"
        await cache.put(keys(2), made(2, 1.25))
        assert text(await cache.get_better(own)) == "n=2 score=1.25"


async def test_no_truncated_answer_where_a_complete_one_exists(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against half a sentence with a high score, for lack of a complete one that fits."""
    async with opened(redis_url) as cache:
        await cache.put(keys(64), made(64, 9.0, complete=False))
        assert text(await cache.get_better(keys(8))) == "n=64 score=9.0"
        await cache.put(keys(2), made(2, 1.0))
        assert await cache.get_better(keys(8)) is None
        await cache.put(keys(16), made(16, 0.5))
        assert text(await cache.get_better(keys(8))) == "n=16 score=0.5"


async def test_a_vetoed_answer_serves_its_own_request_only(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against what a reward vetoed spreading to requests that may find better."""
    async with opened(redis_url) as cache:
        own = keys(8)
        await cache.put(own, made(8, 9.0, vetoed=True))
        assert await cache.get_better(keys(4)) is None
        assert text(await cache.get_better(own)) == "n=8 score=9.0"
        await cache.put(keys(1), made(1, -3.0))
        assert text(await cache.get_better(own)) == "n=1 score=-3.0"


async def test_as_many_candidates_as_were_asked_for(redis_url: str, admin: redis.Redis) -> None:
    """Guards against fewer candidates than asked for, or more than the caller can expect."""
    async with opened(redis_url) as cache:
        await cache.put(keys(64, returned=1), made(64, 9.0))
        await cache.put(keys(16, returned=5), made(16, 1.0, candidates=5))
        hit = await cache.get_better(keys(8, returned=3))
        assert hit and len(hit.generation.candidates) == 3
        assert await cache.get_better(keys(8, returned=6)) is None


async def test_families_share_nothing(redis_url: str, admin: redis.Redis) -> None:
    """Guards against an answer to another prompt."""
    async with opened(redis_url) as cache:
        await cache.put(keys(64, family="specrej:family:v4:t:g:w:a1:other"), made(64))
        assert await cache.get_better(keys(8)) is None
        assert await cache.get_better(Keys(keys().answer)) is None


async def test_what_is_gone_leaves_the_index(redis_url: str, admin: redis.Redis) -> None:
    """Guards against an index that points nowhere, and a miss where the next one is good."""
    async with opened(redis_url) as cache:
        gone, there = keys(64), keys(16)
        await cache.put(gone, made(64, 9.0))
        await cache.put(there, made(16, 1.0))
        admin.delete(gone.answer)
        assert gone.family
        assert text(await cache.get_better(keys(8))) == "n=16 score=1.0"
        assert admin.hlen(gone.family.key) == 1


async def test_the_answer_counts_not_what_the_index_says(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards against a wrong index, perhaps of an attacker's: it can cost hits, and no more.

    It promises much of an answer that is small, of one that is another family's, of values that are
    none, and names keys of other tenants.
    """
    async with opened(redis_url) as cache:
        asked, small, other = keys(8), keys(2), keys(64, family="specrej:family:v4:t:g:w:a1:o")
        await cache.put(small, made(2))
        await cache.put(other, made(64))
        victim = "specrej:v4:u:g:w:a1:" + "0" * 64
        await cache.put(Keys(victim, asked.family), made(64))
        assert asked.family
        admin.delete(asked.family.key)
        lie = packed_member(Member(99, 99.0, True, False, 9, 0.0))
        digests = [key.answer.rpartition(":")[2] for key in (small, other)]
        for name in (*digests, "none", f"..:{victim}", victim, "\u00fc", "a b"):
            admin.hset(asked.family.key, name, lie)
        admin.hset(asked.family.key, "garbage", b"\xff{")
        assert await cache.get_better(asked) is None
        assert cache.counts.upgraded == 0 and cache.store.num_failures == 0


@pytest.mark.parametrize("kind", ["list", "huge hash", "huge fields"])
async def test_a_foreign_index_is_no_index(redis_url: str, admin: redis.Redis, kind: str) -> None:
    """Guards against WRONGTYPE in the way of a hit or a store, and an index without an end."""
    own = keys(8)
    assert own.family
    index = own.family.key
    if kind == "list":
        admin.lpush(index, "x")
    else:
        size, number = (10, 5000) if kind == "huge hash" else (10_000, 50)
        admin.hset(index, mapping={f"f{i}": "x" * size for i in range(number)})
    async with opened(redis_url) as cache:
        assert await cache.put(own, made(8))
        assert text(await cache.get_better(own)) == "n=8 score=0.5"
        assert cache.counts.stored == 1


async def test_an_index_is_bounded_and_keeps_the_best(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a hash that grows with every seed that was ever asked for."""
    scores = [(number * 37) % 101 for number in range(MAX_MEMBERS + 20)]
    async with opened(redis_url) as cache:
        for score in scores:
            await cache.put(keys(8), made(8, score))
    listed = [member_from(value) for value in admin.hvals(INDEX)]
    assert sorted(m.score for m in listed if m) == sorted(scores)[-MAX_MEMBERS:]


async def test_foreign_entries_cost_ours_nothing(redis_url: str, admin: redis.Redis) -> None:
    """Guards against dropping good entries for the number of those that somebody else put there."""
    async with opened(redis_url) as cache:
        admin.hset(INDEX, mapping={f"not ours {number}": "x" for number in range(30)})
        for number in range(40):
            await cache.put(keys(8), made(8, number))
        assert admin.hlen(INDEX) == 70


async def test_an_index_outlives_its_newest_entry(redis_url: str, admin: redis.Redis) -> None:
    """Guards against indexes that stay for ever, or end before their answers."""
    async with opened(redis_url, ttl_s=1000) as cache:
        for _ in range(20):
            own = keys(8)
            await cache.put(own, made(8))
            assert own.family
            assert 0 < admin.pttl(own.answer) <= admin.pttl(own.family.key) + 5 <= 1_100_005


async def test_a_refresh_replaces_what_the_index_says(redis_url: str, admin: redis.Redis) -> None:
    """Guards against an old score that keeps a key ahead of better ones."""
    async with opened(redis_url) as cache:
        renewed = keys(16)
        await cache.put(renewed, made(16, 9.0))
        await cache.put(keys(16), made(16, 2.0))
        await cache.put(renewed, made(16, 1.0))
        assert text(await cache.get_better(keys(8))) == "n=16 score=2.0"


@pytest.mark.parametrize("answer", SICK_REPLIES)
async def test_a_sick_server_is_a_miss_for_upgrades_too(answer: Any) -> None:
    """Guards the commands of the index: whatever they get, callers see a miss, and in time."""
    async with scripted(answer) as (url, _), opened(url, timeout_s=0.1) as cache:
        async with asyncio.timeout(BOUND_S):
            assert await cache.get_better(keys(8)) is None
            assert not await cache.put(keys(8), made(8))


async def test_cancelled_anywhere_in_a_pipeline_the_cache_goes_on(
    redis_url: str, admin: redis.Redis
) -> None:
    """Guards the pool: a reply of a pipeline that nobody read must not be the next one's."""
    hasty = itertools.count(0, 100).__next__
    async with opened(redis_url, max_connections=2, clock=hasty) as cache:
        places = [keys(8) for _ in range(4)]
        for turns in range(60):
            tasks = [asyncio.create_task(cache.put(place, made(8))) for place in places]
            tasks += [asyncio.create_task(_got_better(cache, place)) for place in places]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for number, place in enumerate(places):
            assert await cache.put(place, made(8, number))
        assert [text(await cache.get(place.answer)) for place in places] == [
            f"n=8 score={number}" for number in range(4)
        ]
        assert cache.counts.invalid == 0


async def _got_better(cache: Cache, place: Keys) -> bool:
    return await cache.get_better(place) is not None


async def test_a_pipeline_cancelled_halfway_poisons_nobody(shared_valkey: Any) -> None:
    """Guards the same with the replies held back until the caller has left."""
    async with (
        proxy(shared_valkey.port) as (url, valve),
        opened(url, max_connections=1) as cache,
    ):
        own = keys(8)
        await cache.put(own, made(8))
        valve.shut()
        task = asyncio.create_task(cache.put(keys(8), made(8)))
        await until(valve.held.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        valve.open.set()
        for _ in range(3):
            assert text(await cache.get(own.answer)) == "n=8 score=0.5"
        assert (cache.counts.invalid, cache.store.num_failures) == (0, 0)


async def test_many_slow_replies_are_one_wait(shared_valkey: Any, admin: redis.Redis) -> None:
    """Guards against a timeout per call where there are many: here each takes most of one."""
    async with proxy(shared_valkey.port) as (url, valve), opened(url, timeout_s=0.4) as cache:
        for n in range(8, 12):
            gone = keys(n)
            await cache.put(gone, made(n))
            admin.delete(gone.answer)

        async def drip() -> None:
            while True:
                valve.shut()
                await valve.held.wait()
                await asyncio.sleep(0.3)
                valve.open.set()

        dripping = asyncio.create_task(drip())
        began = time.monotonic()
        assert await cache.get_better(keys(4)) is None
        assert time.monotonic() - began < 2 * 0.4 + 0.3
        assert cache.counts.misses == 1 and cache.counts.unanswered == 0
        dripping.cancel()


# Stale answers.


async def test_old_answers_are_stale_and_then_gone(redis_url: str, admin: redis.Redis) -> None:
    """Guards both limits: fresh up to the time to live, then stale, and in Redis for both."""
    clock = Clock()
    async with opened(redis_url, ttl_s=100, stale_s=50, wall_clock=clock) as cache:
        own = keys()
        await cache.put(own, made())
        assert 100_000 - 10_000 + 49_000 < admin.pttl(own.answer) <= 160_000
        for age_s, stale in ((0.0, False), (99.0, False), (101.0, True), (149.0, True)):
            clock.now_s = 100.0 + age_s
            hit = await cache.get(own.answer)
            assert hit and hit.stale is stale
        assert (cache.counts.hits, cache.counts.stale) == (4, 2)


async def test_without_the_option_nothing_is_stale(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a refresh nobody asked for, and against trusting other machines' clocks."""
    clock = Clock()
    async with opened(redis_url, ttl_s=100, wall_clock=clock) as cache:
        own = keys()
        await cache.put(own, made())
        assert 89_000 < admin.pttl(own.answer) <= 110_000
        for now_s in (1e9, -1e9):
            clock.now_s = now_s
            hit = await cache.get(own.answer)
            assert hit and not hit.stale


async def test_a_stale_answer_serves_nobody_else(redis_url: str, admin: redis.Redis) -> None:
    """Guards against an upgrade to something that is due to be replaced."""
    clock = Clock()
    async with opened(redis_url, ttl_s=100, stale_s=50, wall_clock=clock) as cache:
        await cache.put(keys(64), made(64))
        clock.now_s += 120
        assert await cache.get_better(keys(8)) is None
