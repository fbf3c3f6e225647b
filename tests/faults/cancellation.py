"""Calls that end at every point of a request, by turns in every way."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import partial
from typing import Any

from tests.faults import phases
from tests.faults.case import Case, case
from tests.faults.phases import Phase, held_at
from tests.faults.world import SERVICES, Call, Outcome, World

# The phase, the way in which the call ends, and whether it is a stream.
_POINTS: dict[str, tuple[Phase, str, bool]] = {
    "queue": (phases.QUEUED, "cancel", True),
    "prefill": (phases.OPENING, "deadline", False),
    "between-steps": (phases.LONG_ROUND, "channel-closed", True),
    "reward": (phases.SCORING, "cancel", False),
    "prune": (phases.PRUNING, "deadline", True),
    "last-step": (phases.LAST_STEP, "cancel", True),
}
# Longer than any point takes to be reached, shorter than the requests.
_DEADLINE_S = 5.0
_FLAT_BYTES = 6 << 20


async def leave(phase: Phase, way: str, stream: bool, world: World) -> list[str]:
    """End a call; the generator must be free before the proxies release what they hold."""
    timeout_s = _DEADLINE_S if way == "deadline" else 20.0
    async with held_at(phase, world, stream=stream, timeout_s=timeout_s) as call:
        await _end(call, way)
        outcome = await call.outcome()
        if not phase.crowded:
            await world.until_free()
    await world.heal()
    return [outcome.label]


async def _end(call: Call, way: str) -> None:
    if way == "cancel":
        call.cancel()
    elif way == "channel-closed":
        await call.close_channel()


async def half_of_many(world: World) -> list[str]:
    """Cancel half of 100 requests: the other answers equal those of a run without cancels."""
    chance = random.Random(17)
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": False, "timeout_s": 90.0}
    alone = await _all([world.call(seed=seed, **options) for seed in range(100)])
    calls = [world.call(seed=seed, **options) for seed in range(100)]
    leaving = set(chance.sample(range(100), 50))
    for number in sorted(leaving, key=lambda _: chance.random()):
        calls[number].cancel()
    together = await _all(calls)
    staying = sorted(set(range(100)) - leaving)
    for number in staying:
        left, right = alone[number].generation, together[number].generation
        assert left and right, (alone[number].code, together[number].code)
        assert left.candidates == right.candidates, f"seed {number} has another answer"
    return [together[number].label for number in (*staying, *leaving)]


async def open_and_cancel(world: World) -> list[str]:
    """Cancel a thousand requests once they are admitted: memory stays flat."""
    await _open_and_cancel(world, 300)
    before = {name: world.process(name).memory_info().rss for name in SERVICES}
    codes = await _open_and_cancel(world, 1000)
    for name in SERVICES:
        grown_bytes = world.process(name).memory_info().rss - before[name]
        assert grown_bytes < _FLAT_BYTES, f"{name} has grown by {grown_bytes} bytes"
    return codes


async def _open_and_cancel(world: World, times: int) -> list[str]:
    codes = []
    for number in range(0, times, 4):
        calls = [world.call(stream=True, seed=number + offset) for offset in range(4)]
        for call in calls:
            await call.begin()
            call.cancel()
        codes += [outcome.label for outcome in await _all(calls)]
    return codes


async def _all(calls: Collection[Call]) -> list[Outcome]:
    return [await call.outcome() for call in calls]


CASES: tuple[Case, ...] = (
    *(
        case(
            f"cancel/{point}",
            partial(leave, phase, way, stream),
            "DEADLINE_EXCEEDED" if way == "deadline" else "CANCELLED",
            fast=way == "cancel",
        )
        for point, (phase, way, stream) in _POINTS.items()
    ),
    case("cancel/half-of-100", half_of_many, "OK x 50", "CANCELLED x 50", limit_s=200),
    case("cancel/1000-open-and-cancel", open_and_cancel, "CANCELLED x 1000", limit_s=120),
)
