"""Single flight in one process: one leader, its result for all, no state left behind."""

from __future__ import annotations

import asyncio
import math
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache.keys import PREFIX
from orchestrator.cache.single_flight import Flight, SingleFlight, locked
from specrej.contracts.errors import Cancelled, DeadlineExceeded, InternalError, TooLate
from tests.serving import turns, until

BOUND_S = 20.0
# In equal parts, a second request hardly ever waits for the first.
_ENDS = ["cancel", "land", "fail", "late", "land and fail"]
_KINDS = st.sampled_from([*["request"] * 3, *["turn"] * 2, *_ENDS])
_ACTIONS = st.lists(st.tuples(_KINDS, st.integers(0, 7)), min_size=15, max_size=40)


class Callers:
    """Equal requests in one process, whose runs end by their `steps`; an empty answer is not
    published, and a leader fails after the answer "late failure"."""

    def __init__(self) -> None:
        self.flights: SingleFlight[str] = SingleFlight()
        self.steps: list[asyncio.Future[str]] = []
        self.running = self.most_running = 0

    async def request(self, key: str = "k") -> str:
        async with self.flights.join(key) as flight:
            if flight.result is not None:
                return flight.result
            if answer := await self.run():
                flight.publish(answer)
            if answer == "late failure":  # such as that of a cache write
                raise InternalError(answer)
            return answer

    async def run(self) -> str:
        """Wait for the result of a new step."""
        step: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.steps.append(step)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await step
        finally:
            self.running -= 1

    def end(self, outcome: str | BaseException) -> None:
        """Set the result or the error of every open step."""
        for step in self.steps:
            if not step.done():
                if isinstance(outcome, BaseException):
                    step.set_exception(outcome)
                else:
                    step.set_result(outcome)


@pytest.fixture
def callers() -> Callers:
    return Callers()


async def start(callers: Callers, count: int) -> list[asyncio.Task[str]]:
    """Start requests; the first leads."""
    tasks = [asyncio.create_task(callers.request()) for _ in range(count)]
    await turns()
    return tasks


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        DeadlineExceeded("late"),
        TooLate("a long queue"),
        Cancelled("gone"),
        GeneratorExit(),  # an abandoned event stream
        None,
    ],
)
async def test_leaders_that_leave_hand_over(callers: Callers, error: BaseException | None) -> None:
    """Guards against waiters that fail with one caller's cancellation or deadline."""
    leader, *waiters = await start(callers, 10)
    if error:
        callers.end(error)
    else:
        leader.cancel()
    await turns()
    with pytest.raises(type(error) if error else asyncio.CancelledError):
        await leader
    assert (len(callers.steps), callers.running, len(callers.flights.flying)) == (2, 1, 1)
    callers.end("answer")
    assert await asyncio.gather(*waiters) == ["answer"] * 9
    assert (len(callers.steps), len(callers.flights.flying)) == (2, 0)


async def test_a_result_that_is_not_final_is_for_those_with_less_time_than_it_took() -> None:
    """Guards against errors of equal requests with one deadline, where one has used all the time;
    a caller with more time gets a better answer."""
    flights: SingleFlight[str] = SingleFlight()

    async def request(left_s: float) -> str:
        async with flights.join("k", lambda: left_s) as flight:
            return flight.result or "a run"

    async with flights.join("k", lambda: 0.0) as flight:
        waiting = [asyncio.create_task(request(left_s)) for left_s in (0.0, 60.0, math.inf)]
        await turns()
        flight.publish("hurried", is_final=False)
        await turns()
        assert not any(task.done() for task in waiting)
    assert await asyncio.gather(*waiting) == ["hurried", "a run", "a run"]


@pytest.mark.parametrize("leader_left_s", [math.inf, 60.0])
async def test_callers_with_little_time_share_a_run_beside_the_leader(leader_left_s: float) -> None:
    """Guards against a caller whose time passes while it waits for a leader that need not hurry."""
    runs = Callers()
    flights = runs.flights
    num_waits: Counter[str] = Counter()
    are_beside: list[bool] = []

    async def request(left_s: float, name: str = "long") -> str:
        def counted_left_s() -> float:
            num_waits[name] += 1
            return left_s

        async with flights.join("k", counted_left_s) as flight:
            if flight.result is None:
                are_beside.append(flight.is_beside)
                flight.publish(await runs.run())
            return flight.result or "none"

    long = [asyncio.create_task(request(left_s)) for left_s in (leader_left_s, 60.0, math.inf)]
    await turns()
    names = [f"short {number}" for number in range(5)]
    short = [asyncio.create_task(request(0.05, name)) for name in names]
    # Twice: before the wait for the leader, and before that for the run beside it.
    await until(lambda: min(num_waits[name] for name in names) >= 2 and len(runs.steps) == 2)
    runs.steps[1].set_result("in time")
    assert await asyncio.gather(*short) == ["in time"] * 5
    assert not any(task.done() for task in long)
    runs.steps[0].set_result("whole")
    assert await asyncio.gather(*long) == ["whole"] * 3
    assert (are_beside, len(flights.flying)) == ([False, True], 0)


async def test_all_callers_get_the_leaders_error(callers: Callers) -> None:
    """Guards against runs that fail one after another, and a traceback that grows with them."""
    num_frames: list[int] = []

    async def request() -> None:
        try:
            await callers.request()
        except InternalError as error:
            num_frames.append(len(traceback.extract_tb(error.__traceback__)))

    tasks = [asyncio.create_task(request()) for _ in range(50)]
    await turns()
    callers.end(InternalError("broken"))
    await asyncio.wait_for(asyncio.gather(*tasks), BOUND_S)
    assert len(num_frames) == 50 and len(set(num_frames[2:])) == 1
    assert (len(callers.steps), len(callers.flights.flying)) == (1, 0)


@given(_ACTIONS)
async def test_one_run_at_a_time_in_any_order_of_events(script: list[tuple[str, int]]) -> None:
    """Guards the invariants: one run per key, an outcome for every caller, no flight left."""
    callers, tasks = Callers(), list[asyncio.Task[str]]()
    ends: dict[str, str | Exception] = {"land": "answer", "land and fail": "late failure"}
    ends |= {"fail": InternalError("broken"), "late": DeadlineExceeded("late")}
    for action, number in script:
        if action == "request":
            tasks.append(asyncio.create_task(callers.request()))
        elif action == "turn":
            await turns(number)
        elif action == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif action in ends:
            callers.end(ends[action])
    async with asyncio.timeout(BOUND_S):
        while not all(task.done() for task in tasks):
            callers.end("answer")
            await turns(1)
    allowed = (str, InternalError, DeadlineExceeded, asyncio.CancelledError)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, allowed) for outcome in outcomes)
    assert callers.running == 0 and callers.most_running <= 1
    assert (len(callers.flights.flying), callers.flights.num_waiting) == (0, 0)


async def test_a_caller_that_is_cancelled_while_it_locks_leaves_no_lock() -> None:
    """Guards equal requests elsewhere against a wait until the lock expires."""
    granting, lock = asyncio.Event(), AsyncMock()

    async def acquire(blocking: bool) -> bool:
        return await granting.wait()

    lock.acquire.side_effect = acquire
    locks: Any = SimpleNamespace(lock=lambda *_: lock, attempt=lambda *given: given[-1]())

    async def hold() -> None:
        async with locked(locks, f"{PREFIX}:key", Flight(lambda: 10.0)):
            pytest.fail("the caller has left")

    caller = asyncio.create_task(hold())
    await turns()
    caller.cancel()
    await turns()
    lock.release.assert_not_awaited()
    granting.set()
    await asyncio.wait({caller}, timeout=10)
    assert caller.cancelled()
    lock.acquire.assert_awaited_once()
    lock.release.assert_awaited_once()
