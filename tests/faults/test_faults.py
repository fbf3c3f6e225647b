"""The fast part of `make faults`: real processes, a fault, and the invariant after it."""

from __future__ import annotations

import pytest

from tests.faults.case import Case, examine
from tests.faults.checklist import CASES
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.world import World

FAST = [case for case in CASES if case.fast]


pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.name)
async def test_case(case: Case, running: World) -> None:
    """Guards against hangs, wrong codes, and whatever outlasts a request."""
    result = await examine(case, running)
    assert result.is_good, f"{result.outcome}: {result.problem}\n{running.stack.log_tails()}"


async def test_the_invariant_sees_what_is_held(running: World) -> None:
    """Guards against a check that would pass whatever a case leaves behind."""
    assert await running.wrong() == ""
    async with held_at(FIRST_ROUND, running):
        assert "in flight" in await running.wrong()
    await running.settle()
