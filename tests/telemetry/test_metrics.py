"""Counters of real runs add up, and every metric there is a name for is emitted by one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from specrej import wire
from specrej.channel import open_channel
from specrej.contracts import Admitted, CacheControl, Finished, RoundCompleted, Schedule
from specrej.telemetry import names
from specrej.telemetry.names import Metric
from specrej.v1 import generator_pb2, generator_pb2_grpc, orchestrator_pb2
from tests.collector import labels_of, points
from tests.telemetry.observed import (
    GENERATE,
    GENERATE_STREAM,
    SERVICES,
    Observed,
    Outcome,
    Values,
    calls_by_code,
    observed,
    prometheus_name,
    request,
    streamed,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Observed]:
    async with observed() as running:
        yield running


async def settled(service: Observed) -> dict[str, Values]:
    """What all endpoints say once nothing runs anywhere."""
    values: dict[str, Values] = {}

    async def is_quiet() -> bool:
        for name in SERVICES:
            values[name] = await service.scrape(name)
        running = sum(each.sum("specrej_rpc_server_in_flight") for each in values.values())
        return running == 0 and values["orchestrator"].sum("specrej_requests_running") == 0

    await until(is_quiet)
    return values


class Users:
    """Requests of all kinds, many at once; `outcomes` as their clients saw them."""

    def __init__(self, service: Observed, channel: grpc.aio.Channel) -> None:
        self.outcomes: dict[str, list[Outcome]] = {GENERATE: [], GENERATE_STREAM: []}
        self._stub = service.stub
        self._raw: Any = channel.unary_unary(f"/{GENERATE}")
        self._draw = random.Random(5)

    async def send(self, number: int) -> None:
        """One of them, whichever is drawn."""
        kinds = {
            self._ok: 8, self._equal: 3, self._bad: 3, self._leaves: 4, self._late: 2
        }  # fmt: skip
        if self._draw.random() < 0.05:
            self.outcomes[GENERATE].append(await self._unreadable())
        else:
            (kind,) = self._draw.choices(list(kinds), list(kinds.values()))
            self.outcomes[GENERATE_STREAM].append(await kind(number))

    def all(self) -> list[Outcome]:
        return [outcome for some in self.outcomes.values() for outcome in some]

    async def _ok(self, number: int) -> Outcome:
        return await streamed(self._stub, request(seed=number, n=1 + number % 8))

    async def _equal(self, number: int) -> Outcome:
        return await streamed(self._stub, request(seed=number % 7, cache=CacheControl.USE))

    async def _bad(self, number: int) -> Outcome:
        return await streamed(self._stub, request(alpha=7.0))

    async def _leaves(self, number: int) -> Outcome:
        return await streamed(self._stub, request(seed=number, max_tokens=2000), leave_after=1)

    async def _late(self, number: int) -> Outcome:
        return await streamed(self._stub, request(seed=number, max_tokens=2000), timeout=1.0)

    async def _unreadable(self) -> Outcome:
        try:
            await self._raw(b"\xff\xff\xff")
        except grpc.aio.AioRpcError as failure:
            return Outcome(failure.code().name)
        return Outcome()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mixed(service: Observed) -> tuple[Users, dict[str, Values]]:
    """300 mixed requests, and what was counted of them."""
    before = await settled(service)
    async with open_channel(service.stack.orchestrator_address, retries=False) as channel:
        users, room = Users(service, channel), asyncio.Semaphore(24)

        async def send(number: int) -> None:
            async with room:
                await users.send(number)

        await asyncio.gather(*map(send, range(REQUESTS)))
    after = await settled(service)
    return users, {name: after[name] - before[name] for name in SERVICES}


def answers(users: Users) -> Iterator[Finished]:
    for outcome in users.all():
        yield from (event for event in outcome.events if isinstance(event, Finished))


async def test_all_kinds_of_ends_are_there(mixed: tuple[Users, dict[str, Values]]) -> None:
    """Guards the tests below against reconciling nothing."""
    codes = Counter(outcome.code for outcome in mixed[0].all())
    assert codes.keys() >= {
        "OK", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"
    }  # fmt: skip
    assert codes.total() == REQUESTS


async def test_calls_reconcile(mixed: tuple[Users, dict[str, Values]]) -> None:
    """Guards against calls that are counted when they come and not when they go, or twice."""
    users, counted = mixed
    for method in (GENERATE, GENERATE_STREAM):
        ended = calls_by_code(counted["orchestrator"], method)
        assert ended == Counter(outcome.code for outcome in users.outcomes[method])
    for values in counted.values():
        methods = {dict(labels)["rpc_method"] for name, labels in values.samples
                   if name == "specrej_rpc_server_started_total"}  # fmt: skip
        for method in methods:
            started = values.sum("specrej_rpc_server_started_total", **{names.RPC_METHOD: method})
            in_flight = values.sum("specrej_rpc_server_in_flight", **{names.RPC_METHOD: method})
            assert started == calls_by_code(values, method).total() + in_flight


async def test_tokens_reconcile(mixed: tuple[Users, dict[str, Values]]) -> None:
    """Guards against tokens that are counted and not told, or told and not counted."""
    users, counted = mixed
    runs = [event.generation for event in answers(users) if not event.generation.cached]
    for kind, tokens in (
        ("generated", sum(each.usage.generated_tokens for each in runs)),
        ("prompt", sum(each.usage.prompt_tokens for each in runs)),
        ("scored", sum(each.usage.reward_tokens for each in runs)),
    ):
        assert counted["orchestrator"].sum("specrej_tokens_total", kind=kind) == tokens
    made = counted["generator"].sum("specrej_engine_tokens_total", kind="generated")
    assert made > sum(each.usage.generated_tokens for each in runs), "who left cost tokens too"


async def test_answers_and_admissions_reconcile(mixed: tuple[Users, dict[str, Values]]) -> None:
    """Guards against requests that vanish between the port, the cache and the queue."""
    users, counted = mixed
    values, codes = counted["orchestrator"], Counter(each.code for each in users.all())
    assert values.sum("specrej_answers_total") == codes["OK"]
    fresh = sum(not event.generation.cached for event in answers(users))
    assert values.sum("specrej_answers_total", source="run") == fresh
    admission = "specrej_admission_results_total"
    # An equal request that waits is refused with whom it waits for.
    assert 0 < values.sum(admission, result="refused") <= codes["RESOURCE_EXHAUSTED"]
    # Who is late may be admitted and never hear of it.
    told = sum(isinstance(e, Admitted) for outcome in users.all() for e in outcome.events)
    assert told <= values.sum(admission, result="admitted") <= told + codes["DEADLINE_EXCEEDED"]
    assert values.sum("specrej_queue_duration_seconds_count") == values.sum(admission)


async def test_candidates_reconcile(service: Observed) -> None:
    """Guards against a candidate without a fate, or with two, also where somebody leaves."""
    before = await settled(service)
    message = request(n=8, max_tokens=400, schedule=Schedule("tokens", (8,)))
    left = [await streamed(service.stub, message, leave_after=events) for events in (1, 2)]
    whole = await streamed(service.stub, request(n=8, ignore_eos=False, max_tokens=64, seed=5))
    counted = (await settled(service))["orchestrator"] - before["orchestrator"]
    assert [outcome.code for outcome in (*left, whole)] == ["CANCELLED", "CANCELLED", "OK"]
    assert fates(counted, "abandoned") == 8 + 4
    rounds = [e.trace for e in whole.events if isinstance(e, RoundCompleted)]
    assert fates(counted, "rejected") == 4 + sum(trace.num_rejected for trace in rounds)
    ended = sum(trace.num_finished for trace in rounds)
    assert fates(counted, "finished") + fates(counted, "truncated") == ended > 0
    assert counted.sum("specrej_candidates_total") == 3 * 8
    assert counted.sum("specrej_rounds_total") == 1 + len(rounds)


def fates(values: Values, fate: str) -> float:
    return values.sum("specrej_candidates_total", fate=fate)


async def test_an_engine_makes_the_tokens_that_are_answered_for(service: Observed) -> None:
    """Guards against a generator that makes more than anybody is told of."""
    before = await settled(service)
    told = [await streamed(service.stub, request(seed=seed)) for seed in range(5)]
    after = await settled(service)
    usages = [event.generation.usage for outcome in told for event in outcome.events[-1:]
              if isinstance(event, Finished)]  # fmt: skip
    made = (after["generator"] - before["generator"]).sum(
        "specrej_engine_tokens_total", kind="generated"
    )
    assert len(usages) == 5 and made == sum(usage.generated_tokens for usage in usages)


async def test_slots_add_up(service: Observed) -> None:
    """Guards against a gauge that is not of the ledger."""
    values = (await settled(service))["generator"]
    states = [values.sum("specrej_slots", state=state) for state in ("owned", "cached", "free")]
    assert states == [0, 0, 100_000]


def all_metrics() -> Iterator[Metric]:
    """All but those of shadows, which are off."""
    for metric in vars(names).values():
        if isinstance(metric, Metric) and not metric.name.startswith("specrej.shadow."):
            yield metric


async def test_every_metric_is_emitted(
    service: Observed, mixed: tuple[Users, dict[str, Values]]
) -> None:
    """Guards against a name that dashboards and alerts use and nothing ever has; both ways out."""
    await a_generator_is_lost(service)
    await streamed(service.stub, request(rewards={"raising": 1.0}, allow_degraded=True))
    await one_that_must_hurry(service)
    equal = request(cache=CacheControl.USE, seed=77)
    await asyncio.gather(*(streamed(service.stub, equal) for _ in range(2)))
    await a_peer_falls_silent(service)
    wanted = {metric.name: metric for metric in all_metrics()}

    def sent() -> set[str]:
        return {name for _, name in service.collector.metrics}

    try:
        await until(lambda: sent() >= wanted.keys())
    except TimeoutError:
        pytest.fail(f"nothing has emitted {sorted(wanted.keys() - sent())}")
    for (_, name), metric in service.collector.metrics.items():
        for point in points(metric):
            assert labels_of(point).keys() == set(wanted[name].labels), name
    scraped = {name for service_name in SERVICES
               for name, _ in (await service.scrape(service_name)).samples}  # fmt: skip
    missing = [m for m in map(prometheus_name, wanted.values())
               if not any(name.startswith(m) for name in scraped)]  # fmt: skip
    assert not missing


async def a_generator_is_lost(service: Observed) -> None:
    """There is no other that its session could move to; it is started again."""
    message = request(max_tokens=1000)
    rpc = service.stub.GenerateStream(orchestrator_pb2.GenerateStreamRequest(request=message))
    await rpc.read()  # admitted
    os.kill(service.stack.processes["generator"], signal.SIGKILL)
    assert await rpc.code() is grpc.StatusCode.UNAVAILABLE
    await service.stack.restart("generator")
    async with asyncio.timeout(10):
        while (await streamed(service.stub, request())).code != "OK":
            pass


async def one_that_must_hurry(service: Observed) -> None:
    """Many of its candidates end at once; the last would take longer than there is time.

    How much time that is depends on the machine.
    """
    message = request(n=256, max_tokens=350, alpha=0.0, ignore_eos=False, allow_degraded=True)
    codes = []
    for timeout in (2.5, 4.0, 6.0):
        outcome = await streamed(service.stub, message, timeout=timeout)
        (*_, last) = outcome.events
        if isinstance(last, Finished) and last.generation.hurried:
            return
        codes.append(outcome.code)
    raise AssertionError(codes)


async def a_peer_falls_silent(service: Observed) -> None:
    """A session of the generator is opened, and nothing more is said."""
    async with open_channel(service.stack.generator_address, retries=False) as channel:
        stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)
        call = stub.Session()
        message = wire.request_to_wire(wire.request_from_wire(request(), Schedule(), []))
        opening = generator_pb2.OpenSession(
            prompt=message.prompt, n=2, sampling=message.sampling, first_round_tokens=4
        )
        await call.write(generator_pb2.SessionRequest(sequence=1, open=opening))
        await call.read()
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_resources_tell_who_it_is(service: Observed) -> None:
    """Guards against series of two processes that are one, and a service without a name."""
    told = service.collector.resources
    assert told.keys() == set(SERVICES)
    assert all(each["service.namespace"] == "specrej" for each in told.values())
    assert len({each["service.instance.id"] for each in told.values()}) == len(SERVICES)
