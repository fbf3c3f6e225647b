"""Fleets: which backends are known, serve, and have the version in use."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import grpc.aio
import pytest

from orchestrator.backends.fleet import Backend, Fleet
from orchestrator.backends.resolving import Target
from specrej.contracts import Sampling, SessionSpec
from specrej.contracts.errors import Unavailable
from specrej.remote import RemoteGenerator
from tests import world
from tests.orchestrator.backends.fleets import (
    PATIENT,
    ListedTargets,
    connect_generator,
    generators,
    target_of,
)
from tests.orchestrator.runs import PROMPT
from tests.serving import until
from tests.world import HeldGenerator, generator_backend

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
        (server,), (backend,) = running.servers, running.fleet.members()
        before = backend.peer
        await server.kill()
        await until(lambda: running.counts == (0, 0, 1))
        num_lookups = running.resolver.num_lookups
        await until(lambda: running.resolver.num_lookups > num_lookups + 1)
        await server.start()
        await until(lambda: running.counts == (1, 0, 0))
        assert backend.peer is not before


async def test_a_backend_with_a_session_stays_although_its_name_is_gone() -> None:
    """Guards against a request cut off because its pod was taken out of the Service."""
    settings = replace(PATIENT, poll_s=60)
    async with generators(HeldGenerator(), settings=settings) as running:
        async with running.client.open(SessionSpec(PROMPT, 2, SAMPLING, 4)) as session:
            running.resolver.targets = frozenset()
            running.fleet.members()[0].suspect(Unavailable("draining"))
            num_lookups = running.resolver.num_lookups
            await until(lambda: running.resolver.num_lookups > num_lookups + 1)
            assert (await session.extend(4)).num_tokens == 4
            assert sum(running.counts) == 1
        await until(lambda: sum(running.counts) == 0)


async def test_sessions_use_the_most_frequent_version() -> None:
    """An answer and its cache key have one version, and so has a request in parts."""
    old, new = ([HeldGenerator(end_every=end) for _ in range(2)] for end in (30, 40))
    async with generators(*old, *new, num_listed=3) as running:
        assert len(running.fleet.members()) == 2
        assert (await running.client.describe()).fingerprint == "toy-30"
        running.resolver.targets |= {target_of(running.servers[3])}
        await until(lambda: running.counts == (2, 2, 0))
        # Both versions are equally frequent: the one in use stays.
        assert (await running.client.describe()).fingerprint == "toy-30"
        await running.servers[0].kill()
        await until(lambda: running.counts == (2, 1, 1))
        assert (await running.client.describe()).fingerprint == "toy-40"
        async with running.client.open(SessionSpec(PROMPT, 2, SAMPLING, 4)):
            assert sum(toy.toy.ledger.num_sessions for toy in new) == 1


async def test_surveyed_does_not_wait_for_removed_backends() -> None:
    """Guards against a service that never starts because an address was stale at its start."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        resolver = ListedTargets()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        resolver.targets = frozenset({Target(address, "127.0.0.1")})
        async with Fleet("generator", resolver.resolve, connect_generator, str, PATIENT) as fleet:
            await until(lambda: fleet.counts()["away"] == 1)
            polled = asyncio.ensure_future(fleet.wait_polled())
            resolver.targets = frozenset()
            await until(polled.done)


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


async def test_a_session_opened_during_a_poll_counts_as_placed() -> None:
    """Guards against two sessions at one backend because its load was measured before the first."""
    toy = HeldGenerator()
    gate = toy.gates["describe"]
    async with generator_backend(toy) as server:
        backend = _backend(server)
        polling = await gate.hold(backend.update())
        async with backend.holding(nullcontext()):
            gate.open()
            await polling
            assert backend.placed == 1
            await backend.update()
            assert backend.placed == 0
        await backend.close()


async def test_another_program_at_the_address_is_unavailable() -> None:
    """Guards callers against NOT_FOUND for a request that is right, with another program's text."""

    async def absent(request: object) -> None:
        details = "unknown service at /srv/health.go:31"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), details
        )

    async with generator_backend(HeldGenerator()) as server:
        backend = _backend(server)
        backend._health = SimpleNamespace(Check=absent)
        await backend.update()
        assert type(backend.failure) is Unavailable
        assert "health.go" not in str(backend.failure) and not backend.is_serving
        await backend.close()


async def test_a_backend_that_fails_a_call_gets_no_sessions() -> None:
    """Guards against requests that go to a generator that has just died."""
    async with generator_backend(HeldGenerator()) as server:
        backend = _backend(server)
        await backend.update()
        assert backend.is_serving
        with pytest.raises(Unavailable):
            async with backend.answering():
                raise Unavailable("gone")
        assert not backend.is_serving
        await backend.close()


async def test_a_closed_backend_is_unavailable() -> None:
    """A caller that still has it in a list continues with the next one."""
    async with generator_backend(HeldGenerator()) as server:
        backend = _backend(server)
        await backend.close()
        with pytest.raises(Unavailable):
            async with backend.holding(nullcontext()):
                pass
        assert backend.running == 0


async def test_a_backend_that_answers_sessions_is_not_lost() -> None:
    """Guards sessions that use all streams of a connection: the poll waits behind them."""
    toy, waiting = HeldGenerator(), asyncio.Event()
    toy.gates["describe"].shut()

    async def wait() -> None:
        async with backend.answering():
            await waiting.wait()

    async with generator_backend(toy) as server:
        backend = _backend(server)
        before = asyncio.get_running_loop().time()
        async with backend.answering():
            pass
        assert backend._answered >= before
        session = asyncio.ensure_future(wait())
        backend._answered += 3600  # as if it went on to answer
        polling = asyncio.ensure_future(backend.poll(0.01))
        await until(lambda: backend.failure.message == "a backend does not answer")
        done, _ = await asyncio.wait({session, polling}, timeout=0.1)
        assert not done
        polling.cancel()
        await asyncio.wait({polling})
        waiting.set()
        await session
        await backend.close()


def _backend(server: world.Backend) -> Backend[RemoteGenerator]:
    return Backend(target_of(server), connect_generator, str)
