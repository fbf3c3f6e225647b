"""The fast part of `make faults`: real processes, a fault, and the invariant after it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.__main__ import CASES
from tests.faults.case import Case, examine
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.world import World, world

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
