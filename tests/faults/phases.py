"""Exact points in a request's life: proxies hold the messages that would lead beyond them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specrej.contracts import Schedule
from tests.faults.world import PROMPT, Call, World, until_read

_ARRIVES_S = 60.0  # hangs, if it takes longer: a slow machine needs 10 s

_N = 8
_PROMPT_SLOTS = len(PROMPT.split())
_LONG: Mapping[str, Any] = {"n": _N, "max_tokens": 400}
_TWO_ROUNDS = {**_LONG, "schedule": Schedule("tokens", tokens=(16,))}
_ONE_ROUND = {**_LONG, "schedule": Schedule("tokens", tokens=(399,))}


@dataclass(frozen=True, slots=True)
class Phase:
    """`prepare` runs before the request is sent; `arrive` returns once it is at the point."""

    arrive: Callable[[World], Awaitable[None]]
    prepare: Callable[[World], None] = lambda world: None
    options: Mapping[str, Any] = field(default_factory=lambda: _TWO_ROUNDS)


@asynccontextmanager
async def held_at(phase: Phase, world: World, **options: Any) -> AsyncIterator[Call]:
    """Hold a request at the phase's point; cancel it when the context ends."""
    phase.prepare(world)
    call = world.call(**{**phase.options, **options})
    try:
        await phase.arrive(world)
        yield call
    finally:
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


async def _grown(num_tokens: int, world: World) -> None:
    least = _PROMPT_SLOTS + _N * num_tokens
    await until_read(world.generator, lambda now: now.slots.owned > least, bound_s=_ARRIVES_S)


# The toy's texts contain this word.
_hold_scoring = partial(_hold, "reward", b"birch")

OPENING = Phase(partial(_held, "generator"), partial(_hold, "generator", PROMPT.encode()))
FIRST_ROUND = Phase(partial(_grown, 4), options=_ONE_ROUND)
# After the first cut half of them live: they own this many slots only well after it.
SECOND_ROUND = Phase(partial(_grown, 20))
SCORING = Phase(partial(_held, "reward"), _hold_scoring)
PRUNING = Phase(_pruning, _hold_scoring)
