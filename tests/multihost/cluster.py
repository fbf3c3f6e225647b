"""Services on nodes, a client of all orchestrators, and what must hold after every fault."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from specrej import wire
from specrej.channel import SERVICE_CONFIG, open_channel, options
from specrej.contracts import Generation
from specrej.processes import Processes
from specrej.prometheus import look, prometheus_name
from specrej.telemetry import names
from specrej.v1 import generator_pb2, generator_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from tests.faults.world import request
from tests.multihost.nodes import Network
from tests.multihost.programs import (
    METRICS_PORTS,
    SEATS,
    address,
    health_of,
    programs,
    tell_names,
)
from tests.multihost.switch import Switch

# A connection that is opened again, the leases, and a look at the backends.
SETTLED_S = 45.0
_CALLS = {
    "orchestrator": "specrej.v1.OrchestratorService/Generate",
    "generator": "specrej.v1.GeneratorService/Session",
    "reward": "specrej.v1.RewardService/ScoreSession",
}


class NotSettled(Exception):
    """Something outlasts the requests that it was for; says what."""


class Cluster:
    """Services by kind and node, and a client that balances over the orchestrators."""

    def __init__(self, network: Network, children: Processes) -> None:
        self.nodes = network.nodes
        self.switch: Switch = network.switch
        self._children = children
        self._channel = _balanced(self.addresses("orchestrator"))
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def close(self) -> None:
        """The client alone."""
        await self._channel.close()

    def addresses(self, kind: str) -> list[str]:
        """All of a kind, "host:port"."""
        return [address(self.nodes[name], kind) for name in SEATS[kind]]

    async def ask(self, seed: int, *, timeout_s: float = 60.0, **more: Any) -> Generation:
        """A request, sent again as the published policy says.

        Raises:
            grpc.aio.AioRpcError: it failed for good.
        """
        message = request(f"What comes of seed {seed}?", seed=seed, **more)
        return wire.generation_from_wire(await self._stub.Generate(message, timeout=timeout_s))

    async def calls(self, kind: str) -> dict[str, float]:
        """Requests or sessions that each of a kind has been given, by node."""
        urls = self._metrics_urls(kind)
        told = await look(urls, 5.0)
        assert not told.failures, told.failures
        counts = dict.fromkeys(SEATS[kind], 0.0)
        started = prometheus_name(names.RPC_STARTED)
        for series, value in told.matching(started, {names.RPC_METHOD: _CALLS[kind]}):
            counts[urls[series.url]] += value
        return counts

    async def moved(self) -> float:
        """Sessions whose generator was lost and that went on at another."""
        told = await look(self._metrics_urls("orchestrator"), 5.0)
        assert not told.failures, told.failures
        return told.value(names.SESSIONS_MOVED, result="moved") or 0.0

    def _metrics_urls(self, kind: str) -> dict[str, str]:
        """Nodes, by where their metrics are."""
        hosts = {name: self.nodes[name].address for name in SEATS[kind]}
        return {
            f"http://{host}:{METRICS_PORTS[kind]}/metrics": name for name, host in hosts.items()
        }

    async def restart(self, kind: str, node: str) -> None:
        """As a rolling restart does with one of them."""
        await self._children.restart(f"{kind}-{node}")

    async def settle(self) -> float:
        """Seconds until everyone serves and nothing is held for any request.

        Raises:
            NotSettled: that does not come to be.
        """
        began, wrong = time.monotonic(), "nothing was looked at"
        while time.monotonic() - began < SETTLED_S:
            wrong = await self._wrong()
            if not wrong:
                return time.monotonic() - began
            await asyncio.sleep(0.05)
        raise NotSettled(f"{wrong}\n{self.log_tails()}")

    async def _wrong(self) -> str:
        found = await asyncio.gather(
            *(_unwell(at) for kind in SEATS for at in self.addresses(kind)),
            *(_held(at) for at in self.addresses("generator")),
            *(_in_flight(at) for at in self.addresses("orchestrator")),
        )
        return "; ".join(each for each in found if each)

    def log_tails(self) -> str:
        """The last lines that each process wrote."""
        return "\n".join(
            f"{name}:\n{self._children.log_tail(name)}" for name in self._children.pids
        )


@asynccontextmanager
async def cluster(network: Network) -> AsyncIterator[Cluster]:
    """All services, ready."""
    tell_names(network.nodes)
    with tempfile.TemporaryDirectory(prefix="specrej-nodes-") as scratch:
        started = list(programs(network.nodes, Path(scratch)))
        async with Processes(started, Path(scratch)) as children:
            running = Cluster(network, children)
            try:
                yield running
            finally:
                # Or whoever is cut off waits for a goodbye.
                network.switch.heal()
                await running.close()


def _balanced(addresses: list[str]) -> grpc.aio.Channel:
    """By turns, as docs/deploy.md tells clients to; the rest is the published policy."""
    config = {**SERVICE_CONFIG, "loadBalancingConfig": [{"round_robin": {}}]}
    others = [each for each in options(retries=True) if each[0] != "grpc.service_config"]
    chosen = [*others, ("grpc.service_config", json.dumps(config))]
    return grpc.aio.insecure_channel(f"ipv4:{','.join(addresses)}", options=chosen)


async def _unwell(where: str) -> str:
    health = await health_of(where)
    return "" if health == "SERVING" else f"{where} is {health}"


async def _held(where: str) -> str:
    """Of a generator."""
    async with open_channel(where, retries=False) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        asked = generator_pb2.GeneratorServiceDescribeRequest()
        try:
            told = wire.generator_from_wire(await stub.Describe(asked, timeout=2))
        except grpc.aio.AioRpcError as error:
            return f"{where} does not describe itself: {error.code().name}"
    held = (told.sessions, told.slots.owned, told.waiting)
    return f"{where} has {held} sessions, slots, waiting" if any(held) else ""


async def _in_flight(where: str) -> str:
    """Of an orchestrator."""
    async with open_channel(where, retries=False) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        asked = orchestrator_pb2.OrchestratorServiceDescribeRequest()
        try:
            told = wire.service_from_wire(await stub.Describe(asked, timeout=2))
        except grpc.aio.AioRpcError as error:
            return f"{where} does not describe itself: {error.code().name}"
    held = (told.running, told.queued)
    return f"{where} has {held} running, queued" if any(held) else ""
