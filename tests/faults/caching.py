"""Cache: results that are never stored."""

from __future__ import annotations

from specrej.contracts import CacheControl
from tests.faults.case import Case, here
from tests.faults.killed import kill
from tests.faults.phases import FIRST_ROUND, PRUNING, held_at
from tests.faults.redis_faults import redis_client
from tests.faults.world import FAILING_SEED, World, until


async def never_stored(world: World) -> list[str]:
    """Failed, degraded and cancelled results are not stored."""
    async with redis_client(world) as client:
        await client.flushall()
        use = {"cache": CacheControl.USE}
        outcomes = [
            await world.generate(**use, seed=FAILING_SEED, max_tokens=40),
            await world.generate(**use, rewards={"nan": 1.0}),
            await world.generate(**use, rewards={"nan": 1.0}, allow_degraded=True),
        ]
        async with held_at(FIRST_ROUND, world, **use) as call:
            call.cancel()
            outcomes.append(await call.outcome())
        # It has all its rewards, so that nothing but its degradation prevents storing.
        weak = {"allow_degraded": True, "ignore_eos": False}
        killed = await kill("generator", PRUNING, world, **use, **weak)

        async def has_only_records() -> bool:
            return all(key.startswith(b"specrej:record:") for key in await client.keys())

        await until(has_only_records)
        await world.until_free()  # the cancelled run has ended
        assert await has_only_records(), "an answer was stored later"
    return [outcome.label for outcome in outcomes] + killed


_ELSEWHERE = {
    "over-the-wire": "test_service_cache.py::test_second_equal_request_comes_from_the_cache",
    "equal": "test_cache_keys.py::test_equal_requests_have_one_key",
    "every-field": "test_cache_keys.py::test_every_field_that_matters_changes_the_key",
    "tenant": "test_service_cache.py::test_tenants_share_neither_answers_nor_flights",
}

CASES: tuple[Case, ...] = (
    here(
        "cache/never-stored",
        never_stored,
        *("INTERNAL x 2", "OK degraded", "CANCELLED", "OK degraded"),
        fast=True,
    ),
    *(
        Case(f"cache/same-and-other-key/{name}", elsewhere=f"tests/orchestrator/{test}")
        for name, test in _ELSEWHERE.items()
    ),
)
