"""Faults of Redis: the real server in bad states, and failures of the connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from redis.asyncio import Redis

from specrej.contracts import CacheControl
from tests.faults.case import Case, case
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


def _is_cached(outcome: Outcome) -> bool:
    return bool(outcome.generation and outcome.generation.cached)


def _codes(outcomes: Sequence[Outcome]) -> list[str]:
    late = [outcome.seconds for outcome in outcomes if outcome.seconds > _MOST_S]
    assert not late, f"requests took {late} s"
    texts = {outcome.generation.best.text for outcome in outcomes if outcome.generation}
    assert len(texts) == 1, f"equal requests, {len(texts)} answers"
    return [outcome.label for outcome in outcomes]


async def broken_link(change: Callable[[Proxy], None], seed: int, world: World) -> list[str]:
    """Break the connection to Redis, then restore it: the cache must work again."""
    change(world.proxies["redis"])
    outcomes = await _cached_answers(world, seed)
    assert not any(map(_is_cached, outcomes)), "the cache answered"
    await world.proxies["redis"].heal()
    await _until_used(world, seed)
    return _codes(outcomes)


async def _until_used(world: World, seed: int) -> None:
    async def is_used() -> bool:
        return _is_cached((await _cached_answers(world, seed))[1])

    await until(is_used)


async def absent(world: World) -> list[str]:
    """An orchestrator that starts without Redis serves, and uses Redis once it is available."""
    world.proxies["redis"].refuse()
    await world.stack.restart("orchestrator")
    return await broken_link(Proxy.refuse, 110, world)


async def killed(world: World) -> list[str]:
    """Kill Redis during requests that use it."""
    calls = [
        world.call(seed=200 + number, cache=CacheControl.USE, max_tokens=16)
        for number in range(_NUM_KILLED)
    ]
    await world.until_service(lambda service: service.running > 0)
    world.kill("redis")
    outcomes = [await call.outcome() for call in calls]
    await world.stack.restart("redis")
    await _until_used(world, 111)
    return [outcome.label for outcome in outcomes]


async def read_only(world: World) -> list[str]:
    """A server that accepts no writes: stored answers are still used."""
    async with redis_client(world) as client:
        await client.flushall()
        first = await _cached_answers(world, 600)
        await client.replicaof("127.0.0.1", 1)
        try:
            second = await _cached_answers(world, 600)
        finally:
            await client.replicaof("NO", "ONE")
        assert _is_cached(second[0]), "the cache did not answer"
        await _until_used(world, 600)
    return _codes([*first, *second])


_LINKS: Mapping[str, Callable[[Proxy], None]] = {
    "hanging": lambda proxy: proxy.replies.shut(),
    "refused": Proxy.refuse,
}

CASES: tuple[Case, ...] = (
    *(
        case(
            f"redis/{name}",
            partial(broken_link, change, 400 + number),
            "OK x 2",
            fast=name == "hanging",
        )
        for number, (name, change) in enumerate(_LINKS.items())
    ),
    case("redis/read-only", read_only, "OK x 4"),
    case("redis/absent-at-start", absent, "OK x 2"),
    case("redis/killed-under-load", killed, f"OK x {_NUM_KILLED}"),
)
