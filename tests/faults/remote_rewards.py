"""Rewards of other servers: slow, gone, and callers that leave; on processes of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specrej import RewardClient
from specrej.backend.v1 import reward_pb2, reward_pb2_grpc
from specrej.client.channel import open_channel
from specrej.v1 import common_pb2
from tests.faults.case import Case, here
from tests.faults.world import Call, World, until
from tests.reward_service.endpoint import Endpoint, Reply, served
from tests.serving import health_of

_STUCK_S = 1.0
_TIMEOUT_S = 20.0


@asynccontextmanager
async def _reward_service(world: World) -> AsyncIterator[tuple[Endpoint, str]]:
    """A server behind HTTP, and a reward service whose only reward is that server's."""
    async with served() as endpoint:
        spec = {"name": "far", "kind": "http", "url": endpoint.url, "timeout_s": _TIMEOUT_S}
        settings = {"REWARDS": json.dumps([spec]), "STUCK_S": str(_STUCK_S)}
        async with world.another("reward", **settings) as address:
            yield endpoint, address


async def slow_endpoint(world: World) -> list[str]:
    """Slow answers delay no other caller and are no heartbeat of this service."""
    async with _reward_service(world) as (endpoint, address), RewardClient(address) as client:
        began = time.monotonic()
        slow = [asyncio.create_task(client.score("why?", ["slow"])) for _ in range(16)]
        await until(lambda: sum(r.body["responses"] == ["slow"] for r in endpoint.requests) == 16)
        num_fast = 0
        while time.monotonic() - began < 3 * _STUCK_S:
            assert (await client.score("why?", ["fast"])).values == (4.0,)
            num_fast += 1
            assert await health_of(address) == "SERVING"
        assert num_fast > 3 and not any(call.done() for call in slow)
        endpoint.release.set()
        assert [(await call).values for call in slow] == [(4.0,)] * 16
    return ["OK"] * len(slow)


@asynccontextmanager
async def _scored(world: World, **options: Any) -> AsyncIterator[tuple[Endpoint, Call]]:
    """A request whose candidates are at a server that does not answer."""
    async with _reward_service(world) as (endpoint, rewards):
        orchestrator = world.another("orchestrator", REWARD_ADDRESS=rewards)
        async with orchestrator as address:
            endpoint.reply = lambda *_: Reply(is_held=True)
            num_before = len(endpoint.requests)
            call = Call(address, **options)
            await until(lambda: len(endpoint.requests) > num_before)
            yield endpoint, call


async def cancelled(world: World) -> list[str]:
    """A cancelled request ends the server's request."""
    async with _scored(world) as (endpoint, call):
        call.cancel()
        await until(lambda: endpoint.num_gone == 1)
        return [(await call.outcome()).code]


async def late(world: World) -> list[str]:
    """A request's deadline goes down to the server, whose request ends with it."""
    async with _scored(world, timeout_s=5.0) as (endpoint, call):
        code = (await call.outcome()).code
        await until(lambda: endpoint.num_gone == 1)
        # A backend's deadline is a second later than its request's.
        sent_ms = int(endpoint.requests[-1].headers["specrej-timeout-ms"])
        assert 0 < sent_ms <= 6100, f"the server was given {sent_ms} ms"
        return [code]


async def gone(world: World) -> list[str]:
    """A server that breaks off is UNAVAILABLE, and the next request is answered."""
    async with _reward_service(world) as (endpoint, address):
        async with open_channel(address, retries=False) as channel:
            stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
            prompt = common_pb2.Prompt(text="why?")
            broken = stub.Score(reward_pb2.ScoreRequest(prompt=prompt, responses=["slow"]))
            await until(lambda: endpoint.requests[-1].body["responses"] == ["slow"])
            endpoint.cut()
            code = (await broken.code()).name
        async with RewardClient(address) as client:
            assert (await client.score("why?", ["fast"])).values == (4.0,)
    return [code, "OK"]


CASES: tuple[Case, ...] = (
    here("remote/slow-endpoint", slow_endpoint, "OK x 16"),
    here("remote/cancelled", cancelled, "CANCELLED"),
    here("remote/late", late, "DEADLINE_EXCEEDED"),
    here("remote/endpoint-gone", gone, "UNAVAILABLE", "OK"),
)
