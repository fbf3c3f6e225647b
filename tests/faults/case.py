"""A case as data, and its check."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.faults.world import World

# Runs the case on a world and returns the labels of all its calls. Raises AssertionError if the
# service violates a promise.
Play = Callable[[World], Awaitable[Sequence[str]]]

_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One fault and the label with which every call ends; CI runs the `fast` ones."""

    name: str
    play: Play
    expected: str
    limit_s: float = _LIMIT_S
    fast: bool = False


async def check(case: Case, world: World) -> None:
    """Run a case, then wait for the invariant.

    Raises:
        AssertionError: a call ended otherwise than it may, or the service violates a promise.
        TimeoutError: the case, or the recovery, hangs.
        NotRecovered: the invariant does not hold in time.
    """
    try:
        async with asyncio.timeout(case.limit_s):
            codes = await case.play(world)
    finally:
        async with asyncio.timeout(_LIMIT_S):
            # Leftovers of a failed case must not fail the next one.
            await world.heal()
            await world.settle()
    assert {*codes} == {case.expected}, sorted({*codes})
