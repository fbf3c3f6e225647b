"""Fleets of toys behind real gRPC servers on loopback ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import grpc.aio

from orchestrator.__main__ import _versions_of
from orchestrator.backends.fleet import Fleet, FleetSettings
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Target
from orchestrator.backends.rewards import FleetRewards
from reward_service.reward import Reward
from specrej.client.channel import open_channel
from specrej.contracts import GenerationRequest, Schedule
from specrej.remote import RemoteGenerator, RemoteRewards
from tests.orchestrator import runs
from tests.serving import until
from tests.world import Backend, generator_backend, reward_backend

C = TypeVar("C", FleetGenerator, FleetRewards)

QUICK = FleetSettings(report_s=0.02, resolve_s=0.02, lost_s=2)
# No backend is lost, however slow the machine is.
PATIENT = FleetSettings(report_s=0.02, resolve_s=0.02, lost_s=60)
FROM_FOUR = Schedule(first=4)


class ListedTargets:
    """A resolver whose targets a test sets."""

    def __init__(self, servers: Sequence[Backend] = ()) -> None:
        self.targets = frozenset(map(target_of, servers))
        self.num_lookups = 0

    async def resolve(self) -> frozenset[Target]:
        self.num_lookups += 1
        return self.targets


@dataclass(slots=True)
class RunningFleet(Generic[C]):
    """Servers, the resolver that lists them, the fleet, and what the orchestrator makes of it."""

    servers: list[Backend]
    resolver: ListedTargets
    fleet: Fleet[Any]
    client: C

    @property
    def counts(self) -> tuple[int, ...]:
        """Backends that serve, that have another version, and that are away."""
        return tuple(self.fleet.counts().values())


Opening = AbstractAsyncContextManager[RunningFleet[C]]


def target_of(server: Backend) -> Target:
    return Target(f"127.0.0.1:{server.port}", "127.0.0.1")


def _connect(remote: Any, target: Target) -> tuple[grpc.aio.Channel, Any]:
    channel = open_channel(target.address)
    return channel, remote(channel)


connect_generator = partial(_connect, RemoteGenerator)


def generators(*toys: Any, **options: Any) -> Opening[FleetGenerator]:
    """Generators as one."""
    version = attrgetter("fingerprint")
    backends = map(generator_backend, toys)
    return _running(backends, FleetGenerator, connect_generator, version, **options)


def reward_services(*rewards: Reward, **options: Any) -> Opening[FleetRewards]:
    """Services of one reward each, as one."""
    connect = partial(_connect, RemoteRewards)
    return _running(map(reward_backend, rewards), FleetRewards, connect, _versions_of, **options)


@asynccontextmanager
async def _running(
    backends: Iterable[AbstractAsyncContextManager[Backend]],
    client: Callable[[Fleet[Any]], C],
    connect: Callable[[Target], tuple[grpc.aio.Channel, Any]],
    version: Callable[[Any], Hashable],
    *,
    settings: FleetSettings = PATIENT,
    num_listed: int | None = None,
) -> AsyncIterator[RunningFleet[C]]:
    """Backends as one, of which the first `num_listed` serve already; None: all of them."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(backend) for backend in backends]
        resolver = ListedTargets(servers[:num_listed])
        fleet = Fleet("backend", resolver.resolve, connect, version, settings)
        await stack.enter_async_context(fleet)
        await until(lambda: sum(list(fleet.counts().values())[:2]) == len(resolver.targets))
        yield RunningFleet(servers, resolver, fleet, client(fleet))


def request(n: int = 8, schedule: Schedule = FROM_FOUR, **changes: Any) -> GenerationRequest:
    sampling = {"seed": 7, "logprobs": True}
    return runs.request(n, 32, sampling=sampling, schedule=schedule, **changes)
