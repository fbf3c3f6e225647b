"""Generations that a test ends, and random orders of requests and results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st

from specrej.contracts.errors import DeadlineExceeded, InternalError

T = TypeVar("T")

BOUND_S = 20.0
Script = list[tuple[str, int]]
# In equal parts, a second request hardly ever waits for the first.
_ACTIONS = st.sampled_from(["request"] * 3 + ["cancel", "land", "fail", "late", "turn", "turn"])
ACTIONS = st.tuples(_ACTIONS, st.integers(0, 7))
_ALLOWED = (InternalError, DeadlineExceeded, asyncio.CancelledError)


class HeldRuns(Generic[T]):
    """Generations that a test ends through `steps`, one future per generation."""

    def __init__(self) -> None:
        self.steps: list[asyncio.Future[T]] = []
        self.running = self.most_running = 0

    async def run(self) -> T:
        """Wait for the result of a new step."""
        step: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.steps.append(step)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await step
        finally:
            self.running -= 1

    def end(self, outcome: T | BaseException) -> None:
        """Set the result or the error of every open step."""
        for step in self.steps:
            if not step.done():
                if isinstance(outcome, BaseException):
                    step.set_exception(outcome)
                else:
                    step.set_result(outcome)


async def play(
    script: Script,
    runs: HeldRuns[T],
    result: T,
    request: Callable[[int], Coroutine[Any, Any, T]],
    turn: Callable[[], Awaitable[object]],
) -> None:
    """Play the actions, then end all runs: every caller gets an answer or one of the errors."""
    tasks: list[asyncio.Task[T]] = []
    ends: dict[str, T | Exception] = {"land": result}
    ends |= {"fail": InternalError("broken"), "late": DeadlineExceeded("late")}
    for action, number in script:
        if action == "request":
            tasks.append(asyncio.create_task(request(number)))
        elif action == "turn":
            for _ in range(number):
                await turn()
        elif action == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif action in ends:
            runs.end(ends[action])
    async with asyncio.timeout(BOUND_S):
        while not all(task.done() for task in tasks):
            runs.end(result)
            await turn()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, (type(result), *_ALLOWED)) for outcome in outcomes)
    assert runs.running == 0
