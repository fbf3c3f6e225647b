"""Real processes, a fault, and the invariant after it: `make faults`, or ARGS="-k redis".

CI runs the fast cases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults import processes, redis_faults, rolling
from tests.faults.case import Case, check
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.world import World, world

CASES = [
    pytest.param(case, id=case.name, marks=() if case.fast else pytest.mark.long)
    for part in (processes, redis_faults, rolling)
    for case in part.CASES
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[World]:
    """One world for all cases: leftovers of a case fail it."""
    async with world() as one:
        yield one


pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("case", CASES)
async def test_case(case: Case, running: World) -> None:
    """Guards against hangs, wrong codes, and leftovers of a request."""
    try:
        await check(case, running)
    except Exception as error:
        error.add_note(running.stack.log_tails())
        raise


async def test_invariant_detects_a_held_request(running: World) -> None:
    """Guards against an invariant that always holds."""
    assert await running.wrong() == ""
    async with held_at(FIRST_ROUND, running):
        assert "in flight" in await running.wrong()
    await running.settle()
