"""A case as data, and its check."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.faults.world import World

# Runs the case on a world and returns the status codes of its calls, in an order that the case
# defines. Raises AssertionError if the service violates a promise.
Play = Callable[[World], Awaitable[Sequence[str]]]

_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One fault and the codes with which each call may end; CI runs the `fast` ones."""

    name: str
    play: Play
    expected: tuple[frozenset[str], ...]
    limit_s: float = _LIMIT_S
    fast: bool = False


def case(
    name: str, play: Play, *expected: str, limit_s: float = _LIMIT_S, fast: bool = False
) -> Case:
    """A case; `expected` as in "OK x 3", "UNAVAILABLE|CANCELLED": four calls."""
    calls = (run.partition(" x ") for run in expected)
    codes = [frozenset(code.split("|")) for code, _, n in calls for _ in range(int(n or 1))]
    return Case(name, play, tuple(codes), limit_s, fast)


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
    assert len(codes) == len(case.expected), codes
    assert all(code in may for code, may in zip(codes, case.expected, strict=True)), codes
