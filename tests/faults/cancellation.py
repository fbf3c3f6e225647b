"""Cancellation at every point of a request's life, by every way to leave, of both methods."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from functools import partial
from typing import Any

from specrej.contracts import Schedule
from tests.faults import phases
from tests.faults.case import Case, here, not_here
from tests.faults.phases import Phase, held_at
from tests.faults.world import PROMPT, SERVICES, Call, Outcome, World, until

POINTS = {
    "queue": phases.QUEUED,
    "prefill": phases.OPENING,
    "between-steps": phases.FIRST_ROUND,
    "reward": phases.SCORING,
    "prune": phases.PRUNING,
    "last-step": phases.LAST_STEP,
}
WAYS = ("cancel", "deadline", "channel-closed")
# Longer than any of the points takes to be reached, shorter than their requests.
_DEADLINE_S = 1.5
# Many rounds with large events: a client that does not read soon blocks the writer.
_BLOCKING = {"n": 256, "alpha": 0.0, "max_tokens": 400}
_ALL_ROUNDS = Schedule("tokens", tuple(range(1, 400)))
_FLAT_MIB = 6.0
_STILL_S = 0.5


async def leave(phase: Phase, way: str, stream: bool, world: World) -> list[str]:
    """A client leaves; the generator is free before anything that was held goes on."""
    timeout_s = _DEADLINE_S if way == "deadline" else 20.0
    async with held_at(phase, world, stream=stream, timeout_s=timeout_s) as call:
        await _go(call, way)
        outcome = await call.outcome()
        if not phase.crowded:
            await until(partial(_is_free, world))
    await world.heal()
    return [outcome.label]


async def _go(call: Call, way: str) -> None:
    if way == "cancel":
        call.cancel()
    elif way == "channel-closed":
        await call.close_channel()


async def _is_free(world: World) -> bool:
    description = await world.generator()
    return not (description.sessions or description.slots.owned)


async def leave_blocked(way: str, world: World) -> list[str]:
    """Nothing reaches the client, so the orchestrator waits in a write; then the client leaves."""
    world.proxies["front"].hold_replies_after(PROMPT.encode())
    call = world.call(
        stream=True,
        through_front=True,
        narrow=True,
        timeout_s=2.5 if way == "deadline" else 20.0,
        schedule=_ALL_ROUNDS,
        **_BLOCKING,
    )
    try:
        still = _Standstill(world)
        await until(still.is_reached)
        await _go(call, way)
        await until(partial(_is_free, world))
    finally:
        await world.heal()
        call.cancel()
    return [(await call.outcome()).label]


class _Standstill:
    """Whether a session has not grown for half a second, though it is not done."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owned = -1
        self._since = 0.0

    async def is_reached(self) -> bool:
        owned = (await self._world.generator()).slots.owned
        if owned != self._owned:
            self._owned, self._since = owned, time.monotonic()
        return owned > 0 and time.monotonic() - self._since > _STILL_S


async def half_of_many(world: World) -> list[str]:
    """Of 100 at once half are cancelled: the others' answers are those of a run without cancels."""
    drawn = random.Random(17)
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": False}
    alone = await _all([world.call(seed=seed, **options) for seed in range(100)])
    calls = [world.call(seed=seed, **options) for seed in range(100)]
    leaving = set(drawn.sample(range(100), 50))
    for number in sorted(leaving, key=lambda _: drawn.random()):
        calls[number].cancel()
    together = await _all(calls)
    for number in set(range(100)) - leaving:
        left, right = alone[number].generation, together[number].generation
        assert left, alone[number].code
        assert right, together[number].code
        assert left.candidates == right.candidates, f"seed {number} has another answer"
    return [outcome.label for outcome in together]


async def _all(calls: Collection[Call]) -> list[Outcome]:
    return [await call.outcome() for call in calls]


async def open_and_cancel(world: World) -> list[str]:
    """A thousand requests that are cancelled once they are admitted: memory stays flat."""
    await _open_and_cancel(world, 300)
    before = _resident_mib(world)
    codes = await _open_and_cancel(world, 1000)
    grown = {name: size - before[name] for name, size in _resident_mib(world).items()}
    assert max(grown.values()) < _FLAT_MIB, f"grown by {grown} MiB"
    return codes


async def _open_and_cancel(world: World, times: int) -> list[str]:
    codes = []
    for number in range(0, times, 4):
        calls = [world.call(stream=True, seed=number + each) for each in range(4)]
        for call in calls:
            await until(partial(_has_begun, call))
            call.cancel()
        codes += [outcome.label for outcome in await _all(calls)]
    return codes


async def _has_begun(call: Call) -> bool:
    return bool(call.events)


def _resident_mib(world: World) -> dict[str, float]:
    return {name: world.usage(name).resident_mib for name in SERVICES}


def _code(way: str) -> str:
    return "DEADLINE_EXCEEDED" if way == "deadline" else "CANCELLED"


CASES: tuple[Case, ...] = (
    *(
        here(
            f"cancel/{point}/{'stream' if stream else 'unary'}-{way}",
            partial(leave, phase, way, stream),
            _code(way),
            fast=way == "cancel" and stream,
        )
        for point, phase in POINTS.items()
        for stream in (False, True)
        for way in WAYS
    ),
    *(
        here(f"cancel/blocked-write/stream-{way}", partial(leave_blocked, way), _code(way))
        for way in WAYS
    ),
    not_here("cancel/blocked-write/unary", "a unary call writes once, at its end: never blocked"),
    here("cancel/half-of-100", half_of_many, "OK", "CANCELLED", limit_s=60, fast=True),
    here("cancel/1000-open-and-cancel", open_and_cancel, "CANCELLED", limit_s=120),
)
