"""Counters of real runs add up; tests/deploy/test_dashboards.py has a run of every metric."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from specrej.client.channel import open_channel
from specrej.contracts import (
    CacheControl,
    Finished,
)
from specrej.telemetry import names
from tests.endpoints import Scrape
from tests.serving import until
from tests.telemetry.observed import (
    GENERATE,
    GENERATE_STREAM,
    SERVICES,
    Observed,
    Outcome,
    calls_by_code,
    request,
    streamed,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 300


async def settled(service: Observed) -> dict[str, Scrape]:
    """The values of all endpoints once no call runs."""
    values: dict[str, Scrape] = {}

    async def is_quiet() -> bool:
        for name in SERVICES:
            values[name] = await service.scrape(name)
        running = sum(v.sum("specrej_rpc_server_in_flight") for v in values.values())
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
        """Send a request of a random kind."""
        long = {"seed": number, "max_tokens": 2000}
        kinds: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
            (8, {"seed": number, "n": 1 + number % 8}, {}),
            (3, {"seed": number % 7, "cache": CacheControl.USE}, {}),
            (3, {"alpha": 7.0}, {}),  # invalid
            (4, long, {"leave_after": 1}),
            (2, long, {"timeout": 1.0}),
        ]
        if self._draw.random() < 0.05:
            self.outcomes[GENERATE].append(await self._unreadable())
            return
        ((_, options, call),) = self._draw.choices(kinds, [weight for weight, *_ in kinds])
        outcome = await streamed(self._stub, request(**options), **call)
        self.outcomes[GENERATE_STREAM].append(outcome)

    def all(self) -> list[Outcome]:
        return [outcome for some in self.outcomes.values() for outcome in some]

    async def _unreadable(self) -> Outcome:
        try:
            await self._raw(b"\xff\xff\xff")
        except grpc.aio.AioRpcError as failure:
            return Outcome(failure.code().name)
        return Outcome()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def mixed(service: Observed) -> tuple[Users, dict[str, Scrape]]:
    """300 mixed requests, and what was counted of them."""
    before = await settled(service)
    async with open_channel(service.stack.orchestrator_address) as channel:
        users, room = Users(service, channel), asyncio.Semaphore(24)

        async def send(number: int) -> None:
            async with room:
                await users.send(number)

        await asyncio.gather(*map(send, range(REQUESTS)))
    codes = Counter(outcome.code for outcome in users.all())
    assert codes.keys() >= {
        "OK", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"
    }  # fmt: skip
    after = await settled(service)
    return users, {name: after[name] - before[name] for name in SERVICES}


def answers(users: Users) -> Iterator[Finished]:
    for outcome in users.all():
        yield from (event for event in outcome.events if isinstance(event, Finished))


async def test_calls_reconcile(mixed: tuple[Users, dict[str, Scrape]]) -> None:
    """Guards against calls that are counted when they come and not when they go, or twice."""
    users, counted = mixed
    late, left = grpc.StatusCode.DEADLINE_EXCEEDED.name, grpc.StatusCode.CANCELLED.name
    for method in (GENERATE, GENERATE_STREAM):
        ended = calls_by_code(counted["orchestrator"], method)
        seen = Counter(outcome.code for outcome in users.outcomes[method])
        # A machine that is loaded many times over may lose a backend while a client leaves.
        lost = min((ended - seen)["UNAVAILABLE"], (seen - ended)[left])
        ended += Counter({left: lost})
        ended["UNAVAILABLE"] -= lost
        ended_late, seen_late = ended.pop(late, 0), seen.pop(late, 0)
        # A deadline may pass before the service has the call, or while its status is on the way.
        assert not seen - ended
        assert ended_late + (ended - seen).total() <= seen_late
    for values in counted.values():
        started_calls = values.matching("specrej_rpc_server_started_total")
        methods = {dict(series.labels)["rpc_method"] for series in started_calls}
        for method in methods:
            started = values.sum("specrej_rpc_server_started_total", **{names.RPC_METHOD: method})
            in_flight = values.sum("specrej_rpc_server_in_flight", **{names.RPC_METHOD: method})
            assert started == calls_by_code(values, method).total() + in_flight


async def test_tokens_reconcile(mixed: tuple[Users, dict[str, Scrape]]) -> None:
    """Guards against tokens in the metrics and not in the answers, or the reverse."""
    users, counted = mixed
    runs = [event.generation for event in answers(users) if not event.generation.cached]
    for kind, tokens in (
        ("generated", sum(run.usage.generated_tokens for run in runs)),
        ("prompt", sum(run.usage.prompt_tokens for run in runs)),
        ("scored", sum(run.usage.reward_tokens for run in runs)),
    ):
        assert counted["orchestrator"].sum("specrej_tokens_total", kind=kind) == tokens
    made = counted["generator"].sum("specrej_engine_tokens_total", kind="generated")
    assert made > sum(run.usage.generated_tokens for run in runs), (
        "cancelled requests cost tokens, too"
    )
