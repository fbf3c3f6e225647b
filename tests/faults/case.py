"""A case as data, and the result of its run: outcome, recovery time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.faults.world import NotRecovered, World

# Runs the case on a world and returns the status codes of its calls, in an order that the case
# defines. Raises AssertionError if the service violates a promise.
Play = Callable[[World], Awaitable[Sequence[str]]]

_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One fault and the codes with which each call may end; `make test` runs the `fast` ones."""

    name: str
    play: Play
    expected: tuple[frozenset[str], ...]
    limit_s: float = _LIMIT_S
    fast: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a case; `problem` is empty if it passed."""

    case: str
    outcome: str
    seconds: float = 0.0
    recovery_s: float | None = None
    problem: str = ""


def case(
    name: str, play: Play, *expected: str, limit_s: float = _LIMIT_S, fast: bool = False
) -> Case:
    """A case; `expected` as in "OK x 3", "UNAVAILABLE|CANCELLED": four calls."""
    calls = (run.partition(" x ") for run in expected)
    codes = [frozenset(code.split("|")) for code, _, n in calls for _ in range(int(n or 1))]
    return Case(name, play, tuple(codes), limit_s, fast)


async def examine(case: Case, world: World) -> Result:
    """Run a case, then wait for the invariant; the result has the first problem."""
    began = time.monotonic()
    outcome, problem = await _played(case, world)
    seconds = time.monotonic() - began
    recovery_s = None
    try:
        async with asyncio.timeout(_LIMIT_S):
            # Leftovers of a failed case must not fail the next one.
            await world.heal()
            recovery_s = await world.settle()
    except (TimeoutError, NotRecovered) as error:
        problem = problem or f"does not recover: {error or 'hangs'}"
    return Result(case.name, outcome, round(seconds, 3), recovery_s, problem)


async def _played(case: Case, world: World) -> tuple[str, str]:
    """Return outcome and problem."""
    limit = asyncio.timeout(case.limit_s)
    try:
        async with limit:
            codes = await case.play(world)
    except Exception as error:
        if limit.expired():
            return "HANGS", f"not over within {case.limit_s:g} s"
        # A TimeoutError of the case itself: a condition that it waited for did not come.
        return "WRONG", f"{type(error).__name__}: {error}"
    runs = ((code, len(list(same))) for code, same in groupby(codes))
    outcome = ", ".join(f"{code} x {times}" if times > 1 else code for code, times in runs)
    if len(codes) != len(case.expected):
        return outcome, f"{len(codes)} calls, not {len(case.expected)}"
    pairs = zip(codes, case.expected, strict=True)
    wrong = [f"{at}: {code}" for at, (code, accepted) in enumerate(pairs) if code not in accepted]
    return outcome, f"not accepted: {', '.join(wrong)}" if wrong else ""
