"""Exact points in a request's life: proxies hold the messages that would lead beyond them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specrej.contracts import Algorithm, Schedule
from tests.faults.world import MAX_RUNNING, PROMPT, Call, World

_ARRIVES_S = 60.0  # hangs, if it takes longer: a slow machine needs 10 s

_N = 8
_PROMPT_SLOTS = len(PROMPT.split())
_LONG: Mapping[str, Any] = {"n": _N, "max_tokens": 400}
_TWO_ROUNDS = {**_LONG, "schedule": Schedule("tokens", tokens=(16,))}
_ONE_ROUND = {**_LONG, "schedule": Schedule("tokens", tokens=(399,))}
# Ten seconds of steps: the deadline of no case is as late.
_LONG_ROUND = {**_LONG, "max_tokens": 2000, "schedule": Schedule("tokens", tokens=(1999,))}


@dataclass(frozen=True, slots=True)
class Phase:
    """`prepare` runs before the request is sent; `arrive` returns once it is at the point."""

    arrive: Callable[[World], Awaitable[None]]
    prepare: Callable[[World], None] = lambda world: None
    options: Mapping[str, Any] = field(default_factory=lambda: _TWO_ROUNDS)
    crowded: bool = False  # other requests hold all permits


@asynccontextmanager
async def held_at(phase: Phase, world: World, **options: Any) -> AsyncIterator[Call]:
    """Hold a request at the phase's point; cancel it and the crowd when the context ends."""
    calls = [world.call(**_LONG_ROUND, seed=90 + i) for i in range(MAX_RUNNING * phase.crowded)]
    try:
        if phase.crowded:
            await world.until_service(lambda service: service.running == MAX_RUNNING)
        phase.prepare(world)
        calls.append(world.call(**{**phase.options, **options}))
        await phase.arrive(world)
        yield calls[-1]
    finally:
        for call in calls:
            call.cancel()
            await call.outcome()


def _hold(backend: str, marker: bytes, world: World) -> None:
    world.proxies[backend].hold_replies_after(marker)


async def _held(backend: str, world: World) -> None:
    await world.proxies[backend].replies.held.wait()


async def _pruning(world: World) -> None:
    await _held("reward", world)
    generator = world.proxies["generator"]
    generator.replies.shut()
    world.proxies["reward"].replies.open()
    await generator.replies.held.wait()


async def _first_round(world: World) -> None:
    await world.until_generator(lambda g: g.slots.owned > _PROMPT_SLOTS + _N * 4, _ARRIVES_S)


async def _second_round(world: World) -> None:
    # After the first cut half of them live: they own this many slots only well after it.
    await world.until_generator(lambda g: g.slots.owned > _PROMPT_SLOTS + _N * 20, _ARRIVES_S)


async def _last_step(world: World) -> None:
    """All candidates have ended, and the orchestrator has not received it yet."""
    await _first_round(world)
    replies = world.proxies["generator"].replies
    replies.shut()
    await replies.held.wait()


async def _queued(world: World) -> None:
    await world.until_service(lambda service: service.queued > 0, _ARRIVES_S)


# The toy's texts contain this word.
_hold_scoring = partial(_hold, "reward", b"birch")

QUEUED = Phase(_queued, crowded=True)
OPENING = Phase(partial(_held, "generator"), partial(_hold, "generator", PROMPT.encode()))
FIRST_ROUND = Phase(_first_round, options=_ONE_ROUND)
LONG_ROUND = Phase(_first_round, options=_LONG_ROUND)
SECOND_ROUND = Phase(_second_round)
SCORING = Phase(partial(_held, "reward"), _hold_scoring)
PRUNING = Phase(_pruning, _hold_scoring)
LAST_STEP = Phase(_last_step, options={**_LONG, "algorithm": Algorithm.BEST_OF_N})
