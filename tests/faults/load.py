"""Load: too many, too large and equal requests. The open loop is `make bench-overload`."""

from __future__ import annotations

import time
from typing import Any

from orchestrator.loop.run_state import MAX_TRACED
from specrej.contracts import CacheControl, TokensSchedule
from specrej.security import TENANT_METADATA
from tests.faults.case import Case, here
from tests.faults.world import MAX_QUEUED, MAX_RUNNING, SERVICES, World, until
from tests.serving import retry_info_s

_TOO_MANY = 7
_FLOOD, _LIGHT = [(TENANT_METADATA, "flood")], [(TENANT_METADATA, "light")]
# For cases of hundreds of calls, whose speed depends on the machine's other load.
_MANY_S = 90.0
_HEALTH_S = 1.0
_SMALL_S = 5.0


async def refuses_exactly(world: World) -> list[str]:
    """With L running and Q queued, k more requests are refused with RetryInfo, and no other."""
    # A long deadline: requests that cannot be served in time may be refused earlier.
    options: dict[str, Any] = {"max_tokens": 2000, "timeout_s": 3600.0}
    full = MAX_RUNNING + MAX_QUEUED
    calls = [world.call(seed=seed, **options) for seed in range(full + _TOO_MANY)]
    try:
        await world.until_service(
            lambda service: (service.running, service.queued) == (MAX_RUNNING, MAX_QUEUED),
            bound_s=_MANY_S,
        )
        await until(lambda: sum(call.is_over for call in calls) == _TOO_MANY, bound_s=_MANY_S)
    finally:
        for call in calls:
            call.cancel()
        outcomes = [await call.outcome() for call in calls]
    refused = [outcome.error for outcome in outcomes if outcome.error]
    assert all(retry_info_s(error) for error in refused), "a refusal without RetryInfo"
    codes = [outcome.code for outcome in outcomes]
    assert codes.count("RESOURCE_EXHAUSTED") == _TOO_MANY, codes
    return codes


async def flood(world: World) -> list[str]:
    """One tenant takes all permits and places: the requests of another are next, each in the place
    of one of the flood's, and no other request is refused."""
    options: dict[str, Any] = {"max_tokens": 400, "timeout_s": 3600.0}
    full = MAX_RUNNING + MAX_QUEUED
    calls = [world.call(metadata=_FLOOD, seed=seed, **options) for seed in range(full)]
    try:
        await world.until_service(
            lambda service: (service.running, service.queued) == (MAX_RUNNING, MAX_QUEUED),
            bound_s=_MANY_S,
        )
        light = [world.call(metadata=_LIGHT, seed=seed, **options) for seed in range(3)]
        answered = [await call.outcome() for call in light]
        over = [call for call in calls if call.is_over]
        assert len(over) < full / 2, f"{len(over)} requests of the flood were served before"
    finally:
        for call in calls:
            call.cancel()
        outcomes = [await call.outcome() for call in calls]
    assert [outcome.label for outcome in answered] == ["OK"] * len(light)
    codes = [outcome.code for outcome in outcomes]
    assert codes.count("RESOURCE_EXHAUSTED") == len(light), codes
    return codes


async def two_large(world: World) -> list[str]:
    """Two requests that each need most of the slots: each is answered or refused."""
    options: dict[str, Any] = {"n": 1000, "max_tokens": 90, "schedule": TokensSchedule((45,))}
    calls = [world.call(seed=seed, **options) for seed in (1, 2)]
    return [(await call.outcome()).label for call in calls]


async def large_beside_small(world: World) -> list[str]:
    """Small requests finish while a large one runs, and the large one finishes."""
    large = world.call(n=1000, max_tokens=60, seed=1)
    small = [world.call(n=4, max_tokens=16, seed=seed) for seed in range(8)]
    outcomes = [await call.outcome() for call in small]
    slow = [outcome.seconds for outcome in outcomes if outcome.seconds > _SMALL_S]
    assert not slow, f"small requests took {slow} s"
    return [(await large.outcome()).label, *(outcome.label for outcome in outcomes)]


async def health_under_load(world: World) -> list[str]:
    """With four times as many requests as can run or wait, health checks answer in time."""
    number = 4 * (MAX_RUNNING + MAX_QUEUED)
    calls = [world.call(seed=seed, max_tokens=16) for seed in range(number)]
    for name in SERVICES:
        began = time.monotonic()
        assert await world.health(name) == "SERVING", name
        took_s = time.monotonic() - began
        assert took_s < _HEALTH_S, f"health of the {name} took {took_s:.2f} s"
    return [(await call.outcome()).label for call in calls]


async def many_rounds(world: World) -> list[str]:
    """A large request with a decision token per token: health answers, the trace is bounded."""
    options: dict[str, Any] = {"n": 1000, "alpha": 0.0, "return_candidates": 64, "max_tokens": 64}
    call = world.call(schedule=TokensSchedule(tuple(range(1, 64))), timeout_s=_MANY_S, **options)
    slow_s = []
    while not call.is_over:
        began = time.monotonic()
        assert await world.health("orchestrator") == "SERVING"
        slow_s += [seconds] if (seconds := time.monotonic() - began) > _HEALTH_S else []
    outcome = await call.outcome()
    assert not slow_s, f"health took {slow_s} s"
    if outcome.generation:
        traced = sum(len(trace.candidates) for trace in outcome.generation.rounds)
        assert 0 < traced <= MAX_TRACED, f"{traced} candidates in the trace"
    return [outcome.label]


async def equal_requests(world: World) -> list[str]:
    """500 equal requests at the same time are one generation."""
    options: dict[str, Any] = {"seed": 4242, "cache": CacheControl.USE, "max_tokens": 400}
    calls = [world.call(timeout_s=_MANY_S, **options) for _ in range(500)]
    outcomes = [await call.outcome() for call in calls]
    generated = [o.generation for o in outcomes if o.generation and not o.generation.cached]
    assert len(generated) == 1, f"{len(generated)} generations"
    return [outcome.label for outcome in outcomes]


CASES: tuple[Case, ...] = (
    Case("load/open-loop", elsewhere="benchmarks/overload.py"),
    Case("load/refusal-latency", elsewhere="benchmarks/overload.py"),
    here(
        "load/limit-and-queue",
        refuses_exactly,
        *("RESOURCE_EXHAUSTED", "CANCELLED"),
        limit_s=3 * _MANY_S,
        fast=True,
    ),
    here(
        "load/flood-of-a-tenant",
        flood,
        *("OK", "RESOURCE_EXHAUSTED", "CANCELLED"),
        limit_s=2 * _MANY_S,
        fast=True,
    ),
    here("load/two-large", two_large, "OK", "RESOURCE_EXHAUSTED"),
    here("load/large-beside-small", large_beside_small, "OK"),
    here("load/health", health_under_load, "OK", "RESOURCE_EXHAUSTED", limit_s=60),
    here("load/many-rounds", many_rounds, "OK", limit_s=2 * _MANY_S),
    here("load/equal-requests", equal_requests, "OK", limit_s=2 * _MANY_S, fast=True),
)
