"""Three nodes with real links between them: a bad network fails no request.

Every test sends requests with the published retry policy, and none may fail. The answers equal
those of a good network, because they do not depend on where candidates are generated.

`make multihost` runs it, as root, every night.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from specrej.contracts import Generation
from specrej.contracts.errors import DeadlineExceeded
from tests.multihost.cluster import NODES, SEATS, Cluster, cluster, set_names
from tests.multihost.nodes import missing, network
from tests.serving import until

pytestmark = [pytest.mark.faults, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]

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


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("part", ("a", "c")),  # the orchestrators must not have to agree on the live backends
        ("cut", ("c",)),
        # A client of a silent orchestrator detects it after at most 40 s, by its own keepalive.
        ("cut", ("b",)),
    ],
)
async def test_cut_links_fail_no_request(
    running: Cluster, expected: Texts, fault: str, names: tuple[str, ...]
) -> None:
    """Guards against requests that fail with a backend, an orchestrator or Redis, and a service
    that stays lost."""
    async with _under_way(running) as pending:
        getattr(running.network, fault)(*names)
        assert _texts(await pending) == expected
    assert _texts(await _answers(running)) == expected
    running.network.heal()
    await running.settle()
    for kind in SEATS:
        for node in SEATS[kind]:
            await _is_used(running, kind, node)


@pytest.mark.parametrize(("delay_ms", "loss_percent"), [(20, 1), (50, 5)])
async def test_a_slow_and_lossy_network_fails_no_request(
    running: Cluster, expected: Texts, delay_ms: int, loss_percent: int
) -> None:
    """Guards against deadlines, polls and leases that treat a bad line as a dead peer."""
    if not running.network.spoil(delay_ms, loss_percent):
        pytest.skip("the kernel has no netem")
    assert _texts(await _answers(running)) == expected
    running.network.heal()
    await running.settle()


async def test_isolated_orchestrators_fail_requests(running: Cluster) -> None:
    """Guards against links that are not really cut, with which the other tests cannot fail."""
    running.network.cut(*SEATS["orchestrator"])
    with pytest.raises(DeadlineExceeded):
        await running.generate(0, timeout_s=1)
    running.network.heal()
    await running.generate(0)
    await running.settle()


async def test_a_generator_that_appears_is_used(running: Cluster) -> None:
    """Guards against names that are resolved only once: a cluster adds backends in this way."""
    set_names(running.nodes, generators=("a",))
    await running.restart("generator", "c")
    await _answers(running)
    assert (await running.calls("generator"))["c"] == 0
    set_names(running.nodes)
    await _is_used(running, "generator", "c")
    await running.settle()


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
