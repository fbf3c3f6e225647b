"""The byte budget of a tenant in the cache, on a real Valkey."""

from __future__ import annotations

import random
from dataclasses import replace

import redis

from orchestrator.cache import Keys
from orchestrator.cache.answers import ENTRY_OVERHEAD_BYTES
from orchestrator.cache.keys import FORMAT_VERSION
from tests.orchestrator.caching import TENANT, generation, new_keys, open_cache, search_answer

BUDGET = 40_000


def charged(admin: redis.Redis, places: list[Keys]) -> int:
    """Bytes of the answers that are stored, as the budget counts them."""
    sizes = [admin.strlen(place.answer) for place in places]
    return sum(size + ENTRY_OVERHEAD_BYTES for size in sizes if size)


async def test_a_tenants_oldest_answers_make_room(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a tenant that fills Redis, and against a budget that empties the cache."""
    draws, places = random.Random(7), [new_keys(index="") for _ in range(60)]
    other = replace(new_keys(), tenant=f"specrej:tenant:v{FORMAT_VERSION}:u")
    async with open_cache(redis_url, tenant_bytes=BUDGET) as cache:
        await cache.put(other, generation())
        for number, place in enumerate(places):
            # Random digits: compression must not make all values small.
            text = "".join(draws.choices("0123456789abcdef", k=draws.choice([10, 3000, 9000])))
            assert await cache.put(place, generation(text))
            assert charged(admin, places) <= BUDGET
            stored = [bool(admin.exists(p.answer)) for p in places[: number + 1]]
            assert stored == sorted(stored), "an answer is gone, an older one is not"
        assert charged(admin, places) > BUDGET / 2
        assert await cache.get(other.answer)
        assert admin.zcard(TENANT) == sum(stored) + 1


async def test_a_replaced_answer_is_not_dropped_early(redis_url: str, admin: redis.Redis) -> None:
    """Guards against an index that drops a key that is stored again."""
    first, second = new_keys(index=""), new_keys(index="")
    async with open_cache(redis_url, tenant_bytes=BUDGET) as cache:
        await cache.put(second, generation())
        for _ in range(100):
            await cache.put(first, generation())
        assert await cache.get(first.answer)
        assert await cache.get(second.answer) is None, "replaced values count"
        assert admin.zcard(TENANT) == 2


async def test_an_answer_above_the_budget_is_not_stored(redis_url: str) -> None:
    """Guards the tenant's other answers against it, and those that wait for it against turns."""
    small, large = new_keys(index=""), new_keys(index="")
    text = "".join(random.Random(7).choices("0123456789abcdef", k=3 * BUDGET))
    async with open_cache(redis_url, tenant_bytes=BUDGET) as cache:
        assert await cache.put(small, generation())
        assert not await cache.put(large, generation(text))
        assert await cache.get(small.answer) and not await cache.get(large.answer)


async def test_a_large_answer_after_many_small_ones(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a bound on deletions that lets a tenant exceed its budget."""
    small, large = [new_keys(index="") for _ in range(300)], new_keys(index="")
    text = "".join(random.Random(7).choices("0123456789abcdef", k=400_000))
    async with open_cache(redis_url, tenant_bytes=400_000) as cache:
        for place in small:
            await cache.put(place, generation())
        await cache.put(large, generation(text))
    assert admin.exists(large.answer)
    assert charged(admin, [*small, large]) <= 400_000


async def test_the_index_of_a_tenant_expires(redis_url: str, admin: redis.Redis) -> None:
    """Guards against keys without expiry, and an index that ends before its answers."""
    async with open_cache(redis_url, ttl_s=100, stale_s=50, tenant_bytes=BUDGET) as cache:
        await cache.put(new_keys(index=""), generation())
    assert 159_000 < admin.pttl(TENANT) <= 160_000


async def test_the_overhead_of_an_answer_is_counted(redis_url: str, admin: redis.Redis) -> None:
    """Guards against a budget that Redis's memory exceeds: keys and indexes are not free."""
    places = [new_keys(index=f"specrej:comparable:x:{number}") for number in range(200)]
    async with open_cache(redis_url, tenant_bytes=1 << 30) as cache:
        for place in places:
            await cache.put(place, search_answer())
    used = sum(admin.memory_usage(key) or 0 for key in admin.scan_iter())
    assert used <= charged(admin, places)
