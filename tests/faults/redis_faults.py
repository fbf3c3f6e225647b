"""Redis that hangs and that is killed."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from specrej.contracts import CacheControl
from tests.faults.case import Case
from tests.faults.world import Outcome, World, until_read

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


async def hanging(world: World) -> list[str]:
    """The connection to Redis hangs, then is restored: the cache must work again."""
    world.proxies["redis"].replies.shut()
    outcomes = await _cached_answers(world, 400)
    assert not any(map(_is_cached, outcomes)), "the cache answered"
    await world.proxies["redis"].heal()
    await _until_used(world, 400)
    late = [outcome.seconds for outcome in outcomes if outcome.seconds > _MOST_S]
    assert not late, f"requests took {late} s"
    texts = {outcome.generation.best.text for outcome in outcomes if outcome.generation}
    assert len(texts) == 1, f"equal requests, {len(texts)} answers"
    return [outcome.label for outcome in outcomes]


async def _until_used(world: World, seed: int) -> None:
    await until_read(lambda: _cached_answers(world, seed), lambda found: _is_cached(found[1]))


async def killed(world: World) -> list[str]:
    """Kill Redis during requests that use it."""
    calls = [
        world.call(seed=200 + number, cache=CacheControl.USE, max_tokens=16)
        for number in range(_NUM_KILLED)
    ]
    await until_read(world.service, lambda service: service.running > 0)
    world.kill("redis")
    outcomes = [await call.outcome() for call in calls]
    await world.stack.restart("redis")
    await _until_used(world, 111)
    return [outcome.label for outcome in outcomes]


CASES: tuple[Case, ...] = (
    Case("redis/hanging", hanging, "OK", fast=True),
    Case("redis/killed-under-load", killed, "OK"),
)
