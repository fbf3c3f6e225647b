"""Three nodes with real links between them: what a bad network may do to no request.

Every test sends requests as a client with the published retry policy does, and none may fail. The
answers are those of a good network, since where candidates are made does not change them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import pytest_asyncio

from specrej.contracts import Generation
from tests.faults.world import until
from tests.multihost.cluster import Cluster
from tests.multihost.programs import LOST_S, NODES, SEATS, tell_names
from tests.multihost.switch import Line

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

slow = pytest.mark.skipif(
    os.environ.get("SPECREJ_MULTIHOST") != "all", reason="takes minutes: make multihost runs it"
)
SEEDS = range(8)
# Two seconds of steps: long enough for something to happen in the middle.
LONG = {"n": 8, "max_tokens": 400}

Texts = list[tuple[str, ...]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def expected(running: Cluster) -> Texts:
    """What a good network answers."""
    return _texts(await _answers(running))


async def test_every_backend_is_used(running: Cluster) -> None:
    """Guards against one backend that does all, and one that nobody finds."""
    for kind in SEATS:
        for name in SEATS[kind]:
            await _is_used(running, kind, name)
    await running.settle()


async def test_a_cut_link_fails_no_request(running: Cluster, expected: Texts) -> None:
    """Guards against requests that are lost with a backend, and a backend that stays lost."""
    moved = await running.moved()
    async with _under_way(running) as pending:
        running.switch.part(("a", "c"), ("b", "c"))  # clients alone still reach c
        assert _texts(await pending) == expected
    assert await running.moved() > moved
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    await _is_used(running, "generator", "c")
    await _is_used(running, "reward", "c")
    await running.settle()


async def test_a_slow_and_lossy_network_fails_no_request(running: Cluster, expected: Texts) -> None:
    """Guards against deadlines, polls and leases that take a bad line for a dead peer."""
    running.switch.spoil(**{name: Line(delay_s=0.02, loss=0.01) for name in NODES})
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    await running.settle()


async def test_a_cut_that_nobody_survives_is_seen(running: Cluster) -> None:
    """Guards against links that are cut in name only: the other tests would pass for nothing."""
    running.switch.isolate(*SEATS["orchestrator"])
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await running.ask(0, timeout_s=1)
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    running.switch.heal()
    await running.ask(0)
    await running.settle()


@slow
async def test_a_link_that_one_orchestrator_lacks_fails_no_request(
    running: Cluster, expected: Texts
) -> None:
    """Guards against orchestrators that must agree on who is there."""
    async with _under_way(running) as pending:
        running.switch.part(("a", "c"))
        assert _texts(await pending) == expected
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    await running.settle()


@slow
async def test_a_generator_that_appears_is_used(running: Cluster) -> None:
    """Guards against names that are looked up once: this is how a cluster adds one."""
    tell_names(running.nodes, generators=("a",))
    await running.restart("generator", "c")
    await _answers(running)
    assert (await running.calls("generator"))["c"] == 0
    tell_names(running.nodes)
    await _is_used(running, "generator", "c")
    await running.settle()


@slow
@pytest.mark.parametrize("node", NODES)
async def test_a_node_that_is_gone_fails_no_request(
    running: Cluster, expected: Texts, node: str
) -> None:
    """Guards against whatever the loss of an orchestrator, or of Redis, does to its clients.

    Who waits at a silent orchestrator is told after at most 40 s, by the client's own keepalive.
    """
    async with _under_way(running) as pending:
        running.switch.isolate(node)
        assert _texts(await pending) == expected
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    for kind in SEATS:
        if node in SEATS[kind]:
            await _is_used(running, kind, node)
    await running.settle()


@slow
async def test_a_node_that_comes_and_goes_fails_no_request(
    running: Cluster, expected: Texts
) -> None:
    """Guards against a backend that is trusted as soon as it answers once, or never again."""
    async with _under_way(running) as pending:
        for _ in range(4):
            running.switch.part(("a", "c"), ("b", "c"))
            await asyncio.sleep(LOST_S / 2)  # the network itself is what this waits for
            running.switch.heal()
            await asyncio.sleep(LOST_S / 2)
        assert _texts(await pending) == expected
    await running.settle()


@slow
async def test_a_very_bad_network_fails_no_request(running: Cluster, expected: Texts) -> None:
    running.switch.spoil(**{name: Line(delay_s=0.05, loss=0.05) for name in NODES})
    assert _texts(await _answers(running)) == expected
    running.switch.heal()
    await running.settle()


@slow
async def test_a_rolling_restart_fails_no_request(running: Cluster, expected: Texts) -> None:
    """Guards against an upgrade that anybody notices; of every service, one after the other."""
    for kind, seats in SEATS.items():
        for name in seats:
            restarting = asyncio.ensure_future(running.restart(kind, name))
            while not restarting.done():
                assert _texts(await _answers(running)) == expected, (kind, name)
            await restarting
            await _is_used(running, kind, name)
    await running.settle()


async def _answers(running: Cluster) -> list[Generation]:
    return await asyncio.gather(*(running.ask(seed, **LONG) for seed in SEEDS))


def _texts(answers: Sequence[Generation]) -> Texts:
    """Degraded answers are none of those that were asked for."""
    return [
        ("degraded",) if each.degraded else tuple(one.text for one in each.candidates)
        for each in answers
    ]


@asynccontextmanager
async def _under_way(running: Cluster) -> AsyncIterator[asyncio.Future[list[Generation]]]:
    """Requests of which some are at each backend and have tokens."""
    before = [await running.calls(kind) for kind in ("generator", "reward")]
    pending = asyncio.ensure_future(_answers(running))

    async def are_everywhere() -> bool:
        now = [await running.calls(kind) for kind in ("generator", "reward")]
        pairs = zip(now, before, strict=True)
        return all(late[name] > early[name] for late, early in pairs for name in late)

    try:
        await until(are_everywhere, 30)
        yield pending
    finally:
        pending.cancel()


async def _is_used(running: Cluster, kind: str, node: str) -> None:
    """Once there is something to do, which goes to one of two by chance."""
    before = (await running.calls(kind))[node]

    async def has_more() -> bool:
        await asyncio.gather(*(running.ask(seed, max_tokens=16) for seed in SEEDS))
        return (await running.calls(kind))[node] > before

    await until(has_more, 30)
