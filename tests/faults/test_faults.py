"""The fast part of `make faults`: real processes, a fault, and the invariant after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio

from tests.faults.__main__ import CASES
from tests.faults.case import Case, Play, case, examine
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.world import NotRecovered, World, world

FAST = [case for case in CASES if case.fast]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[World]:
    """One world for all cases: leftovers of a case fail it."""
    async with world() as one:
        yield one


pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
async def test_case(case: Case, running: World) -> None:
    """Guards against hangs, wrong codes, and leftovers of a request."""
    result = await examine(case, running)
    assert not result.problem, f"{result.outcome}: {result.problem}\n{running.stack.log_tails()}"


async def test_invariant_detects_a_held_request(running: World) -> None:
    """Guards against an invariant that always holds."""
    assert await running.wrong() == ""
    async with held_at(FIRST_ROUND, running):
        assert "in flight" in await running.wrong()
    await running.settle()


async def hang(_: World) -> list[str]:
    await asyncio.Event().wait()
    return []


async def fail(_: World) -> list[str]:
    raise AssertionError("the wrong answer")


async def succeed(_: World) -> list[str]:
    return ["OK", "OK", "UNKNOWN"]


@pytest.mark.parametrize(
    ("play", "expected", "wrong", "outcome", "problem"),
    [
        (succeed, ("OK x 2", "UNKNOWN"), "3 slots", "OK x 2, UNKNOWN", "does not recover: 3 slots"),
        (succeed, ("OK", "OK|UNKNOWN", "OK"), "", "OK x 2, UNKNOWN", "not accepted: 2: UNKNOWN"),
        (succeed, ("OK|UNKNOWN x 2",), "", "OK x 2, UNKNOWN", "3 calls, not 2"),
        (hang, ("OK",), "", "HANGS", "not over within 0.01 s"),
        (fail, ("OK",), "", "WRONG", "AssertionError: the wrong answer"),
    ],
)
async def test_a_failure_is_a_problem(
    play: Play, expected: tuple[str, ...], wrong: str, outcome: str, problem: str
) -> None:
    """Guards against a suite that reports a failed case as passed."""
    one = case("x", play, *expected, limit_s=0.01)
    mocked = AsyncMock(World)
    mocked.settle.side_effect = [NotRecovered(wrong) if wrong else 0.0]
    result = await examine(one, mocked)
    assert (result.outcome, result.problem) == (outcome, problem)
    assert (result.recovery_s is None) == bool(wrong)
