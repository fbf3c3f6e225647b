"""Admission: exactly so many run, exactly so many wait, and no permit is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.admission import Admission, Limits
from specrej.errors import Overloaded, TooLate

BOUND_S = 5.0


class Visitors:
    """Callers that hold their permit until the test lets them go."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.doors: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.entered: list[int] = []
        self.inside = 0
        self.most_inside = 0

    def arrive(self, tenant: str = "", tokens: int = 1) -> asyncio.Task[None]:
        door = asyncio.Event()
        task = asyncio.create_task(self._visit(len(self.doors), door, tenant, tokens))
        self.doors.append(door)
        self.tasks.append(task)
        return task

    async def _visit(self, number: int, door: asyncio.Event, tenant: str, tokens: int) -> None:
        async with self.admission.enter(tenant, tokens):
            self.entered.append(number)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            try:
                await door.wait()
            finally:
                self.inside -= 1

    async def all_leave(self) -> list[BaseException | None]:
        for door in self.doors:
            door.set()
        async with asyncio.timeout(BOUND_S):
            return await asyncio.gather(*self.tasks, return_exceptions=True)


async def settle() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], bool]) -> None:
    """The fewest turns of the loop until `condition` holds."""
    for _ in range(20):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("never")


@pytest.mark.parametrize(("limit", "queue", "extra"), [(1, 0, 3), (2, 3, 4), (8, 16, 1)])
async def test_limit_plus_queue_are_admitted_and_the_rest_refused(
    limit: int, queue: int, extra: int
) -> None:
    """Guards the limit itself, off by one in either direction."""
    visitors = Visitors(Admission(Limits(limit, queue)))
    for _ in range(limit + queue + extra):
        visitors.arrive()
    await settle()
    assert (visitors.admission.running, visitors.admission.queued) == (limit, queue)
    outcomes = await visitors.all_leave()
    assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == extra
    assert sum(outcome is None for outcome in outcomes) == limit + queue
    assert visitors.most_inside == limit
    assert (visitors.admission.running, visitors.admission.queued) == (0, 0)


async def test_first_come_first_served() -> None:
    """Guards against a line that wakes at random or from its end."""
    visitors = Visitors(Admission(Limits(1, 10)))
    for _ in range(8):
        visitors.arrive()
    await settle()
    await visitors.all_leave()
    assert visitors.entered == list(range(8))


async def test_a_newcomer_cannot_overtake_the_line() -> None:
    """Guards against a freed permit lying open to whoever comes before the waiter wakes up."""
    visitors = Visitors(Admission(Limits(1, 10)))
    visitors.arrive()
    visitors.arrive()
    await settle()
    visitors.doors[0].set()
    # The permit changes hands, but its new holder has not run yet.
    await turns_until(lambda: visitors.admission.queued == 0)
    assert visitors.entered == [0]
    visitors.arrive()
    await settle()
    assert visitors.entered == [0, 1]
    await visitors.all_leave()


async def test_a_cancelled_waiter_leaves_the_line() -> None:
    """Guards against places held by the dead: the line would seem full for ever."""
    visitors = Visitors(Admission(Limits(1, 1)))
    visitors.arrive()
    waiter = visitors.arrive()
    await settle()
    waiter.cancel()
    assert visitors.admission.queued == 0  # at once, before the cancelled task has run
    late = visitors.arrive()
    await settle()
    # A long-running holder must not gather the dead.
    assert sum(len(tenant.line) for tenant in visitors.admission._tenants.values()) == 1
    await settle()
    assert not late.done() and visitors.admission.queued == 1
    await visitors.all_leave()
    assert visitors.entered == [0, 2]


async def test_a_waiter_cancelled_as_it_gets_its_permit_passes_it_on() -> None:
    """Guards against the classic semaphore bug: a permit given to a task that is cancelled.

    The waiter's place is granted, but cancellation reaches it before it runs.
    """
    visitors = Visitors(Admission(Limits(1, 2)))
    visitors.arrive()
    heir = visitors.arrive()
    visitors.arrive()
    await settle()
    visitors.doors[0].set()
    await turns_until(lambda: visitors.admission.queued == 1)
    assert visitors.entered == [0]  # granted, not yet awake
    heir.cancel()
    await settle()
    assert heir.cancelled() and visitors.entered == [0, 2]
    await visitors.all_leave()
    assert visitors.admission.running == 0


async def test_a_permit_is_not_given_to_a_waiter_that_is_being_cancelled() -> None:
    """Guards a release in the same turn as a cancel, before the waiter has left the line."""
    visitors = Visitors(Admission(Limits(1, 2)))
    holder = visitors.arrive()
    leaving = visitors.arrive()
    visitors.arrive()
    await settle()
    holder.cancel()  # first, so that it wakes first and finds the other still in line
    leaving.cancel()
    await settle()
    assert holder.cancelled() and leaving.cancelled() and visitors.entered == [0, 2]
    await visitors.all_leave()
    assert visitors.admission.running == 0


async def test_a_waiters_deadline_leaves_the_line() -> None:
    """Guards against work whose deadline passed in the queue being done all the same."""
    visitors = Visitors(Admission(Limits(1, 1)))
    visitors.arrive()
    await settle()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), visitors.admission.enter():
            pytest.fail("entered after its deadline")
    assert (visitors.admission.running, visitors.admission.queued) == (1, 0)
    await visitors.all_leave()


async def test_an_error_inside_gives_the_permit_back() -> None:
    """Guards against a permit lost with every failed request."""
    admission = Admission(Limits(1, 0))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with admission.enter():
                raise ZeroDivisionError
    assert admission.running == 0


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def refusal(service_s: float | None, max_running: int, max_queued: int) -> float:
    """The delay told to the first one refused, after requests that each took `service_s`."""
    clock = Clock()
    admission = Admission(Limits(max_running, max_queued), clock)
    for _ in range(3 if service_s is not None else 0):
        async with admission.enter():
            clock.now_s += service_s or 0.0
    visitors = Visitors(admission)
    for _ in range(max_running + max_queued):
        visitors.arrive()
    await settle()
    with pytest.raises(Overloaded) as refused:
        async with admission.enter():
            pytest.fail("admitted beyond limit and queue")
    await visitors.all_leave()
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


@pytest.mark.parametrize(
    ("service_s", "max_running", "max_queued", "expected_s"),
    [
        (2.0, 1, 0, 2.0),
        (2.0, 4, 7, 4.0),
        (1e-6, 4, 7, 0.1),
        (1e6, 4, 7, 30.0),
        (None, 1, 2, 3.0),  # nothing measured yet: a second each
    ],
)
async def test_the_delay_is_how_long_the_line_takes(
    service_s: float | None, max_running: int, max_queued: int, expected_s: float
) -> None:
    """Guards against a delay that is 0 (a retry storm), for ever, or blind to the line's length."""
    assert await refusal(service_s, max_running, max_queued) == pytest.approx(expected_s)


async def test_the_delay_follows_the_load() -> None:
    """Guards against a mean over all time, which yesterday's requests would dominate."""
    clock = Clock()
    admission = Admission(Limits(1, 0), clock)
    for service_s in (10.0, *[1.0] * 60):
        async with admission.enter():
            clock.now_s += service_s
    async with admission.enter():
        with pytest.raises(Overloaded) as refused:
            async with admission.enter():
                pytest.fail("admitted beyond the limit")
    assert refused.value.retry_after_s == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("max_running", "max_queued"), [(0, 1), (-1, 1), (1, -1)])
def test_limits_nobody_could_pass_are_refused(max_running: int, max_queued: int) -> None:
    """Guards against a setting with which every request would wait for ever."""
    with pytest.raises(ValueError, match="max_running"):
        Admission(Limits(max_running, max_queued))


async def test_tenants_take_turns_by_what_they_ask_for() -> None:
    """Guards a tenant with one request against another's hundred, and small against large ones."""
    visitors = Visitors(Admission(Limits(1, 100)))
    visitors.arrive("first")
    await settle()
    for _ in range(4):
        visitors.arrive("many", tokens=10)
    for _ in range(2):
        visitors.arrive("few", tokens=10)
    for _ in range(2):
        visitors.arrive("small", tokens=5)
    await settle()
    await visitors.all_leave()
    tenants = ["first", *["many"] * 4, *["few"] * 2, *["small"] * 2]
    order = [tenants[number] for number in visitors.entered]
    assert order == ["first", "many", "few", "small", "small", "many", "few", "many", "many"]


async def test_who_was_away_does_not_catch_up() -> None:
    """Guards a tenant that has long been served against a newcomer's burst: they share from now."""
    visitors = Visitors(Admission(Limits(1, 100)))
    for _ in range(5):
        visitors.arrive("old", tokens=10)
    await settle()
    for number in range(3):
        visitors.doors[number].set()
        await settle()
    for _ in range(3):
        visitors.arrive("new", tokens=10)
    await settle()
    await visitors.all_leave()
    assert visitors.entered == [0, 1, 2, 3, 5, 4, 6, 7]


async def test_who_asks_again_at_once_is_not_served_first() -> None:
    """Guards small requests that wait against large ones that come one after the other, each as
    soon as the one before has left: they took every second turn, and nearly all the tokens."""
    visitors = Visitors(Admission(Limits(1, 100)))
    tenants = ["large", *["small"] * 6]
    for tenant in tenants:
        visitors.arrive(tenant, tokens=1000 if tenant == "large" else 10)
    await settle()
    for _ in range(7):
        leaving = visitors.entered[-1]
        visitors.doors[leaving].set()
        await settle()
        if tenants[leaving] == "large":
            tenants.append("large")
            visitors.arrive("large", tokens=1000)
            await settle()
    assert [tenants[number] for number in visitors.entered] == ["large", *["small"] * 6, "large"]
    await visitors.all_leave()


async def test_tenants_that_are_away_are_forgotten() -> None:
    """Guards a process that always has something to do against remembering all it ever served."""
    admission = Admission(Limits(2, 0))
    async with admission.enter("always here"):
        for number in range(50):
            async with admission.enter(f"tenant {number}", 1000):
                pass
        assert list(admission._tenants) == ["always here"]


async def test_candidate_tokens_that_wait_are_limited() -> None:
    """Guards the line against a few huge requests that would hold everybody up."""
    admission = Admission(Limits(1, 10, max_queued_tokens=100))
    visitors = Visitors(admission)
    visitors.arrive(tokens=1000)
    visitors.arrive(tokens=1000)  # the first in line may be as large as it likes
    await settle()
    with pytest.raises(Overloaded, match="1000 candidate-tokens wait"):
        async with admission.enter(tokens=1):
            pytest.fail("admitted beyond the limit")
    await visitors.all_leave()
    async with admission.enter(tokens=1):
        assert admission.running == 1


async def test_a_tenants_quota_is_its_own() -> None:
    """Guards the others against one tenant, and a tenant against being locked out for good."""
    admission = Admission(Limits(10, 10, tenant_tokens=100))
    visitors = Visitors(admission)
    visitors.arrive("a", tokens=80)
    visitors.arrive("b", tokens=1000)  # more than the quota, but alone
    await settle()
    with pytest.raises(Overloaded, match="80 candidate-tokens of 100 are under way"):
        async with admission.enter("a", 21):
            pytest.fail("admitted beyond the quota")
    async with admission.enter("a", 20), admission.enter("c", 100):
        assert admission.running == 4
    await visitors.all_leave()
    async with admission.enter("a", 100):
        assert admission.running == 1


async def test_who_would_wait_longer_than_it_has_time_is_refused_at_once() -> None:
    """Guards overload: a request that will time out in line holds a place for nothing."""
    clock = Clock()
    admission = Admission(Limits(1, 10), clock)
    async with admission.enter(tokens=10):
        clock.now_s += 10.0
    visitors = Visitors(admission)
    visitors.arrive(tokens=10)
    await settle()
    with pytest.raises(TooLate, match="the deadline is in 4") as refused:
        async with admission.enter(tokens=5, time_left_s=4.0):
            pytest.fail("admitted to a line it cannot get through")
    assert refused.value.retry_after_s == pytest.approx(5.0)
    patient = asyncio.create_task(_enter(admission, tokens=5, time_left_s=6.0))
    await settle()
    assert admission.queued == 1
    await visitors.all_leave()
    await patient


async def _enter(admission: Admission, tokens: int, time_left_s: float) -> None:
    async with admission.enter(tokens=tokens, time_left_s=time_left_s):
        pass


_ACTIONS = st.sampled_from(["arrive", "leave", "cancel", "turn"])


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(1, 3),
    queue=st.integers(0, 3),
    script=st.lists(st.tuples(_ACTIONS, st.integers(0, 9)), max_size=60),
)
def test_permits_are_conserved(limit: int, queue: int, script: list[tuple[str, int]]) -> None:
    """Guards conservation under any order of arrivals, cancels and departures.

    Never more inside than permits, never a free permit while somebody waits, all back at the end.
    """
    asyncio.run(_play(limit, queue, script))


async def _play(limit: int, queue: int, script: list[tuple[str, int]]) -> None:
    admission = Admission(Limits(limit, queue))
    visitors = Visitors(admission)
    for action, number in script:
        if action == "arrive":
            visitors.arrive(f"tenant {number % 3}", tokens=1 + number)
        elif action == "turn":
            for _ in range(number):
                await asyncio.sleep(0)
        elif visitors.tasks and action == "leave":
            visitors.doors[number % len(visitors.doors)].set()
        elif visitors.tasks:
            visitors.tasks[number % len(visitors.tasks)].cancel()
        assert admission.running <= limit and admission.queued <= queue
        assert not admission.queued or admission.running == limit
    await settle()
    assert visitors.inside == admission.running
    outcomes = await visitors.all_leave()
    allowed = (Overloaded, asyncio.CancelledError)
    assert all(outcome is None or isinstance(outcome, allowed) for outcome in outcomes)
    assert visitors.most_inside <= limit
    assert (admission.running, admission.queued, visitors.inside) == (0, 0, 0)
    assert not admission._tenants and not admission.queued_tokens
