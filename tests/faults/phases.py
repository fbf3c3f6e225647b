"""Points in a request's life, reached exactly: proxies hold what would lead beyond them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from specrej.contracts import Algorithm, Schedule
from tests.faults.world import MAX_RUNNING, PROMPT, Call, World, until

_N = 8
_PROMPT_SLOTS = len(PROMPT.split())
_LONG: Mapping[str, Any] = {"n": _N, "max_tokens": 400}
_TWO_ROUNDS = {**_LONG, "schedule": Schedule("tokens", (16,))}
_ONE_ROUND = {**_LONG, "schedule": Schedule("tokens", (399,))}


@dataclass(frozen=True, slots=True)
class Phase:
    """`prepare` before the request is sent; `arrive` returns once it is at the point."""

    arrive: Callable[[World], Awaitable[None]]
    prepare: Callable[[World], None] = lambda world: None
    options: Mapping[str, Any] = field(default_factory=lambda: _TWO_ROUNDS)
    crowded: bool = False  # all permits are taken by others


@asynccontextmanager
async def held_at(phase: Phase, world: World, **options: Any) -> AsyncIterator[Call]:
    """A request that is at the phase's point; others, if there are any, go when it is left."""
    call: Call | None = None
    crowd = [world.call(**_ONE_ROUND, seed=90 + i) for i in range(MAX_RUNNING * phase.crowded)]
    try:
        if crowd:
            await until(lambda: _is_running(world, MAX_RUNNING))
        phase.prepare(world)
        call = world.call(**{**phase.options, **options})
        await phase.arrive(world)
        yield call
    finally:
        for each in (*crowd, *([call] if call else [])):
            each.cancel()
            await each.outcome()


def _hold_opening(world: World) -> None:
    world.proxies["generator"].hold_replies_after(PROMPT.encode())


def _hold_scoring(world: World) -> None:
    # A batch holds candidates' texts, in which all of a toy's words turn up.
    world.proxies["reward"].hold_replies_after(b"birch")


async def _opening(world: World) -> None:
    await world.proxies["generator"].replies.held.wait()


async def _scoring(world: World) -> None:
    await world.proxies["reward"].replies.held.wait()


async def _pruning(world: World) -> None:
    await _scoring(world)
    generator = world.proxies["generator"]
    generator.replies.shut()
    world.proxies["reward"].replies.open()
    await generator.replies.held.wait()


async def _growing(world: World) -> None:
    await until(lambda: _owns_more_than(world, _N * 4))


async def _second_round(world: World) -> None:
    # The first cut leaves half of them: so many slots are owned only well after it.
    await until(lambda: _owns_more_than(world, _N * 16 + _N * 4))


async def _last_step(world: World) -> None:
    """All candidates have ended, and the orchestrator does not know it yet."""
    await _growing(world)
    replies = world.proxies["generator"].replies
    replies.shut()
    await replies.held.wait()


async def _queued(world: World) -> None:
    await until(lambda: _is_queued(world))


async def _owns_more_than(world: World, slots: int) -> bool:
    return (await world.generator()).slots.owned > _PROMPT_SLOTS + slots


async def _is_running(world: World, number: int) -> bool:
    return (await world.service()).running == number


async def _is_queued(world: World) -> bool:
    return (await world.service()).queued > 0


QUEUED = Phase(_queued, crowded=True)
OPENING = Phase(_opening, _hold_opening)
FIRST_ROUND = Phase(_growing, options=_ONE_ROUND)
SECOND_ROUND = Phase(_second_round)
SCORING = Phase(_scoring, _hold_scoring)
PRUNING = Phase(_pruning, _hold_scoring)
LAST_STEP = Phase(_last_step, options={"n": _N, "max_tokens": 60, "algorithm": Algorithm.BEST_OF_N})
