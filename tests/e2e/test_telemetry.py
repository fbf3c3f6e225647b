"""Telemetry of requests to real models."""

from __future__ import annotations

import pytest

from specrej import Client
from specrej.contracts import Algorithm, CacheControl
from specrej.telemetry import names
from tests.collector import SERVER, Seen
from tests.telemetry.observed import (
    GENERATE,
    SERVICES,
    Observed,
    client_spans,
    covered,
    root_of,
    whole_trace,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Explain why leaves are green."


async def test_a_real_request_is_accounted_for(service: Observed) -> None:
    """One trace per request, whose steps cover 98 % of the caller's waiting time.

    The engine's token counter equals the sum of the answers' usage, for both algorithms.
    """
    before = await service.scrape("generator")
    with client_spans(service.collector):
        async with Client(service.stack.orchestrator_address) as client:
            answers = [
                await client.generate(
                    PROMPT, n=8, max_tokens=32, algorithm=algorithm, cache=CacheControl.BYPASS
                )
                for algorithm in [*Algorithm] * 2
            ]
        counted = await service.scrape("generator") - before
        traces = [await whole_trace(service, GENERATE, answer.request_id) for answer in answers]
    parts = [checked(trace) for trace in traces]
    assert max(parts) >= 0.98, parts  # other processes may delay one between two spans
    made = counted.sum("specrej_engine_tokens_total", kind="generated")
    assert made == sum(answer.usage.generated_tokens for answer in answers)


def checked(trace: list[Seen]) -> float:
    """The part of its time that its steps cover."""
    assert {seen.service for seen in trace} == {"client", *SERVICES}
    assert root_of(trace).service == "client"
    (server,) = (s for s in trace if s.name == GENERATE and s.span.kind == SERVER)
    assert server.attributes[names.REQUEST_MODEL] != "toy"
    return covered(trace, server)
