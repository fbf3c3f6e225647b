"""Faults of Redis: the real server in every bad state, and failures of the connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from redis.asyncio import Redis

from specrej.contracts import CacheControl
from tests.faults.case import Case, here
from tests.faults.proxy import Proxy
from tests.faults.world import Outcome, World, until

_NUM_KILLED = 24
_MOST_S = 6.0  # of a request without Redis


def redis_client(world: World) -> Any:
    """Return a client of the server without the proxy."""
    return Redis.from_url(world.stack.redis_url)


async def _cached_answers(world: World, seed: int) -> list[Outcome]:
    """Send two equal requests that may use the cache, one after the other."""
    options = {"seed": seed, "cache": CacheControl.USE, "max_tokens": 8}
    return [await world.generate(**options), await world.generate(**options)]


def _missed(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the codes; assert that the cache answered neither request."""
    assert not any(o.generation and o.generation.cached for o in outcomes), "the cache answered"
    return _codes(outcomes)


def _codes(outcomes: Sequence[Outcome]) -> list[str]:
    late = [outcome.seconds for outcome in outcomes if outcome.seconds > _MOST_S]
    assert not late, f"requests took {late} s"
    texts = {outcome.generation.best.text for outcome in outcomes if outcome.generation}
    assert len(texts) == 1, f"equal requests, {len(texts)} answers"
    return [outcome.label for outcome in outcomes]


async def redis_through(change: Callable[[Proxy], None], seed: int, world: World) -> list[str]:
    """Break the connection to Redis, then restore it: the cache must work again."""
    change(world.proxies["redis"])
    codes = _missed(await _cached_answers(world, seed))
    await world.proxies["redis"].heal()
    await until(lambda: _is_cached(world, seed))
    return codes


async def _is_cached(world: World, seed: int) -> bool:
    outcomes = await _cached_answers(world, seed)
    return bool(outcomes[1].generation and outcomes[1].generation.cached)


def _reset_mid_reply(proxy: Proxy) -> None:
    proxy.replies.cut_after = 3


async def redis_evicting(world: World) -> list[str]:
    """An evicted answer is a miss and is stored again."""
    async with redis_client(world) as client:
        await client.flushall()
        first = await _cached_answers(world, 600)
        await _evict(client)
        outcomes = await _cached_answers(world, 600)
    cached = [o.generation and o.generation.cached for o in outcomes]
    assert cached == [False, True], "an evicted answer was used, or was not stored again"
    return _codes([*first, *outcomes])


async def redis_absent(world: World) -> list[str]:
    """An orchestrator that starts without Redis serves, and uses Redis once it is available."""
    world.proxies["redis"].refuse()
    await world.stack.restart("orchestrator")
    return await redis_through(Proxy.refuse, 110, world)


async def redis_killed(world: World) -> list[str]:
    """Kill Redis during requests that use it."""
    calls = [
        world.call(seed=200 + number, cache=CacheControl.USE, max_tokens=16)
        for number in range(_NUM_KILLED)
    ]
    await world.until_service(lambda service: service.running > 0)
    world.kill("redis")
    outcomes = [await call.outcome() for call in calls]
    await world.stack.restart("redis")
    await until(lambda: _is_cached(world, 111))
    return [outcome.label for outcome in outcomes]


async def _evict(client: Any) -> None:
    """Let the server evict all keys, as it has no memory for them."""
    settings = {"maxmemory": 1, "maxmemory-policy": "volatile-lru"}
    before = await client.config_get(*settings)
    for name, value in settings.items():
        await client.config_set(name, value)

    async def is_empty() -> bool:
        return not await client.dbsize()

    await until(is_empty)
    for name, value in before.items():
        await client.config_set(name, value)
    assert int((await client.info("stats"))["evicted_keys"])


_CONNECTIONS: Mapping[str, Callable[[Proxy], None]] = {
    "hanging": lambda proxy: proxy.replies.shut(),
    "reset-mid-reply": _reset_mid_reply,
    "refused": Proxy.refuse,
}
_CACHE, _FAILURES = "orchestrator/test_cache.py", "orchestrator/test_cache_failures.py"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("slow-5s", "read-cancelled"),
        f"{_CACHE}::test_a_cancelled_or_late_call_leaves_no_reply_behind",
    ),
    "value": f"{_CACHE}::test_a_bad_entry_is_a_miss_and_is_replaced",
    **dict.fromkeys(
        ("loading", "maxclients", "wrongpass"), f"{_FAILURES}::test_a_failing_server_is_a_miss"
    ),
    "noperm": "orchestrator/test_cache_better.py::test_an_answer_that_may_not_be_read_is_a_miss",
    **dict.fromkeys(
        ("readonly", "oom"), f"{_FAILURES}::test_a_server_that_cannot_store_is_still_read"
    ),
}

CASES: tuple[Case, ...] = (
    *(
        here(
            f"faults/redis-{name}",
            partial(redis_through, change, 400 + number),
            "OK x 2",
            fast=name == "hanging",
        )
        for number, (name, change) in enumerate(_CONNECTIONS.items())
    ),
    here("faults/redis-evicting", redis_evicting, "OK x 4", fast=True),
    here("faults/redis-absent-at-start", redis_absent, "OK x 2"),
    here("faults/redis-killed-under-load", redis_killed, f"OK x {_NUM_KILLED}"),
    *(Case(f"faults/redis-{name}", elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
)
