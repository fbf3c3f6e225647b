"""Cache: what is another request, what is the same, and what is never stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specrej.contracts import CacheControl, WeightedReward
from tests.faults.case import Case, elsewhere, here
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.redis_faults import redis_client
from tests.faults.world import FAILING_SEED, Outcome, World, request, until

_BASE: Mapping[str, Any] = {"cache": CacheControl.USE, "max_tokens": 8, "seed": 70}
_TWO = (WeightedReward("toy", 1.0), WeightedReward("likelihood", 0.5))


async def _cached(world: World, **options: Any) -> tuple[str, bool]:
    outcome: Outcome = await world.ask(**{**_BASE, **options})
    return outcome.label, outcome.generation is not None and outcome.generation.cached


async def other_key(change: Mapping[str, Any], world: World) -> list[str]:
    """A request that differs is not answered by what was stored for the first."""
    await _cached(world)
    assert (await _cached(world))[1], "the first was not stored"
    code, cached = await _cached(world, **change)
    assert not cached, "another request's answer"
    async with redis_client(world) as client:
        await client.flushall()
    return [code]


async def same_key(world: World) -> list[str]:
    """Rewards in another order, a default said aloud: the same request."""
    first = await _cached(world, rewards=_TWO)
    turned = await _cached(world, rewards=_TWO[::-1])
    message = request(**_BASE)
    plain = await world.ask(message=message)
    message.sampling.temperature, message.selection.alpha = 1.0, 0.5
    said = await world.ask(message=message)
    assert turned[1], "the order of rewards made another key"
    assert said.generation and said.generation.cached, "a default said aloud made another key"
    return [first[0], turned[0], plain.label, said.label]


async def never_stored(world: World) -> list[str]:
    """Failed, degraded and cut-short results leave nothing behind."""
    async with redis_client(world) as client:
        await client.flushall()
        use = {"cache": CacheControl.USE}
        outcomes = [
            await world.ask(**use, seed=FAILING_SEED, max_tokens=40),
            await world.ask(**use, rewards={"nan": 1.0}),
            await world.ask(**use, rewards={"nan": 1.0}, allow_degraded=True),
        ]
        async with held_at(FIRST_ROUND, world, **use) as call:
            call.cancel()
            outcomes.append(await call.outcome())

        async def empty() -> bool:
            return not await client.dbsize()

        await until(empty)
    return [outcome.label for outcome in outcomes]


_CHANGES: dict[str, Mapping[str, Any]] = {
    "seed": {"seed": 71},
    "parameter": {"top_k": 5},
    "tenant": {"metadata": {"specrej-tenant": "somebody-else"}},
}

CASES: tuple[Case, ...] = (
    *(
        here(f"cache/other-key/{name}", partial(other_key, change), "OK")
        for name, change in _CHANGES.items()
    ),
    elsewhere(
        "cache/other-key/fingerprint",
        "tests/orchestrator/test_cache.py::test_tenant_and_fingerprints_make_another_key",
    ),
    here("cache/same-key", same_key, "OK"),
    here("cache/never-stored", never_stored, "INTERNAL", "OK degraded", "CANCELLED"),
)
