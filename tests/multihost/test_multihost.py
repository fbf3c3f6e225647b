"""Three nodes with real links between them: a bad network fails no request.

Every test sends requests with the published retry policy, and none may fail. The answers equal
those of a good network, because they do not depend on where candidates are generated.

`make test` has the slow network alone. Lost and silent backends are tested in one process, too:
orchestrator/backends/test_generators.py, test_remote_failures.py, test_fleet.py, test_placement.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product

import grpc.aio
import pytest
import pytest_asyncio

from specrej.contracts import Generation
from tests.multihost.cluster import LOST_S, NODES, SEATS, Cluster, cluster, set_names
from tests.multihost.nodes import US, missing, network
from tests.multihost.switch import Line
from tests.serving import until

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

SEEDS = range(8)
# Two seconds of steps: long enough for a fault in the middle.
LONG = {"n": 8, "max_tokens": 400}

Texts = list[tuple[str, ...]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running() -> AsyncIterator[Cluster]:
    """One cluster for all tests."""
    if reason := missing():
        pytest.skip(reason)
    with network(*NODES) as nodes:
        async with cluster(nodes) as one:
            yield one


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(running: Cluster) -> Texts:
    """The answers of a good network."""
    return _texts(await _answers(running))


@pytest.mark.long
async def test_every_backend_is_used(running: Cluster) -> None:
    """Guards against a backend that receives all requests, and one that receives none."""
    for kind in SEATS:
        for name in SEATS[kind]:
            await _is_used(running, kind, name)
    await running.settle()


@pytest.mark.long
@pytest.mark.parametrize(
    "links",
    [
        (("a", "c"), ("b", "c")),  # clients still reach c
        (("a", "c"),),  # the orchestrators must not have to agree on the live backends
        # A client of a silent orchestrator detects it after at most 40 s, by its own keepalive.
        *(tuple((n, o) for o in (US, *NODES) if o != n) for n in NODES),
    ],
)
async def test_cut_links_fail_no_request(
    running: Cluster, expected: Texts, links: Sequence[tuple[str, str]]
) -> None:
    """Guards against requests that fail with a backend, an orchestrator or Redis, and a service
    that stays lost."""
    moved = await running.moved()
    async with _under_way(running) as pending:
        running.switch.part(*links)
        assert _texts(await pending) == expected
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    if {("a", "c"), ("b", "c")} <= set(links):
        assert await running.moved() > moved
    for kind in SEATS:
        for node in SEATS[kind]:
            await _is_used(running, kind, node)
    await running.settle()


@pytest.mark.parametrize(
    "line",
    [
        Line(delay_s=0.02, loss=0.01),
        pytest.param(Line(delay_s=0.05, loss=0.05), marks=pytest.mark.long),
    ],
)
async def test_a_slow_and_lossy_network_fails_no_request(
    running: Cluster, expected: Texts, line: Line
) -> None:
    """Guards against deadlines, polls and leases that treat a bad line as a dead peer."""
    running.switch.spoil(**dict.fromkeys(NODES, line))
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    await running.settle()


@pytest.mark.long
async def test_isolated_orchestrators_fail_requests(running: Cluster) -> None:
    """Guards against links that are not really cut, with which the other tests cannot fail."""
    running.switch.part(*product(SEATS["orchestrator"], (US, *NODES)))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await running.generate(0, timeout_s=1)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    running.switch.heal()
    await running.generate(0)
    await running.settle()


@pytest.mark.long
async def test_a_generator_that_appears_is_used(running: Cluster) -> None:
    """Guards against names that are resolved only once: a cluster adds backends in this way."""
    set_names(running.nodes, generators=("a",))
    await running.restart("generator", "c")
    await _answers(running)
    assert (await running.calls("generator"))["c"] == 0
    set_names(running.nodes)
    await _is_used(running, "generator", "c")
    await running.settle()


@pytest.mark.long
async def test_a_node_that_comes_and_goes_fails_no_request(
    running: Cluster, expected: Texts
) -> None:
    """Guards against a backend that counts as live after one answer, or stays lost."""
    async with _under_way(running) as pending:
        for _ in range(4):
            running.switch.part(("a", "c"), ("b", "c"))
            await asyncio.sleep(LOST_S / 2)  # the network itself is what this waits for
            running.switch.heal()
            await asyncio.sleep(LOST_S / 2)
        assert _texts(await pending) == expected
    await running.settle()


@pytest.mark.long
async def test_a_rolling_restart_fails_no_request(running: Cluster, expected: Texts) -> None:
    """Guards against an upgrade that fails requests; restarts every service in turn."""
    for kind, seats in SEATS.items():
        for name in seats:
            restarting = asyncio.ensure_future(running.restart(kind, name))
            while not restarting.done():
                assert _texts(await _answers(running)) == expected, (kind, name)
            await restarting
            await _is_used(running, kind, name)
    await running.settle()


async def _answers(running: Cluster) -> list[Generation]:
    return await asyncio.gather(*(running.generate(seed, **LONG) for seed in SEEDS))


def _texts(answers: Sequence[Generation]) -> Texts:
    """Return the texts of all candidates; a degraded answer becomes "degraded"."""
    return [
        ("degraded",) if answer.degraded else tuple(c.text for c in answer.candidates)
        for answer in answers
    ]


@asynccontextmanager
async def _under_way(running: Cluster) -> AsyncIterator[asyncio.Future[list[Generation]]]:
    """Requests in progress, some at each backend; placement is random, so it may take several."""
    for _ in range(20):
        before = await _calls(running)
        pending = asyncio.ensure_future(_answers(running))
        try:
            while not pending.done():
                now = await _calls(running)
                if all(now[backend] > before[backend] for backend in before):
                    yield pending
                    return
        finally:
            pending.cancel()
    raise AssertionError("of 20 times 8 requests, none was placed at one of the backends")


async def _calls(running: Cluster) -> dict[tuple[str, str], float]:
    """Calls so far by kind and node."""
    kinds = ("generator", "reward")
    return {(kind, n): calls for kind in kinds for n, calls in (await running.calls(kind)).items()}


async def _is_used(running: Cluster, kind: str, node: str) -> None:
    """Send requests until the node has received one; placement is random."""
    before = (await running.calls(kind))[node]

    async def has_more() -> bool:
        await asyncio.gather(*(running.generate(seed, max_tokens=16) for seed in SEEDS))
        return (await running.calls(kind))[node] > before

    await until(has_more, bound_s=90)
