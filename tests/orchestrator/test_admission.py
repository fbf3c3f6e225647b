"""Admission: exact limits, fairness between tenants, and no lost permits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.edge.admission import MOST_PASSED
from specrej.contracts.errors import Overloaded, TooLate
from tests.orchestrator.held_requests import Requests
from tests.serving import turns, until


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


async def test_a_tenant_cannot_take_the_places_of_another() -> None:
    """Guards a newcomer against a full queue: the longest line loses its last request, until the
    tenants that wait have equal parts."""
    requests = Requests(1, 6)
    await requests.arrive(2, tenant="few")  # 0 runs, 1 waits
    await requests.arrive(6, tenant="many")  # 2 to 6 wait, 7 is refused
    await requests.arrive(3, tenant="few")  # 8 and 9 wait in the places of 6 and 5, 10 is refused
    await requests.arrive(tenant="one")  # 11, in a place of "few", the first of equals
    assert requests.counts == (1, 6)
    await requests.refused(tenant="many")
    outcomes = await requests.finish_all()
    refused = [number for number, outcome in enumerate(outcomes) if outcome]
    assert refused == [5, 6, 7, 9, 10]
    assert all(isinstance(outcomes[number], Overloaded) for number in refused)
    assert requests.counts == (0, 0)


async def test_a_tenant_with_nothing_running_need_not_wait() -> None:
    """Guards a tenant's first request against all of another's, the limit against a tenant that
    asks at once for more, and tenants that wait against new ones without an end."""
    requests = Requests(8, 100)
    async with requests.admission.enter(tokens=10):
        requests.clock.now_s += 10.0
    await requests.arrive(30, tenant="many", tokens=10)
    await requests.arrive(tenant="one", tokens=10, time_left_s=1.0)  # 30
    await requests.arrive(2, tenant="one", tokens=10)
    assert requests.entered == [*range(8), 30]
    await requests.end(30)
    assert requests.entered[9:] == [31]
    await requests.end(31, 0)  # it had two more than the others: its next one waits
    assert requests.entered[10:] == [8] and requests.counts == (8, 22)
    await requests.end(1)
    assert requests.entered[11:] == [9, 32] and requests.counts == (9, 20)
    for number in range(33, 33 + MOST_PASSED + 3):
        await requests.arrive(tenant=f"new {number}", tokens=10)
        await requests.end(number)
    assert requests.entered[13:] == [*range(33, 33 + MOST_PASSED)]
    await requests.finish_all()


async def test_the_expected_wait_follows_the_fair_order() -> None:
    """Guards a newcomer against a refusal because of the requests of others behind it, and their
    tenant against a place that it will not get in time."""
    requests = Requests(1, 100)
    async with requests.admission.enter(tokens=10):
        requests.clock.now_s += 10.0
    await requests.arrive(6, tenant="many", tokens=10)
    await requests.arrive(tenant="one", tokens=10, time_left_s=25.0)  # behind the first that waits
    refusal = await requests.refused(tenant="many", tokens=10, time_left_s=25.0)
    assert isinstance(refusal, TooLate) and refusal.retry_after_s == pytest.approx(30.0)
    assert "the wait is about 70" in refusal.message
    assert requests.admission.queued == 6
    assert await requests.finish_all() == [None] * 7


async def test_the_expected_wait_is_that_of_the_tenants_ahead() -> None:
    """Guards against refusals for the slow requests of a tenant that is behind, or not here."""
    requests = Requests(1, 100)
    for tenant, seconds in (("quick", 1.0), ("slow", 100.0), ("quick", 1.0)):
        async with requests.admission.enter(tenant, tokens=10):
            requests.clock.now_s += seconds
    await requests.arrive(tenant="quick", tokens=10)
    await requests.arrive(3, tenant="quick", tokens=10, time_left_s=40.0)
    refusal = await requests.refused(tenant="quick", tokens=10, time_left_s=30.0)
    running_s = 10 * (1 + 0.9 * (100 + 0.9)) / (10 * (1 + 0.9 + 0.81))  # of all tenants
    assert refusal.retry_after_s == pytest.approx(min(30.0, running_s + 3), rel=1e-3)
    await requests.finish_all()


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
    refusal = await requests.refused(tokens=5, time_left_s=9.0)
    assert isinstance(refusal, TooLate) and "the deadline is in 9" in refusal.message
    assert refusal.retry_after_s == pytest.approx(10.0)
    # Its own size is no part of the wait.
    await requests.arrive(tokens=1000, time_left_s=11.0)
    assert requests.admission.queued == 1
    assert await requests.finish_all() == [None, None]


_ACTIONS = st.sampled_from(["start", "start", "turn", "finish", "cancel"])


@given(
    limit=st.integers(1, 5),
    queue=st.sampled_from([0, 1, 2, 3, 1000]),
    script=st.lists(st.tuples(_ACTIONS, st.integers(0, 9)), min_size=20, max_size=60),
)
async def test_permits_are_conserved(limit: int, queue: int, script: list[tuple[str, int]]) -> None:
    """Under any order of arrivals, cancels and ends: never more requests run than there are
    permits, those beyond the limit are of tenants with one, no request waits beside a permit within
    the limit, and all are back at the end."""
    requests = Requests(limit, queue)
    admission = requests.admission
    for action, number in script:
        if action == "start":
            requests.start(f"tenant {number % 4}", 10 ** (number % 3))
        elif action == "turn":
            await turns(number)
        elif requests.tasks and action == "finish":
            requests.finish(number % len(requests.tasks))
        elif requests.tasks:
            requests.tasks[number % len(requests.tasks)].cancel()
        assert admission.running <= limit + limit // 4 and admission.queued <= queue
        assert admission.running >= limit or not admission.queued
        num_alone = [one.running for one in admission._tenants.values()].count(1)
        assert admission.running - limit <= num_alone
    await turns()
    assert requests.running == admission.running
    outcomes = await requests.finish_all()
    allowed = (Overloaded, asyncio.CancelledError)
    assert all(outcome is None or isinstance(outcome, allowed) for outcome in outcomes)
    assert requests.most_running <= limit + limit // 4
    assert (*requests.counts, requests.running) == (0, 0, 0)
    assert not admission.queued_tokens and not admission.heaviest(9)
