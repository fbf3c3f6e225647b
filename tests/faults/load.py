"""Load: too many, equal and cancelled requests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrej.contracts import CacheControl
from specrej.security import TENANT_METADATA
from tests.faults.case import Case, case
from tests.faults.world import MAX_QUEUED, MAX_RUNNING, SERVICES, Call, Outcome, World

_FULL = MAX_RUNNING + MAX_QUEUED
_NUM_LIGHT = 3
_NUM_EQUAL = 500
_FLOOD, _LIGHT = [(TENANT_METADATA, "flood")], [(TENANT_METADATA, "light")]
# For cases of hundreds of calls, whose speed depends on the machine's other load.
_MANY_S = 90.0
_HEALTH_S = 1.0
_FLAT_BYTES = 6 << 20
_PROBE_EVERY_S = 0.05


async def flood(world: World) -> list[str]:
    """One tenant takes all permits and places: another's requests are next, each in the place of
    one of the flood's, and no other is refused."""
    # A long deadline: requests that cannot be served in time may be refused earlier.
    options: dict[str, Any] = {"max_tokens": 400, "timeout_s": 3600.0}
    calls = [world.call(metadata=_FLOOD, seed=seed, **options) for seed in range(_FULL)]
    try:
        await world.until_service(
            lambda service: (service.running, service.queued) == (MAX_RUNNING, MAX_QUEUED),
            bound_s=_MANY_S,
        )
        light = [world.call(metadata=_LIGHT, seed=seed, **options) for seed in range(_NUM_LIGHT)]
        answered = await _all(light)
        over = [call for call in calls if call.is_over]
        assert len(over) < _FULL / 2, f"{len(over)} requests of the flood were served before"
    finally:
        for call in calls:
            call.cancel()
        outcomes = await _all(calls)
    return [outcome.label for outcome in answered] + sorted(outcome.code for outcome in outcomes)


async def health_under_load(world: World) -> list[str]:
    """With four times as many requests as can run or wait, health checks answer in time."""
    async with _probed(world):
        calls = [world.call(seed=seed, max_tokens=16) for seed in range(4 * _FULL)]
        outcomes = await _all(calls)
    return sorted(outcome.label for outcome in outcomes)


@asynccontextmanager
async def _probed(world: World) -> AsyncIterator[None]:
    """Check the health of all services every 50 ms, in a thread: this loop is busy with calls."""
    over = threading.Event()
    probes = asyncio.create_task(asyncio.to_thread(_probe, world.addresses, over))
    try:
        yield
    finally:
        over.set()
        await probes


def _probe(addresses: Mapping[str, str], over: threading.Event) -> None:
    """Raises AssertionError or RpcError: health is not SERVING, or a check is late."""
    is_over = False
    while not is_over:
        for name, address in addresses.items():
            began = time.monotonic()
            with grpc.insecure_channel(address) as channel:  # a new one, as of a kubelet
                stub: Any = health_pb2_grpc.HealthStub(channel)
                status = stub.Check(health_pb2.HealthCheckRequest(), timeout=10 * _HEALTH_S).status
            seconds = time.monotonic() - began
            assert status == health_pb2.HealthCheckResponse.SERVING, f"the {name} is not serving"
            assert seconds < _HEALTH_S, f"health of the {name} took {seconds:.2f} s"
        is_over = over.wait(_PROBE_EVERY_S)


async def equal_requests(world: World) -> list[str]:
    """500 equal requests at the same time are one generation: it lasts until all have joined it,
    since on a busy machine Redis may be too slow for one that comes later."""
    options: dict[str, Any] = {"seed": 4242, "cache": CacheControl.USE, "max_tokens": 1600}
    calls = [world.call(timeout_s=_MANY_S, **options) for _ in range(_NUM_EQUAL)]
    outcomes = await _all(calls)
    generated = [o.generation for o in outcomes if o.generation and not o.generation.cached]
    assert len(generated) == 1, f"{len(generated)} generations"
    return [outcome.label for outcome in outcomes]


async def half_cancelled(world: World) -> list[str]:
    """Cancel half of 100 requests: the other answers equal those of a run without cancels."""
    chance = random.Random(17)
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": False, "timeout_s": _MANY_S}
    alone = await _all([world.call(seed=seed, **options) for seed in range(100)])
    calls = [world.call(seed=seed, **options) for seed in range(100)]
    cancelled = chance.sample(range(100), 50)
    for number in cancelled:
        calls[number].cancel()
    together = await _all(calls)
    others = sorted(set(range(100)) - set(cancelled))
    for number in others:
        left, right = alone[number].generation, together[number].generation
        assert left and right, (alone[number].code, together[number].code)
        assert left.candidates == right.candidates, f"seed {number} has another answer"
    return [together[number].label for number in (*others, *cancelled)]


async def open_and_cancel(world: World) -> list[str]:
    """Cancel a thousand requests once they are admitted: memory stays flat."""
    await _open_and_cancel(world, 300)
    before = {name: world.process(name).memory_info().rss for name in SERVICES}
    codes = await _open_and_cancel(world, 1000)
    for name in SERVICES:
        grown_bytes = world.process(name).memory_info().rss - before[name]
        assert grown_bytes < _FLAT_BYTES, f"{name} has grown by {grown_bytes} bytes"
    return codes


async def _open_and_cancel(world: World, times: int) -> list[str]:
    codes = []
    for number in range(0, times, 4):
        calls = [world.call(stream=True, seed=number + offset) for offset in range(4)]
        for call in calls:
            await call.begin()
            call.cancel()
        codes += [outcome.label for outcome in await _all(calls)]
    return codes


async def _all(calls: Collection[Call]) -> list[Outcome]:
    return [await call.outcome() for call in calls]


CASES: tuple[Case, ...] = (
    case(
        "load/flood-of-a-tenant",
        flood,
        f"OK x {_NUM_LIGHT}",
        f"CANCELLED|OK x {_FULL - _NUM_LIGHT}",
        f"RESOURCE_EXHAUSTED x {_NUM_LIGHT}",
        limit_s=2 * _MANY_S,
    ),
    case(
        "load/health",
        health_under_load,
        *(f"OK x {_FULL}", f"OK|RESOURCE_EXHAUSTED x {3 * _FULL}"),
        limit_s=60,
    ),
    case("load/equal-requests", equal_requests, f"OK x {_NUM_EQUAL}", limit_s=2 * _MANY_S),
    case("load/half-cancelled", half_cancelled, "OK x 50", "CANCELLED x 50", limit_s=200),
    case("load/1000-cancelled", open_and_cancel, "CANCELLED x 1000", limit_s=120),
)
