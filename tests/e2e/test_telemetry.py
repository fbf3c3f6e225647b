"""What telemetry says of real models at work."""

from __future__ import annotations

import pytest

from specrej import Client
from specrej.contracts import Algorithm
from specrej.telemetry import names
from tests.collector import SERVER, Seen
from tests.telemetry.coverage import below, covered, root_of
from tests.telemetry.observed import (
    GENERATE,
    SERVICES,
    Observed,
    client_spans,
    observed,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Explain why leaves are green."


async def test_a_real_request_is_accounted_for() -> None:
    """The promise of the waterfall: one trace, and steps that cover 98 % of what its caller waits.

    And the engine makes the tokens that answers tell of, whichever algorithm asks.
    """
    slots = {"SPECREJ_GENERATOR_KV_SLOTS": "40000"}
    async with observed(slots, on_toys=False) as service:
        before = await service.scrape("generator")
        with client_spans(service.collector):
            async with Client(service.stack.orchestrator_address) as client:
                answers = [
                    await client.generate(PROMPT, n=16, max_tokens=64, algorithm=algorithm)
                    for algorithm in Algorithm
                ]
            counted = await service.scrape("generator") - before
            traces = [await trace_of(service, answer.request_id) for answer in answers]
    for trace in traces:
        check(trace)
    made = counted.sum("specrej_engine_tokens_total", kind="generated")
    assert made == sum(answer.usage.generated_tokens for answer in answers)


def check(trace: list[Seen]) -> None:
    assert {seen.service for seen in trace} == {"client", *SERVICES}
    assert root_of(trace).service == "client"
    (server,) = (s for s in trace if s.name == GENERATE and s.span.kind == SERVER)
    assert server.attributes[names.REQUEST_MODEL] != "toy"
    part = covered(trace, server)
    assert part >= 0.98, f"{part:.2%} of {[seen.name for seen in below(trace, server)]}"


async def trace_of(service: Observed, request_id: str) -> list[Seen]:
    """All of its spans, once the client's is there too: it is the last to end."""
    found: list[Seen] = []

    def is_whole() -> bool:
        servers = service.collector.named(GENERATE, kind=SERVER)
        of_request = [s for s in servers if s.attributes[names.REQUEST_ID] == request_id]
        found[:] = [s for each in of_request for s in service.collector.trace(each.span.trace_id)]
        told = {seen.service for seen in found if seen.span.kind == SERVER}
        return told >= set(SERVICES) and any(not seen.span.parent_span_id for seen in found)

    await until(is_whole)
    return found
