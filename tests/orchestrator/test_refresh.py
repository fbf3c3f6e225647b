"""Work in the background: one per key, bounded, and gone when it is closed."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from orchestrator.refresh import Refreshes
from specrej.errors import Unavailable
from tests.serving import until

BOUND_S = 5.0


class Work:
    """Runs until it is told to end; `running` counts."""

    def __init__(self) -> None:
        self.running = self.most = self.started = 0
        self.end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> None:
        self.started += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.end.wait()
            if self.error:
                raise self.error
        finally:
            self.running -= 1


async def test_one_per_key_and_not_too_many() -> None:
    """Guards against a refresh per hit of a popular answer, and a flood of them after an hour."""
    refreshes, work = Refreshes(limit=3), Work()
    for _ in range(5):
        for key in "abcdef":
            refreshes.start(key, work)
    await until(lambda: work.running == 3)
    assert refreshes.num_running == 3 and refreshes.counts.skipped == 15
    work.end.set()
    await until(lambda: not refreshes.num_running)
    assert (work.started, refreshes.counts.done) == (3, 3)
    refreshes.start("a", work)
    await until(lambda: refreshes.counts.done == 4)
    await refreshes.aclose()


@pytest.mark.parametrize("error", [Unavailable("down"), TimeoutError(), ValueError("a bug")])
async def test_errors_stay_where_they_are(error: Exception) -> None:
    """Guards against "Task exception was never retrieved", and a key refreshed never again."""
    refreshes, work = Refreshes(), Work()
    work.error = error
    work.end.set()
    for failures in (1, 2):
        refreshes.start("a", work)
        await until(lambda wanted=failures: refreshes.counts.failed == wanted)  # type: ignore[misc]
        await until(lambda: not refreshes.num_running)


async def test_it_has_a_deadline_of_its_own() -> None:
    """Guards against a hanging backend that fills all places for good."""
    refreshes, work = Refreshes(deadline_s=0.01), Work()
    refreshes.start("a", work)
    await until(lambda: refreshes.counts.failed == 1)
    assert work.running == 0


async def test_closing_ends_all_and_nothing_starts_after() -> None:
    """Guards against tasks that outlive the service."""
    refreshes, work = Refreshes(), Work()
    for key in "abc":
        refreshes.start(key, work)
    await until(lambda: work.running == 3)
    async with asyncio.timeout(BOUND_S):
        await refreshes.aclose()
    assert (work.running, refreshes.num_running) == (0, 0)
    refreshes.start("a", work)
    await asyncio.sleep(0)
    assert (work.started, refreshes.num_running) == (3, 0)
    await refreshes.aclose()


async def test_it_does_not_belong_to_the_request() -> None:
    """Guards against a caller's deadline, span or tenant followed into the background."""
    whose = contextvars.ContextVar("whose", default="nobody")
    whose.set("the caller")
    found: list[str] = []

    async def look() -> None:
        found.append(whose.get())

    refreshes = Refreshes()
    refreshes.start("a", look)
    await until(lambda: bool(found))
    assert found == ["nobody"]
    await refreshes.aclose()
