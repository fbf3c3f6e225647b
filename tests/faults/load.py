"""Load: too many, too large, all alike. The open loop itself is `make bench-overload`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specrej.contracts import CacheControl, Schedule
from tests.faults.case import Case, elsewhere, here
from tests.faults.world import MAX_QUEUED, MAX_RUNNING, Call, World, until
from tests.orchestrator.services import retry_info_s

_TOO_MANY = 7
_HEALTH_S = 1.0
_SMALL_S = 5.0


async def refuses_exactly(world: World) -> list[str]:
    """L run, Q wait, k more are refused, each with a delay, and nobody else."""
    # With time enough for the whole line: who cannot be served in time may be refused sooner.
    options: dict[str, Any] = {"max_tokens": 2000, "timeout_s": 3600.0}
    full = MAX_RUNNING + MAX_QUEUED
    calls = [world.call(seed=seed, **options) for seed in range(full + _TOO_MANY)]
    try:
        await until(lambda: _is_full(world))
        await until(lambda: _have_ended(calls, _TOO_MANY))
    finally:
        for call in calls:
            call.cancel()
        outcomes = [await call.outcome() for call in calls]
    refused = [outcome.error for outcome in outcomes if outcome.error]
    assert all(retry_info_s(error) for error in refused), "a refusal without RetryInfo"
    codes = [outcome.code for outcome in outcomes]
    assert codes.count("RESOURCE_EXHAUSTED") == _TOO_MANY, codes
    return codes


async def _have_ended(calls: Sequence[Call], number: int) -> bool:
    return sum(call.is_over for call in calls) == number


async def _is_full(world: World) -> bool:
    service = await world.service()
    return (service.running, service.queued) == (MAX_RUNNING, MAX_QUEUED)


async def two_large(world: World) -> list[str]:
    """Two requests that each want most of the slots: each ends, by an answer or a refusal."""
    options: dict[str, Any] = {"n": 1000, "max_tokens": 90, "schedule": Schedule("tokens", (45,))}
    calls = [world.call(seed=seed, **options) for seed in (1, 2)]
    return [(await call.outcome()).label for call in calls]


async def large_beside_small(world: World) -> list[str]:
    """Small requests go on while a large one runs, and the large one ends."""
    large = world.call(n=1000, max_tokens=60, seed=1)
    small = []
    for seed in range(8):
        small += [world.call(n=4, max_tokens=16, seed=seed)]
    outcomes = [await call.outcome() for call in small]
    slow = [outcome.seconds for outcome in outcomes if outcome.seconds > _SMALL_S]
    assert not slow, f"small requests took {slow} s"
    return [(await large.outcome()).label, *(outcome.label for outcome in outcomes)]


async def health_under_load(world: World) -> list[str]:
    """Four times as many as can run or wait keep coming; health answers in time."""
    number = 4 * (MAX_RUNNING + MAX_QUEUED)
    calls = [world.call(seed=seed, max_tokens=16) for seed in range(number)]
    for name in ("orchestrator", "generator", "reward"):
        began = time.monotonic()
        assert await world.health(name) == "SERVING", name
        took_s = time.monotonic() - began
        assert took_s < _HEALTH_S, f"health of the {name} took {took_s:.2f} s"
    return [(await call.outcome()).label for call in calls]


async def equal_requests(world: World) -> list[str]:
    """500 equal requests while the first is being answered are one generation."""
    options: dict[str, Any] = {"seed": 4242, "cache": CacheControl.USE, "max_tokens": 400}
    calls = [world.call(**options) for _ in range(500)]
    outcomes = [await call.outcome() for call in calls]
    made = [o.generation for o in outcomes if o.generation and not o.generation.cached]
    assert len(made) == 1, f"{len(made)} generations"
    return [outcome.label for outcome in outcomes]


CASES: tuple[Case, ...] = (
    elsewhere("load/open-loop", "benchmarks/overload.py"),
    elsewhere("load/refusal-latency", "benchmarks/overload.py"),
    here("load/limit-and-queue", refuses_exactly, "RESOURCE_EXHAUSTED", "CANCELLED", fast=True),
    here("load/two-large", two_large, "OK", "RESOURCE_EXHAUSTED"),
    here("load/large-beside-small", large_beside_small, "OK"),
    here("load/health", health_under_load, "OK", "RESOURCE_EXHAUSTED", limit_s=60),
    here("load/equal-requests", equal_requests, "OK", limit_s=60, fast=True),
    elsewhere("soak/flat", "tests/faults/soak.py"),
    elsewhere("soak/positive-control", "tests/faults/soak.py"),
)
