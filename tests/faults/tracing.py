"""Telemetry, as a collector sees it: server spans with their codes, one trace across services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specrej.telemetry import names
from tests.collector import SERVER, Collector, Seen, collecting
from tests.faults.case import Case, elsewhere, here
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.world import SERVICES, World, until, world

_GENERATE = "specrej.v1.OrchestratorService/Generate"


def _generate_spans(collector: Collector) -> list[Seen]:
    """The orchestrator's server spans of Generate."""
    return collector.named(_GENERATE, kind=SERVER)


@asynccontextmanager
async def collected() -> AsyncIterator[tuple[Collector, World]]:
    """A world of its own that sends its spans to a collector."""
    async with collecting() as collector:
        told = {f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": collector.endpoint for name in SERVICES}
        async with world({**told, "OTEL_BSP_SCHEDULE_DELAY": "100"}) as traced:
            yield collector, traced


async def server_spans(_: World) -> list[str]:
    """Each call is one server span that knows its code, also a cancelled one."""
    async with collected() as (collector, traced):
        codes = [(await traced.ask()).code, (await traced.ask(n=-1)).code]
        async with held_at(FIRST_ROUND, traced) as call:
            call.cancel()
            codes.append((await call.outcome()).code)

        async def all_here() -> bool:
            return len(_generate_spans(collector)) >= len(codes)

        await until(all_here)
        told = sorted(seen.attributes[names.RPC_CODE] for seen in _generate_spans(collector))
        assert told == sorted(codes), f"spans say {told}"
        await traced.settle()
        return codes


async def one_trace(_: World) -> list[str]:
    """A request is one trace through all three services."""
    async with collected() as (collector, traced):
        codes = [(await traced.ask()).code]

        async def all_here() -> bool:
            traces = {seen.span.trace_id for seen in _generate_spans(collector)}
            told = (seen for trace_id in traces for seen in collector.trace(trace_id))
            return {seen.service for seen in told} == set(SERVICES)

        await until(all_here)
        assert len(_generate_spans(collector)) == 1
        await traced.settle()
        return codes


CASES: tuple[Case, ...] = (
    here("telemetry/server-spans", server_spans, "OK", "INVALID_ARGUMENT", "CANCELLED", limit_s=60),
    here("telemetry/one-trace", one_trace, "OK", limit_s=60),
    elsewhere(
        "telemetry/logs-in-trace",
        "tests/telemetry/test_traces.py::test_logs_of_a_request_are_in_its_trace",
    ),
    elsewhere("telemetry/sums", "tests/telemetry/test_metrics.py::test_calls_reconcile"),
    elsewhere("telemetry/alerts", "tests/deploy/test_dashboards.py::test_every_series_is_told"),
    elsewhere("soak/metric-series", "tests/faults/soak.py"),
)
