"""A case of the checklist as data, and what comes of running it: outcome, recovery time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.world import NotRecovered, World

# Runs the case on a world; gives back the codes that its calls ended with. AssertionError: the
# service did something it must not.
Play = Callable[[World], Awaitable[Collection[str]]]

_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what is done, and which codes are right. Without `play` it says why.

    `name` begins with an id of the checklist. `elsewhere` is the test that covers it, as pytest
    names it; `not_here` says why no single machine can run it, or that it cannot happen at all.
    """

    name: str
    play: Play | None = None
    accepted: frozenset[str] = frozenset()
    limit_s: float = _LIMIT_S
    fast: bool = False  # belongs to the part that `make test` runs
    elsewhere: str = ""
    not_here: str = ""

    @property
    def item(self) -> str:
        """The checklist's id: group and fault, without the variant."""
        return "/".join(self.name.split("/")[:2])


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case; `problem` is empty where all was right."""

    case: str
    outcome: str
    seconds: float = 0.0
    recovery_s: float | None = None
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem

    def as_row(self) -> dict[str, Any]:
        """For a JSON report."""
        return asdict(self)


def here(
    name: str, play: Play, *accepted: str, limit_s: float = _LIMIT_S, fast: bool = False
) -> Case:
    """A case that runs."""
    return Case(name, play, frozenset(accepted), limit_s, fast)


def elsewhere(name: str, test: str) -> Case:
    """A case that another test covers, over real gRPC or in the process it is about."""
    return Case(name, elsewhere=test)


def not_here(name: str, reason: str) -> Case:
    """A case that does not run, and why."""
    return Case(name, not_here=reason)


async def examine(case: Case, world: World) -> Result:
    """Run a case, then wait for the invariant; whatever is wrong is told in the result."""
    assert case.play
    began = time.monotonic()
    outcome, problem = await _played(case, world)
    seconds = time.monotonic() - began
    recovery_s = None
    try:
        async with asyncio.timeout(_LIMIT_S):
            # What a case left behind after a problem must not fail the next one.
            await world.heal()
            recovery_s = await world.settle()
    except (TimeoutError, NotRecovered) as error:
        problem = problem or f"does not recover: {error or 'hangs'}"
    return Result(case.name, outcome, round(seconds, 3), recovery_s, problem)


async def _played(case: Case, world: World) -> tuple[str, str]:
    """Outcome and problem."""
    assert case.play
    limit = asyncio.timeout(case.limit_s)
    try:
        async with limit:
            codes = await case.play(world)
    except Exception as error:
        if limit.expired():
            return "HANGS", f"not over within {case.limit_s:g} s"
        # A TimeoutError of its own: what it waited for did not happen.
        return "WRONG", f"{type(error).__name__}: {error}"
    outcome = ", ".join(
        f"{code} x {times}" if times > 1 else code for code, times in sorted(Counter(codes).items())
    )
    wrong = sorted(set(codes) - case.accepted)
    return outcome, f"not accepted: {', '.join(wrong)}" if wrong else ""
