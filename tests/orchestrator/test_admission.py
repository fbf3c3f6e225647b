"""Admission: exact limits, fairness between tenants, and no lost permits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.edge.admission import Admission, Limits
from specrej.errors import Overloaded, TooLate
from tests.orchestrator.caching import Clock
from tests.serving import turns, until

BOUND_S = 5.0


class Requests:
    """Numbered requests that hold their permits until the test finishes them."""

    def __init__(self, max_running: int, max_queued: int, **limits: int) -> None:
        self.clock = Clock()
        self.admission = Admission(Limits(max_running, max_queued, **limits), self.clock)
        self.tasks: list[asyncio.Task[None]] = []
        self.entered: list[int] = []
        self.running = 0
        self.most_running = 0
        self._ends: list[asyncio.Event] = []

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        return self.admission.running, self.admission.queued

    def start(self, tenant: str = "", tokens: int = 1, time_left_s: float | None = None) -> None:
        end = asyncio.Event()
        work = self._hold(len(self.tasks), end, tenant, tokens, time_left_s)
        self.tasks.append(asyncio.create_task(work))
        self._ends.append(end)

    async def arrive(self, count: int = 1, **request: Any) -> None:
        for _ in range(count):
            self.start(**request)
        await turns()

    async def _hold(self, number: int, end: asyncio.Event, *request: Any) -> None:
        async with self.admission.enter(*request):
            self.entered.append(number)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                await end.wait()
            finally:
                self.running -= 1

    async def refused(self, **request: Any) -> Overloaded:
        """The error of one more request."""
        with pytest.raises(Overloaded) as raised:
            async with self.admission.enter(**request):
                pytest.fail("admitted")
        return raised.value

    def finish(self, number: int) -> None:
        self._ends[number].set()

    async def finish_all(self) -> list[BaseException | None]:
        """Exceptions of all requests."""
        for end in self._ends:
            end.set()
        async with asyncio.timeout(BOUND_S):
            return await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize(("limit", "queue", "extra"), [(1, 0, 3), (2, 3, 4), (8, 16, 1)])
async def test_requests_beyond_limit_and_queue_are_refused(
    limit: int, queue: int, extra: int
) -> None:
    """Guards against limits that are off by one."""
    requests = Requests(limit, queue)
    await requests.arrive(limit + queue + extra)
    assert requests.counts == (limit, queue)
    outcomes = await requests.finish_all()
    assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == extra
    assert sum(outcome is None for outcome in outcomes) == limit + queue
    assert requests.most_running == limit
    assert requests.counts == (0, 0)


@pytest.mark.parametrize(("max_running", "max_queued"), [(0, 1), (-1, 1), (1, -1)])
def test_limits_without_permits_are_refused(max_running: int, max_queued: int) -> None:
    """Guards against a setting with which every request would wait without end."""
    with pytest.raises(ValueError, match="max_running"):
        Admission(Limits(max_running, max_queued))


async def test_a_new_request_does_not_overtake_the_queue() -> None:
    """Guards against a returned permit that a new request takes before the waiter resumes."""
    requests = Requests(1, 10)
    await requests.arrive(2)
    requests.finish(0)
    # The permit has its next holder, which has not resumed yet.
    await until(lambda: requests.admission.queued == 0, every_s=0)
    assert requests.entered == [0]
    await requests.arrive()
    assert requests.entered == [0, 1]
    await requests.finish_all()


async def test_a_cancelled_request_leaves_the_queue() -> None:
    """Guards against places of ended requests, with which the queue would always seem full."""
    requests = Requests(1, 1)
    await requests.arrive(2)
    requests.tasks[1].cancel()
    assert requests.admission.queued == 0  # at once, before the cancelled task has resumed
    await requests.arrive()
    assert requests.counts == (1, 1)
    await requests.finish_all()
    assert requests.entered == [0, 2]


async def test_a_request_cancelled_as_it_gets_its_permit_passes_it_on() -> None:
    """Guards against a permit that is lost because its new holder is cancelled before it runs."""
    requests = Requests(1, 2)
    await requests.arrive(3)
    requests.finish(0)
    await until(lambda: requests.admission.queued == 1, every_s=0)
    assert requests.entered == [0]  # the permit is granted, the task has not resumed
    requests.tasks[1].cancel()
    await turns()
    assert requests.tasks[1].cancelled() and requests.entered == [0, 2]
    await requests.finish_all()
    assert requests.counts == (0, 0)


async def test_a_permit_is_not_given_to_a_request_that_is_being_cancelled() -> None:
    """Guards a release in the same turn as a cancel, before the waiter has left the queue."""
    requests = Requests(1, 2)
    await requests.arrive(3)
    for number in (0, 1):  # the holder resumes first, while the other is still in the queue
        requests.tasks[number].cancel()
    await turns()
    assert requests.tasks[0].cancelled() and requests.tasks[1].cancelled()
    assert requests.entered == [0, 2]
    await requests.finish_all()
    assert requests.counts == (0, 0)


async def test_a_failed_request_returns_its_permit() -> None:
    admission = Admission(Limits(1, 0))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with admission.enter():
                raise ZeroDivisionError
    assert admission.running == 0


@pytest.mark.parametrize(
    ("services_s", "max_running", "max_queued", "delay_s"),
    [
        ([2.0] * 3, 1, 0, 2.0),
        ([2.0] * 3, 4, 7, 4.0),
        ([1e-6] * 3, 4, 7, 0.1),
        ([1e6] * 3, 4, 7, 30.0),
        ([], 1, 2, 3.0),  # nothing is measured yet: a second each
        ([10.0, *[1.0] * 60], 1, 0, 1.0016),  # the latest requests count most
    ],
)
async def test_the_delay_of_a_refusal_is_the_expected_wait(
    services_s: list[float], max_running: int, max_queued: int, delay_s: float
) -> None:
    """Guards against a delay of 0 (a retry storm), without a bound, or of another queue length."""
    requests = Requests(max_running, max_queued)
    for service_s in services_s:
        async with requests.admission.enter():
            requests.clock.now_s += service_s
    await requests.arrive(max_running + max_queued)
    assert (await requests.refused()).retry_after_s == pytest.approx(delay_s, rel=1e-3)
    await requests.finish_all()


async def test_tenants_share_by_candidate_tokens_in_the_order_of_arrival() -> None:
    """Guards one request of a tenant against many of another, and small against large ones."""
    requests = Requests(1, 100)
    await requests.arrive(tenant="one", tokens=1)
    await requests.arrive(4, tenant="many", tokens=10)  # 1 .. 4
    await requests.arrive(2, tenant="few", tokens=10)  # 5, 6
    await requests.arrive(2, tenant="small", tokens=5)  # 7, 8
    await requests.finish_all()
    assert requests.entered == [0, 1, 5, 7, 8, 2, 6, 3, 4]


async def test_a_tenant_gets_no_credit_for_its_absence() -> None:
    """Guards a tenant that was served for long against another's burst: they share from now."""
    requests = Requests(1, 100)
    await requests.arrive(5, tenant="old", tokens=10)
    for number in range(3):
        requests.finish(number)
        await turns()
    await requests.arrive(3, tenant="new", tokens=10)
    await requests.finish_all()
    assert requests.entered == [0, 1, 2, 3, 5, 4, 6, 7]


async def test_a_tenant_of_consecutive_large_requests_is_not_served_first() -> None:
    """Guards waiting small requests against large ones, each sent as soon as the one before has
    ended: they took every second turn, and nearly all the tokens."""
    requests = Requests(1, 100)
    tenants = ["large", *["small"] * 6]
    await requests.arrive(tenant="large", tokens=1000)
    await requests.arrive(6, tenant="small", tokens=10)
    for _ in range(7):
        latest = requests.entered[-1]
        requests.finish(latest)
        await turns()
        if tenants[latest] == "large":
            tenants.append("large")
            await requests.arrive(tenant="large", tokens=1000)
    assert [tenants[number] for number in requests.entered] == ["large", *["small"] * 6, "large"]
    await requests.finish_all()


async def test_tenants_without_requests_are_dropped() -> None:
    """Guards against memory that grows with every tenant while requests run all the time."""
    admission = Admission(Limits(2, 0))
    async with admission.enter("always here"):
        for number in range(50):
            async with admission.enter(f"tenant {number}", 1000):
                pass
        assert list(admission._tenants) == ["always here"]


async def test_waiting_candidate_tokens_are_limited() -> None:
    """The first request in the queue may be of any size."""
    requests = Requests(1, 10, max_queued_tokens=100)
    await requests.arrive(2, tokens=1000)
    assert "1000 candidate-tokens wait" in (await requests.refused(tokens=1)).message
    await requests.finish_all()
    async with requests.admission.enter(tokens=1):
        assert requests.counts == (1, 0)


async def test_candidate_tokens_of_a_tenant_are_limited() -> None:
    """Guards the other tenants, and the tenant itself against a limit that never ends."""
    requests = Requests(10, 10, tenant_tokens=100)
    admission = requests.admission
    await requests.arrive(tenant="a", tokens=80)
    await requests.arrive(tenant="b", tokens=1000)  # a single request may exceed the limit
    refusal = await requests.refused(tenant="a", tokens=21)
    assert "80 candidate-tokens of 100 are under way" in refusal.message
    async with admission.enter("a", 20), admission.enter("c", 100):
        assert admission.running == 4
    await requests.finish_all()
    async with admission.enter("a", 100):
        assert admission.running == 1


async def test_a_request_with_less_time_than_the_wait_is_refused_at_once() -> None:
    """Guards against places in the queue for requests that would time out there."""
    requests = Requests(1, 10)
    async with requests.admission.enter(tokens=10):
        requests.clock.now_s += 10.0
    await requests.arrive(tokens=10)
    refusal = await requests.refused(tokens=5, time_left_s=4.0)
    assert isinstance(refusal, TooLate) and "the deadline is in 4" in refusal.message
    assert refusal.retry_after_s == pytest.approx(5.0)
    await requests.arrive(tokens=5, time_left_s=6.0)
    assert requests.admission.queued == 1
    assert await requests.finish_all() == [None, None]


_ACTIONS = st.sampled_from(["start", "finish", "cancel", "turn"])


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(1, 3),
    queue=st.integers(0, 3),
    script=st.lists(st.tuples(_ACTIONS, st.integers(0, 9)), max_size=60),
)
async def test_permits_are_conserved(limit: int, queue: int, script: list[tuple[str, int]]) -> None:
    """Under any order of arrivals, cancels and ends: never more requests run than there are
    permits, no permit is free while a request waits, and all are back at the end."""
    requests = Requests(limit, queue)
    admission = requests.admission
    for action, number in script:
        if action == "start":
            requests.start(f"tenant {number % 3}", 1 + number)
        elif action == "turn":
            await turns(number)
        elif requests.tasks and action == "finish":
            requests.finish(number % len(requests.tasks))
        elif requests.tasks:
            requests.tasks[number % len(requests.tasks)].cancel()
        assert admission.running <= limit and admission.queued <= queue
        assert not admission.queued or admission.running == limit
    await turns()
    assert requests.running == admission.running
    outcomes = await requests.finish_all()
    allowed = (Overloaded, asyncio.CancelledError)
    assert all(outcome is None or isinstance(outcome, allowed) for outcome in outcomes)
    assert requests.most_running <= limit
    assert (*requests.counts, requests.running) == (0, 0, 0)
    assert not admission._tenants and not admission.queued_tokens
