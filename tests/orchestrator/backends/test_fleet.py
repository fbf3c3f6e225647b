"""Fleets: which backends are known, serve, and have the version in use."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Backend, Fleet, ranked
from orchestrator.backends.resolving import Resolver, Target
from specrej.contracts import Sampling, SessionSpec
from specrej.contracts.errors import Unavailable
from specrej.remote import RemoteGenerator
from tests.orchestrator.backends.fleets import (
    PATIENT,
    ListedTargets,
    connect_generator,
    generators,
    target_of,
)
from tests.orchestrator.runs import PROMPT
from tests.serving import turns, until
from tests.world import BOUND_S, HeldGenerator, generator_backend

SAMPLING = Sampling(max_tokens=8)


async def test_backends_follow_the_resolver_and_their_health() -> None:
    async with generators(HeldGenerator(), HeldGenerator(), num_listed=1) as running:
        first, second = running.servers
        running.resolver.targets |= {target_of(second)}
        await until(lambda: running.counts == (2, 0, 0))
        await first.kill()
        await until(lambda: running.counts == (1, 0, 1))
        await first.start()
        await until(lambda: running.counts == (2, 0, 0))
        await first.kill()
        await until(lambda: running.counts == (1, 0, 1))
        running.resolver.targets -= {target_of(first)}
        await until(lambda: running.counts == (1, 0, 0))


async def test_a_lost_backend_is_connected_to_anew() -> None:
    """Guards an orchestrator whose client certificate was renewed: a channel reads it once."""
    async with generators(HeldGenerator()) as running:
        (server,), (before,) = running.servers, running.fleet.members()
        await server.kill()
        await until(lambda: running.counts == (0, 0, 1))
        num_lookups = running.resolver.num_lookups
        await until(lambda: running.resolver.num_lookups > num_lookups + 1)
        await server.start()
        await until(lambda: running.counts == (1, 0, 0))
        assert running.fleet.members() != [before]


async def test_a_backend_with_a_session_stays_although_its_name_is_gone() -> None:
    """Guards against a request cut off because its pod was taken out of the Service."""
    settings = replace(PATIENT, report_s=60)
    async with generators(HeldGenerator(), settings=settings) as running:
        async with running.client.open(SessionSpec(PROMPT, 2, SAMPLING, 4)) as session:
            running.resolver.targets = frozenset()
            running.fleet.members()[0].suspect(Unavailable("draining"))
            num_lookups = running.resolver.num_lookups
            await until(lambda: running.resolver.num_lookups > num_lookups + 1)
            assert (await session.extend(4)).num_tokens == 4
            assert sum(running.counts) == 1
        await until(lambda: sum(running.counts) == 0)


async def test_a_new_version_receives_sessions_as_soon_as_it_serves() -> None:
    """Guards a rollout against new generators that are idle until they are the majority."""
    old, new = ([HeldGenerator(end_every=end) for _ in range(2)] for end in (30, 40))
    async with generators(*old, *new, num_listed=2) as running, AsyncExitStack() as stack:
        running.resolver.targets |= {target_of(running.servers[2])}
        await until(lambda: running.counts == (2, 1, 0))
        assert (await running.client.describe()).fingerprint == "toy-30"
        for _ in range(20):  # all pass it by with a chance of 1 in 2 ** 20
            opening = running.client.open(SessionSpec(PROMPT, 2, SAMPLING, 4))
            await stack.enter_async_context(opening)
        assert new[0].num_opened
        await running.servers[0].kill()
        running.resolver.targets |= {target_of(running.servers[3])}
        await until(lambda: running.counts == (2, 1, 1))
        assert (await running.client.describe()).fingerprint == "toy-40"


async def test_a_drain_is_noticed_at_once_and_waits_for_no_reports() -> None:
    """Guards requests that are sent to a server which ends, and a drain that takes all its time."""
    settings = replace(PATIENT, report_s=60)
    async with generators(HeldGenerator(), settings=settings) as running:
        server: Any = running.servers[0]._server
        async with running.client.open(SessionSpec(PROMPT, 2, SAMPLING, 4)) as session:
            server.set_serving(False)
            await until(lambda: running.counts == (0, 0, 1))
            assert (await session.extend(4)).num_tokens == 4
        server.set_serving(True)
        await asyncio.wait_for(server.stop(300), BOUND_S)


async def test_the_start_does_not_wait_for_removed_backends() -> None:
    """Guards against a service that never starts because an address was stale at its start."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        resolver = ListedTargets()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        resolver.targets = frozenset({Target(address, "127.0.0.1")})
        async with Fleet("generator", resolver.resolve, connect_generator, str, PATIENT) as fleet:
            await until(lambda: fleet.counts()["away"] == 1)
            heard = asyncio.ensure_future(fleet.wait_heard())
            resolver.targets = frozenset()
            await until(heard.done)


async def test_a_failed_connection_does_not_end_the_search() -> None:
    """A certificate may be absent for a moment while it is replaced."""
    failures = [OSError("no such file")]

    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteGenerator]:
        if failures:
            raise failures.pop()
        return connect_generator(target)

    async with (
        generator_backend(HeldGenerator()) as server,
        Fleet("generator", ListedTargets([server]).resolve, connect, str, PATIENT) as fleet,
    ):
        await until(lambda: fleet.counts()["serving"] == 1)


async def test_a_session_is_placed_until_a_report_includes_it() -> None:
    """Guards against two sessions at one backend because its load was measured before the first."""
    async with _backend(HeldGenerator()) as backend:
        description = await ToyGenerator().describe()

        @asynccontextmanager
        async def opening() -> AsyncIterator[None]:
            backend.take(description)
            assert backend.placed == 1
            yield

        async with backend.holding(opening()):
            assert backend.placed == 1
            backend.take(None)
            assert backend.placed == 0


async def test_another_program_at_the_address_is_unavailable() -> None:
    """Guards callers against NOT_FOUND for a request that is right, with another program's text."""

    async def absent() -> None:
        details = "unknown service at /srv/health.go:31"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), details
        )

    async with _backend(HeldGenerator()) as backend:
        call = SimpleNamespace(read=absent, cancel=lambda: None)
        backend.peer._stub = SimpleNamespace(Watch=lambda *_, **__: call)
        await backend.follow(60, 60)
        assert type(backend.failure) is Unavailable
        assert "health.go" not in str(backend.failure) and not backend.is_serving


async def test_a_backend_that_fails_a_call_gets_no_sessions() -> None:
    """Guards against requests that go to a generator that has just died."""
    async with _backend(HeldGenerator()) as backend:
        backend.take(await ToyGenerator().describe())
        assert backend.is_serving
        with pytest.raises(Unavailable):
            async with backend.answering():
                raise Unavailable("gone")
        assert not backend.is_serving
        backend.take(None)
        assert backend.is_serving


async def test_a_closed_backend_is_unavailable() -> None:
    """A caller that still has it in a list continues with the next one."""
    async with _backend(HeldGenerator()) as backend:
        await backend.close()
        with pytest.raises(Unavailable):
            async with backend.holding(nullcontext()):
                pass
        assert backend.running == 0


async def test_a_backend_that_answers_sessions_is_not_lost() -> None:
    """Guards sessions that use all streams of a connection: that of reports waits behind them."""
    toy, waiting = HeldGenerator(), asyncio.Event()

    async def wait() -> None:
        async with backend.answering():
            await waiting.wait()

    async with _backend(toy) as backend:
        before = asyncio.get_running_loop().time()
        async with backend.answering():
            pass
        assert backend._answered >= before
        session = asyncio.ensure_future(wait())
        toy.gates["describe"].shut()
        watching = asyncio.ensure_future(backend.follow(0.001, 0.01))
        await turns(1)
        backend._answered += 3600  # as if it went on to answer
        done, _ = await asyncio.wait({session, watching}, timeout=0.1)
        assert not done
        backend._answered -= 3600
        with pytest.raises(Unavailable):
            await session
        await watching


@asynccontextmanager
async def _backend(generator: HeldGenerator) -> AsyncIterator[Backend[RemoteGenerator]]:
    """A backend of no fleet."""
    async with generator_backend(generator) as server:
        backend = Backend(target_of(server), connect_generator, str)
        yield backend
        await backend.close()


# The resolver: names stand for all of their addresses, and failed lookups remove none


@pytest.fixture
async def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, in place of the system's lookup."""
    by_name: dict[str, list[str]] = {}

    async def lookup(host: str, port: int, **_: Any) -> list[Any]:
        if host not in by_name:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                *(socket.SOCK_STREAM, 6, ""),
                (address, port),
            )
            for address in by_name[host]
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    return by_name


@pytest.mark.parametrize(
    ("backend", "targets"),
    [
        ("two:1", {"10.0.0.1:1", "10.0.0.2:1"}),
        # A machine with an address of each kind counts once.
        ("both:1", {"127.0.0.1:1"}),
        ("six:1", {"[fd00::1]:1"}),
    ],
)
async def test_a_name_has_all_its_addresses(
    addresses: dict[str, list[str]], backend: str, targets: set[str]
) -> None:
    addresses |= {
        "two": ["10.0.0.1", "10.0.0.2"],
        "both": ["::1", "127.0.0.1"],
        "six": ["fd00::1"],
        "other": ["10.0.0.3"],
    }
    name = backend.removesuffix(":1")
    expected = {Target(target, name) for target in targets} | {Target("10.0.0.3:1", "other")}
    assert await Resolver([backend, "other:1"]).resolve() == expected


async def test_a_failed_lookup_keeps_the_last_addresses(addresses: dict[str, list[str]]) -> None:
    """A headless Service without ready pods, or without its name server, is an unknown name."""
    resolver = Resolver(["generators:1"])
    assert await resolver.resolve() == frozenset()
    addresses["generators"] = ["10.0.0.1"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    del addresses["generators"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    addresses["generators"] = ["10.0.0.2"]
    assert await resolver.resolve() == {Target("10.0.0.2:1", "generators")}


async def test_an_invalid_name_does_not_end_the_lookup_of_others() -> None:
    """The system's lookup raises UnicodeError for it. Addresses are names of themselves."""
    targets = {Target("10.0.0.9:1", "10.0.0.9"), Target("[::1]:2", "[::1]")}
    assert await Resolver(["a..b:1", "10.0.0.9:1", "[::1]:2"]).resolve() == targets


# The order in which backends are tried: all of them, the less loaded first


LOADS = st.lists(st.floats(0, 10), min_size=1, max_size=6)


@given(LOADS, st.randoms())
def test_every_backend_is_tried_once_and_the_less_loaded_choice_first(
    loads: list[float], chance: random.Random
) -> None:
    order = [*ranked(range(len(loads)), loads.__getitem__, chance.random)]
    assert sorted(order) == [*range(len(loads))]
    in_order = [loads[member] for member in order]
    assert in_order[:2] == sorted(in_order[:2]) and in_order[2:] == sorted(in_order[2:])


def test_loads_of_the_others_are_computed_only_if_the_first_two_fail() -> None:
    """Guards against a choice that costs as much as there are backends."""
    loads: Counter[int] = Counter()
    order = ranked(range(1000), lambda member: loads.update([member]) or 0.0, random.random)
    assert len({*islice(order, 2)}) == len(loads) == 2
    assert len([*order]) == 998
