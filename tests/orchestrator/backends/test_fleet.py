"""Who is there, who serves, and who is of the version that counts."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from dataclasses import replace

import grpc.aio
import pytest

from orchestrator.backends.fleet import Backend, Fleet
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Target
from orchestrator.remote import RemoteGenerator
from specrej.channel import open_channel
from specrej.contracts import GeneratorDescription, Sampling
from specrej.errors import Unavailable
from tests.orchestrator.backends.fleets import (
    ONCE,
    PROMPT,
    QUICK,
    Known,
    backends,
    generators,
    num_serving,
    target_of,
)
from tests.orchestrator.services import Gate, HeldGenerator, MuteGenerator
from tests.serving import until


class _Version(HeldGenerator):
    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint

    async def describe(self) -> GeneratorDescription:
        return replace(await super().describe(), fingerprint=self.fingerprint)


def counted(fleet: Fleet[RemoteGenerator]) -> tuple[int, ...]:
    """Serving, of another version, away."""
    return tuple(fleet.counts().values())


async def test_backends_appear_and_go() -> None:
    one, two = HeldGenerator(), HeldGenerator()
    async with backends(one, two) as servers:
        known = Known(servers[:1])
        async with generators(known, QUICK) as fleet:
            known.targets |= {target_of(servers[1])}
            await until(lambda: counted(fleet) == (2, 0, 0))
            await servers[0].kill()
            await until(lambda: counted(fleet) == (1, 0, 1))
            known.targets -= {target_of(servers[0])}
            await until(lambda: counted(fleet) == (1, 0, 0))


async def test_one_that_came_back_is_used_again() -> None:
    one = HeldGenerator()
    async with backends(one) as servers, generators(Known(servers), QUICK) as fleet:
        await servers[0].kill()
        await until(lambda: counted(fleet) == (0, 0, 1))
        await servers[0].start()
        await until(lambda: counted(fleet) == (1, 0, 0))


async def test_whoever_has_a_session_is_kept_though_its_name_is_gone() -> None:
    """Guards against a pod that is taken out of the Service and cut off in the middle of a request.

    It serves on until its sessions are over; only then does it stop to serve.
    """
    one = HeldGenerator()
    async with backends(one) as servers:
        known = Known(servers)
        async with generators(known, QUICK) as fleet:
            opening = FleetGenerator(fleet).open(PROMPT, 2, Sampling(max_tokens=8), 4)
            async with opening as session:
                known.targets = frozenset()
                fleet.members()[0].suspect(Unavailable("it drains"))
                assert (await session.extend(4)).num_tokens == 4
                assert sum(fleet.counts().values()) == 1
            await servers[0].kill()
            await until(lambda: sum(fleet.counts().values()) == 0)


async def test_most_are_of_the_version_that_counts() -> None:
    """An answer, and its place in the cache, is of one version; so is a request in parts."""
    old, new = [_Version("old"), _Version("old")], [_Version("new"), _Version("new")]
    async with backends(*old, *new) as servers:
        known = Known(servers[:3])
        async with generators(known, QUICK) as fleet:
            generator = FleetGenerator(fleet)
            assert len(fleet.members()) == 2
            assert (await generator.describe()).fingerprint == "old"
            known.targets |= {target_of(servers[3])}
            await until(lambda: counted(fleet) == (2, 2, 0))
            # As many of one as of the other: nothing changes.
            assert (await generator.describe()).fingerprint == "old"
            await servers[0].kill()
            await until(lambda: counted(fleet) == (2, 1, 1))
            assert (await generator.describe()).fingerprint == "new"
            async with generator.open(PROMPT, 2, Sampling(max_tokens=8), 4):
                assert sum(each.toy.ledger.num_sessions for each in new) == 1


@pytest.mark.parametrize("comes_back", [False, True], ids=["gone", "back with another model"])
async def test_no_session_goes_on_with_another_model(comes_back: bool) -> None:
    """Guards against an answer that is begun by one version and ended by another, even by a
    generator that is lost, and back with that before it is missed."""
    one, two = _Version("old"), _Version("new")
    opening = (PROMPT, 2, Sampling(max_tokens=8), 4)
    async with backends(one, two) as servers:
        known = Known(servers[:1])
        async with (
            generators(known, QUICK) as fleet,
            FleetGenerator(fleet).open(*opening) as session,
        ):
            known.targets |= {target_of(servers[1])}
            await until(lambda: counted(fleet) == (1, 1, 0))
            await servers[0].kill()
            if comes_back:
                one.fingerprint = "new"
                await servers[0].start()
            await until(lambda: counted(fleet) == ((2, 0, 0) if comes_back else (1, 0, 1)))
            with pytest.raises(Unavailable):
                await session.extend(4)
        assert two.num_opened == 0


async def test_whoever_is_gone_before_it_answers_is_not_waited_for() -> None:
    """Guards against a service that never begins, for an address that was stale when it began."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        known = Known()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        known.targets = frozenset({Target(address, "127.0.0.1")})
        async with generators(known, replace(QUICK, lost_s=60), serving=0) as fleet:
            await until(lambda: counted(fleet) == (0, 0, 1))
            surveyed = asyncio.ensure_future(fleet.surveyed())
            known.targets = frozenset()
            await until(surveyed.done)


async def test_one_that_cannot_be_connected_to_does_not_end_the_search() -> None:
    """A certificate that is not there yet, while it is replaced, is no reason to stop."""
    failures = 0

    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteGenerator]:
        nonlocal failures
        if not failures:
            failures += 1
            raise OSError("no such file")
        channel = open_channel(target.address, retries=False)
        return channel, RemoteGenerator(channel)

    async with (
        backends(HeldGenerator()) as servers,
        Fleet("generator", Known(servers), connect, lambda told: told.fingerprint, QUICK) as fleet,
    ):
        await until(lambda: num_serving(fleet) == 1)


async def test_who_looks_and_leaves_leaves_nobody_behind() -> None:
    """Guards against a task for every caller who gave up, for as long as a backend is silent."""
    one = MuteGenerator()
    async with backends(one) as servers, generators(Known(servers), ONCE) as fleet:
        await until(lambda: not one.hearing.held)
        num_tasks = len(asyncio.all_tasks())
        one.hearing.shut()
        looking = asyncio.ensure_future(fleet.refreshed())
        await until(lambda: one.hearing.held == 1)
        num_asked = len(asyncio.all_tasks()) - num_tasks
        looking.cancel()
        await asyncio.wait({looking})
        await _turns()
        assert num_asked > 2  # its own, who looks for it, and the server's
        # The server's may take a moment more: it hears of it over the network.
        assert len(asyncio.all_tasks()) - num_tasks <= num_asked - 2
        one.hearing.open()


async def _turns() -> None:
    """Everybody who can do something now has had ten turns."""
    for _ in range(10):
        await asyncio.sleep(0)


class _Peer:
    """What a backend is asked through, with a gate in it."""

    def __init__(self) -> None:
        self.gate = Gate()

    async def describe(self) -> str:
        await self.gate.passed()
        return "told"


async def test_who_came_while_it_described_itself_still_counts() -> None:
    """Guards against two sessions at one place, for the load that was told was of before."""
    async with backends(HeldGenerator()) as servers:
        peer = _Peer()
        backend = _backend(target_of(servers[0]), peer)
        peer.gate.shut()
        looking = asyncio.ensure_future(backend.look())
        await until(lambda: peer.gate.held == 1)
        async with backend.holding(nullcontext()):
            peer.gate.open()
            await looking
            assert backend.placed == 1
            await backend.look()
            assert backend.placed == 0
        await backend.close()


async def test_a_backend_that_is_closed_is_unavailable() -> None:
    """Whoever has it on a list still goes on to the next one."""
    async with backends(HeldGenerator()) as servers:
        backend = _backend(target_of(servers[0]), _Peer())
        await backend.close()
        with pytest.raises(Unavailable):
            async with backend.holding(nullcontext()):
                pass
        assert backend.running == 0


async def test_who_takes_long_to_leave_can_be_told_twice() -> None:
    async with backends(HeldGenerator()) as servers:
        backend = _backend(target_of(servers[0]), _Peer())
        leaving, gone = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            async with backend.answering():
                try:
                    await asyncio.Event().wait()
                finally:
                    leaving.set()
                    await gone.wait()

        waiting = asyncio.ensure_future(wait())
        await _turns()
        await backend.close()
        await leaving.wait()
        await backend.close()
        gone.set()
        with pytest.raises(Unavailable):
            await waiting


def _backend(target: Target, peer: _Peer) -> Backend[_Peer]:
    return Backend(target, open_channel(target.address, retries=False), peer, str)
