"""Single flight: one leader, its result for all, and nothing left behind however it ends."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.flight import Flights
from specrej.errors import Cancelled, DeadlineExceeded, InternalError, TooLate

BOUND_S = 5.0


class Kitchen:
    """Generates on demand: one `step` per generation, counted."""

    def __init__(self) -> None:
        self.flights: Flights[str] = Flights()
        self.started = 0
        self.running = 0
        self.most_running = 0
        self.steps: list[asyncio.Future[str]] = []

    async def generate(self) -> str:
        """Runs until the test sets the newest of `steps`."""
        step: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.steps.append(step)
        self.started += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await step
        finally:
            self.running -= 1

    async def ask(self, key: str = "k") -> str:
        async with self.flights.join(key) as flight:
            if not flight.landed:
                flight.land(await self.generate())
            return flight.result


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def spawn(kitchen: Kitchen, count: int) -> list[asyncio.Task[str]]:
    """Callers in line; the first leads."""
    tasks = [asyncio.create_task(kitchen.ask()) for _ in range(count)]
    await settle()
    return tasks


async def test_500_equal_requests_are_one_generation() -> None:
    """Guards against a stampede: without single flight each caller would generate."""
    kitchen = Kitchen()
    tasks = await spawn(kitchen, 500)
    assert (kitchen.started, kitchen.flights.num_flying) == (1, 1)
    kitchen.steps[0].set_result("answer")
    async with asyncio.timeout(BOUND_S):
        assert await asyncio.gather(*tasks) == ["answer"] * 500
    assert (kitchen.started, kitchen.flights.num_flying) == (1, 0)


async def test_other_keys_fly_on_their_own() -> None:
    """Guards against one lock for all keys."""
    kitchen = Kitchen()
    tasks = [asyncio.create_task(kitchen.ask(key)) for key in "abc"]
    await settle()
    assert kitchen.most_running == 3
    for name, step in zip("ABC", kitchen.steps, strict=True):
        step.set_result(name)
    assert await asyncio.gather(*tasks) == ["A", "B", "C"]


async def test_the_next_caller_after_a_landing_generates_anew() -> None:
    """Guards against the flight doubling as a cache without bounds."""
    kitchen = Kitchen()
    for answer in ("one", "two"):
        (task,) = await spawn(kitchen, 1)
        kitchen.steps[-1].set_result(answer)
        assert await task == answer


async def test_a_waiter_that_is_cancelled_disturbs_nobody() -> None:
    """Guards against awaiting the leader's own future: cancelling that would cancel the leader."""
    kitchen = Kitchen()
    leader, leaving, staying = await spawn(kitchen, 3)
    leaving.cancel()
    await settle()
    assert leaving.cancelled() and not leader.done() and not staying.done()
    kitchen.steps[0].set_result("answer")
    assert (await leader, await staying) == ("answer", "answer")


async def test_a_waiters_deadline_is_its_own() -> None:
    """Guards against a waiter bound to the leader's time, or the leader to a waiter's."""
    kitchen = Kitchen()
    (leader,) = await spawn(kitchen, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await kitchen.ask()
    kitchen.steps[0].set_result("answer")
    assert await leader == "answer"


async def test_a_cancelled_leader_hands_over() -> None:
    """Guards against 499 callers failing because one client hung up."""
    kitchen = Kitchen()
    leader, *waiters = await spawn(kitchen, 10)
    leader.cancel()
    await settle()
    assert leader.cancelled()
    assert (kitchen.started, kitchen.running, kitchen.flights.num_flying) == (2, 1, 1)
    kitchen.steps[1].set_result("answer")
    assert await asyncio.gather(*waiters) == ["answer"] * 9
    assert (kitchen.started, kitchen.flights.num_flying) == (2, 0)


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), DeadlineExceeded("late"), TooLate("the queue is long"), Cancelled("gone")],
)
async def test_a_leader_out_of_time_hands_over(error: Exception) -> None:
    """Guards against the shortest deadline counting for all."""
    kitchen = Kitchen()
    leader, waiter = await spawn(kitchen, 2)
    kitchen.steps[0].set_exception(error)
    with pytest.raises(type(error)):
        await leader
    await settle()
    kitchen.steps[1].set_result("answer")
    assert await waiter == "answer"


async def test_a_leader_that_leaves_without_landing_hands_over() -> None:
    """Guards against waiters that wait for ever for a result not meant for them (degraded)."""
    kitchen = Kitchen()
    leave = asyncio.Event()

    async def leaves() -> None:
        async with kitchen.flights.join("k"):
            await leave.wait()

    leader = asyncio.create_task(leaves())
    await settle()
    (waiter,) = await spawn(kitchen, 1)
    leave.set()
    await leader
    await settle()
    kitchen.steps[0].set_result("answer")
    assert await waiter == "answer"


async def test_a_heir_cancelled_as_it_inherits_passes_on() -> None:
    """Guards against a lost wake-up: leadership given to a task that never runs again."""
    kitchen = Kitchen()
    leader, heir, other = await spawn(kitchen, 3)
    leader.cancel()
    # One turn of the loop: the leader has left and woken the heir, which has not run yet.
    await asyncio.sleep(0)
    heir.cancel()
    await settle()
    assert heir.cancelled() and kitchen.running == 1
    kitchen.steps[-1].set_result("answer")
    assert await other == "answer"
    assert kitchen.flights.num_flying == 0


async def test_an_error_is_everybodys() -> None:
    """Guards against N callers repeating, one after another, what fails for all of them."""
    kitchen = Kitchen()
    tasks = await spawn(kitchen, 50)
    kitchen.steps[0].set_exception(error := InternalError("broken"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is error for outcome in outcomes)
    assert (kitchen.started, kitchen.flights.num_flying) == (1, 0)


async def test_a_shared_errors_traceback_does_not_grow() -> None:
    """Guards against the 500th waiter logging the frames of 499 others."""
    kitchen = Kitchen()
    lengths: list[int] = []

    async def ask() -> None:
        try:
            await kitchen.ask()
        except InternalError as error:
            lengths.append(len(traceback.extract_tb(error.__traceback__)))

    tasks = [asyncio.create_task(ask()) for _ in range(50)]
    await settle()
    kitchen.steps[0].set_exception(InternalError("broken"))
    await asyncio.gather(*tasks)
    assert len(lengths) == 50 and max(lengths[1:]) == min(lengths[1:])


async def test_the_leader_tells_its_client_as_it_goes() -> None:
    """Guards the use in a streaming call: events before landing, waiters served at landing.

    The leader may still be busy (a slow client, the cache) when the others have their answer.
    """
    flights: Flights[str] = Flights()
    written = asyncio.Event()

    async def lead() -> AsyncIterator[str]:
        async with flights.join("k") as flight:
            assert not flight.landed
            yield "admitted"
            flight.land("answer")
            await written.wait()
            yield "finished"

    events = lead()
    assert await anext(events) == "admitted"
    last = asyncio.ensure_future(anext(events))
    await settle()
    async with asyncio.timeout(BOUND_S), flights.join("k") as flight:
        assert flight.result == "answer" and not last.done()
    written.set()
    assert await last == "finished"
    await events.aclose()  # type: ignore[attr-defined]
    assert flights.num_flying == 0


async def test_a_closed_generator_hands_over() -> None:
    """Guards against an abandoned event stream holding its key for ever."""
    kitchen = Kitchen()

    async def lead() -> AsyncIterator[str]:
        async with kitchen.flights.join("k"):
            yield "admitted"

    events = lead()
    await anext(events)
    (waiter,) = await spawn(kitchen, 1)
    assert kitchen.started == 0
    await events.aclose()  # type: ignore[attr-defined]
    await settle()
    kitchen.steps[0].set_result("answer")
    assert await waiter == "answer"


async def test_an_error_after_landing_stays_the_leaders() -> None:
    """Guards against a failed cache write or client turning a good answer into an error."""
    flights: Flights[str] = Flights()
    with pytest.raises(InternalError):
        async with flights.join("k") as flight:
            flight.land("answer")
            async with flights.join("k") as other:
                assert other.result == "answer"
            raise InternalError("late")
    assert flights.num_flying == 0


async def test_no_result_before_landing() -> None:
    """Guards against a waiter's code path run by a leader getting None for an answer."""
    flights: Flights[str] = Flights()
    async with flights.join("k") as flight:
        with pytest.raises(RuntimeError):
            _ = flight.result


_ACTIONS = st.sampled_from(["join", "cancel", "land", "fail", "late", "turn"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_ACTIONS, st.integers(0, 7)), max_size=40))
def test_whatever_happens_one_flies_and_nothing_is_left(script: list[tuple[str, int]]) -> None:
    """Guards the invariants under any order of arrivals, cancels, results and errors.

    At most one generation per key runs, every caller gets an outcome, the dict ends empty.
    """
    asyncio.run(_play(script))


async def _play(script: list[tuple[str, int]]) -> None:
    kitchen = Kitchen()
    tasks: list[asyncio.Task[str]] = []
    for action, number in script:
        open_steps = [step for step in kitchen.steps if not step.done()]
        if action == "join":
            tasks.append(asyncio.create_task(kitchen.ask()))
        elif action == "turn":
            for _ in range(number):
                await asyncio.sleep(0)
        elif action == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        elif open_steps and action == "land":
            open_steps[0].set_result("answer")
        elif open_steps and action in ("fail", "late"):
            error = InternalError("broken") if action == "fail" else DeadlineExceeded("late")
            open_steps[0].set_exception(error)
        assert kitchen.most_running <= 1 and kitchen.flights.num_flying <= 1
    await _finish(kitchen, tasks)


async def _finish(kitchen: Kitchen, tasks: list[asyncio.Task[str]]) -> None:
    """Lands whoever leads until nobody does; every caller must then have an outcome."""
    await settle()
    while open_steps := [step for step in kitchen.steps if not step.done()]:
        open_steps[0].set_result("answer")
        await settle()
    assert all(task.done() for task in tasks)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    allowed = (InternalError, DeadlineExceeded, asyncio.CancelledError)
    assert all(outcome == "answer" or isinstance(outcome, allowed) for outcome in outcomes)
    assert (kitchen.flights.num_flying, kitchen.running) == (0, 0)
    assert kitchen.most_running <= 1
