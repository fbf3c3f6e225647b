"""Counters of real runs add up; tests/deploy/test_dashboards.py has a run of every metric."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from specrej.client.channel import open_channel
from specrej.contracts import CacheControl, Finished
from specrej.telemetry import names
from tests.endpoints import Scrape
from tests.serving import failure_of, until
from tests.telemetry.observed import (
    GENERATE,
    GENERATE_STREAM,
    SERVICES,
    Observed,
    Outcome,
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
        # Two are the streams of the backends' reports.
        return running == 2 and values["orchestrator"].sum("specrej_requests_running") == 0

    await until(is_quiet)
    return values


def kinds(number: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options and calls of the kinds of requests."""
    long = {"seed": number, "max_tokens": 2000}
    return [
        ({"seed": number, "n": 1 + number % 8}, {}),
        ({"seed": number % 7, "cache": CacheControl.USE}, {}),
        ({"alpha": 7.0}, {}),  # invalid
        (long, {"leave_after": 1}),
        (long, {"timeout": 1.0}),
    ]


async def unreadable(channel: grpc.aio.Channel) -> Outcome:
    """The outcome of a call whose message is none."""
    call: Any = channel.unary_unary(f"/{GENERATE}")
    return Outcome((await failure_of(call(b"\xff\xff\xff"))).code().name)


# By method, as their clients saw them.
Outcomes = dict[str, list[Outcome]]
Mixed = tuple[Outcomes, dict[str, Scrape]]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def mixed(service: Observed) -> Mixed:
    """The outcomes of 300 mixed requests, many at once, and what was counted of them."""
    before = await settled(service)
    outcomes: Outcomes = {GENERATE: [], GENERATE_STREAM: []}
    draw, room = random.Random(5), asyncio.Semaphore(24)
    async with open_channel(service.stack.orchestrator_address) as channel:

        async def send(number: int) -> None:
            async with room:
                if draw.random() < 0.05:
                    outcomes[GENERATE].append(await unreadable(channel))
                    return
                ((options, call),) = draw.choices(kinds(number), [8, 3, 3, 4, 2])
                outcome = await streamed(service.stub, request(**options), **call)
                outcomes[GENERATE_STREAM].append(outcome)

        await asyncio.gather(*map(send, range(REQUESTS)))
    assert {outcome.code for some in outcomes.values() for outcome in some} >= {
        "OK", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"
    }  # fmt: skip
    after = await settled(service)
    return outcomes, {name: after[name] - before[name] for name in SERVICES}


def calls_by_code(values: Scrape, method: str) -> Counter[str]:
    """The number of ended calls of a method, by gRPC status."""
    counts: Counter[str] = Counter()
    ended = values.matching("rpc_server_call_duration_seconds_count", rpc_method=method)
    for series, value in ended.items():
        counts[dict(series.labels)["rpc_response_status_code"]] += int(value)
    return +counts


async def test_calls_reconcile(mixed: Mixed) -> None:
    """Guards against calls that are counted when they come and not when they go, or twice."""
    outcomes, counted = mixed
    late, left = grpc.StatusCode.DEADLINE_EXCEEDED.name, grpc.StatusCode.CANCELLED.name
    for method in (GENERATE, GENERATE_STREAM):
        ended = calls_by_code(counted["orchestrator"], method)
        seen = Counter(outcome.code for outcome in outcomes[method])
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


async def test_tokens_reconcile(mixed: Mixed) -> None:
    """Guards against tokens in the metrics and not in the answers, or the reverse."""
    outcomes, counted = mixed
    events = [event for outcome in outcomes[GENERATE_STREAM] for event in outcome.events]
    answers = [event.generation for event in events if isinstance(event, Finished)]
    runs = [answer for answer in answers if not answer.cached]
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
