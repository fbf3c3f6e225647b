"""Fairness of admission between tenants, in the order of arrival and in any window."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.cache import tenant_digest
from orchestrator.edge.admission import MOST_PASSED
from orchestrator.observe import instruments
from specrej.security import Share
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observe
from specrej.telemetry.names import Metric
from tests.orchestrator.held_requests import Requests
from tests.serving import turns


async def test_tenants_share_by_candidate_tokens_in_the_order_of_arrival() -> None:
    """Guards one request of a tenant against many of another, and small against large ones."""
    requests = Requests(1, 100)
    await requests.arrive(tenant="one", tokens=1)
    await requests.arrive(4, tenant="many", tokens=10)  # 1 .. 4
    await requests.arrive(2, tenant="few", tokens=10)  # 5, 6
    await requests.arrive(2, tenant="small", tokens=5)  # 7, 8
    await requests.finish_all()
    assert requests.entered == [0, 1, 5, 7, 8, 2, 6, 3, 4]


async def test_tokens_that_were_not_used_are_given_back() -> None:
    """Guards a tenant whose requests end early: it waited as if each had used all of its tokens."""
    requests = Requests(1, 20)
    requests.unused["a"] = 90
    await requests.arrive(tenant="a", tokens=100)
    for tenant in "aaaabbbb":
        await requests.arrive(tenant=tenant, tokens=100 if tenant == "a" else 50)
    for _ in range(8):
        await requests.next()
    order = "".join("a" if number < 5 else "b" for number in requests.entered)
    await requests.finish_all()
    assert order == "aabaaabbb", "10 tokens of a are less than 50 of b"


async def test_a_tenant_of_consecutive_large_requests_is_not_served_first() -> None:
    """Guards waiting small requests against large ones, each sent as soon as the one before has
    ended: they took every second turn, and nearly all the tokens. The first is not charged."""
    requests = Requests(1, 100)
    tenants = ["large", *["small"] * 6]
    await requests.arrive(tenant="large", tokens=1000)
    await requests.arrive(6, tenant="small", tokens=10)
    for _ in range(8):
        latest = requests.entered[-1]
        await requests.end(latest)
        if tenants[latest] == "large":
            tenants.append("large")
            await requests.arrive(tenant="large", tokens=1000)
    order = [tenants[number] for number in requests.entered]
    assert order == ["large", "small", "large", *["small"] * 5, "large"]
    await requests.finish_all()


@pytest.mark.parametrize("way", ["served at once", "served in turn", "refused", "cancelled"])
async def test_the_state_of_tenants_that_left_is_dropped(way: str) -> None:
    """Guards against memory that grows with every tenant while requests run and wait all the
    time."""
    requests = Requests(2 if way == "served at once" else 1, 0 if way == "refused" else 10)
    await requests.arrive(tenant="always here")
    for number in range(1000):
        tenant = f"tenant {number}"
        if way == "refused":
            await requests.refused(tenant=tenant, tokens=1000)
            continue
        requests.start(tenant, 1 + 100 * (number % 7))
        if way == "served in turn":
            requests.start("always waits", 100)
        await turns(2)
        if way == "cancelled":
            requests.tasks[-1].cancel()
        elif way == "served at once":
            requests.finish(number + 1)
        else:
            await requests.next()
            await requests.next()
        await turns(2)
        admission = requests.admission
        assert len(admission._tenants) < 200
    await requests.finish_all()


async def test_at_most_twelve_newcomers_pass_a_waiting_tenant() -> None:
    """Guards a tenant that was served against a new tenant per turn: virtual time stands still
    while they are served, so the tenant would wait for ever."""
    requests = Requests(1, 100)
    await requests.arrive(tenant="first")
    await requests.arrive(2, tenant="old", tokens=10)  # 1, 2
    assert await requests.next() == 1
    turns_taken = []
    for number in range(13):
        await requests.arrive(tenant=f"new {number}", tokens=10)
        turns_taken.append(await requests.next() == 2)
    assert turns_taken == [*[False] * 12, True]
    await requests.finish_all()


_SIZES = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=2, max_size=5)
_ONE_SIZE = st.builds(lambda count, size: [[size]] * count, st.integers(2, 5), st.integers(1, 20))
_EVENTS = st.lists(st.sampled_from(["turn", "turn", "guest", "cancel"]), min_size=20, max_size=60)


@given(
    sizes=_ONE_SIZE | _SIZES,
    weights=st.just([1.0] * 5) | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=5, max_size=5),
    max_running=st.integers(1, 3),
    events=_EVENTS,
)
async def test_tenants_that_wait_have_their_shares_in_any_window(
    sizes: list[list[int]], weights: list[float], max_running: int, events: list[str]
) -> None:
    """Of k tenants that always wait, each gets 1/k of the candidate-tokens, up to a request: two
    differ by at most one request of each (Goyal's theorem 1), and by one if all are equal.
    Meanwhile other tenants come and go, and waiting requests are cancelled; no more tenants than
    may pass a waiting one, since the rule that bounds them shifts the shares by a request."""
    assume(events.count("guest") < MOST_PASSED)  # then a tenant is served whatever its share is
    requests, owners = Requests(max_running, 1000), []  # the owner and the size of each request

    async def arrive(owner: int, tokens: int) -> None:
        owners.append((owner, tokens))
        share = Share(weights[owner] if owner < len(sizes) else 1.0)
        await requests.arrive(tenant=str(owner), tokens=tokens, share=share)

    for number in range(max_running):
        await arrive(100 + number, 1)
    for number in range(40):
        for owner, own in enumerate(sizes):
            await arrive(owner, own[number % len(own)])
    tenants = [requests.admission._tenants[str(owner)] for owner in range(len(sizes))]
    for number, event in enumerate(events):
        if not all(tenant.line for tenant in tenants):
            break
        if event == "guest" and events[:number].count("guest") < MOST_PASSED:
            await arrive(200 + number, 7)
        elif event == "cancel":
            requests.tasks[-1 - number].cancel()
        else:
            await requests.next()
    order = [owners[number] for number in requests.entered][max_running:]
    _check_shares([served for served in order if served[0] < len(sizes)], sizes, weights)
    for task in requests.tasks:
        task.cancel()
    await asyncio.wait(requests.tasks)


def _check_shares(
    order: list[tuple[int, int]], sizes: list[list[int]], weights: list[float]
) -> None:
    """In every window of requests, as (tenant, tokens), tenants differ by the allowed at most."""
    largest = [max(own) / weight for own, weight in zip(sizes, weights, strict=False)]
    is_equal = len({tuple(own) for own in sizes}) == len({*largest}) == len(sizes[0]) == 1
    for first in range(len(order)):
        served = [0.0] * len(sizes)
        for owner, tokens in order[first:]:
            served[owner] += tokens / weights[owner]
            for one in range(len(sizes)):
                for other in range(one):
                    allowed = largest[one] + (0 if is_equal else largest[other])
                    assert abs(served[one] - served[other]) <= allowed + 1e-6


async def test_a_metric_has_the_digests_of_the_heaviest_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards a metric's number of values, and tenants that have left against being in it."""
    observed: dict[Metric, Observe] = {}
    monkeypatch.setattr(metrics, "observe", observed.__setitem__)
    monkeypatch.setattr(instruments, "_MAX_TENANTS", 3)
    requests = Requests(2, 100)
    instruments.observe_admission(requests.admission)

    def check_shown(**tokens: int) -> None:
        expected = [(number, {"tenant": tenant_digest(name)}) for name, number in tokens.items()]
        assert [*observed[names.TENANT_TOKENS]()] == expected

    for number, name in enumerate("abcd"):
        await requests.arrive(tenant=name, tokens=10 * (number + 1))
    check_shown(d=40, c=30, b=20)
    await requests.end(1)
    check_shown(d=40, c=30, a=10)
    await requests.finish_all()
    check_shown()
