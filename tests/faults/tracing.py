"""Telemetry, as a collector sees it: server spans with their codes, one trace across services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.faults.case import Case, here, not_here
from tests.faults.phases import FIRST_ROUND, held_at
from tests.faults.proxy import HOST
from tests.faults.world import SERVICES, World, until, world

_SERVER = trace_pb2.Span.SPAN_KIND_SERVER
_GENERATE = "specrej.v1.OrchestratorService/Generate"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span, with the name of the service it came from."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []

    async def Export(  # noqa: N802
        self, request: Any, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def generate_spans(self) -> list[trace_pb2.Span]:
        """The orchestrator's server spans of Generate."""
        return [s for _, s in self.spans if s.kind == _SERVER and s.name == _GENERATE]


@asynccontextmanager
async def collected() -> AsyncIterator[tuple[Collector, World]]:
    """A world of its own that sends its spans to a collector."""
    collector, server = Collector(), grpc.aio.server()
    register: Callable[..., None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(collector, server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    told = {f"SPECREJ_{name.upper()}_OTLP_ENDPOINT": f"http://{HOST}:{port}" for name in SERVICES}
    try:
        async with world(**told, OTEL_BSP_SCHEDULE_DELAY="100") as traced:
            yield collector, traced
    finally:
        await server.stop(0)


async def server_spans(_: World) -> list[str]:
    """Each call is one server span that knows its code, also a cancelled one."""
    async with collected() as (collector, traced):
        codes = [(await traced.ask()).code, (await traced.ask(n=-1)).code]
        async with held_at(FIRST_ROUND, traced) as call:
            call.cancel()
            codes.append((await call.outcome()).code)

        async def all_here() -> bool:
            return len(collector.generate_spans()) >= len(codes)

        await until(all_here)
        told = sorted(_code(span) for span in collector.generate_spans())
        assert told == sorted(codes), f"spans say {told}"
        await traced.settle()
        return codes


async def one_trace(_: World) -> list[str]:
    """A request is one trace through all three services."""
    async with collected() as (collector, traced):
        codes = [(await traced.ask()).code]

        async def all_here() -> bool:
            traces = {span.trace_id for span in collector.generate_spans()}
            return {n for n, span in collector.spans if span.trace_id in traces} == set(SERVICES)

        await until(all_here)
        assert len(collector.generate_spans()) == 1
        await traced.settle()
        return codes


def _code(span: trace_pb2.Span) -> str:
    told = {each.key: each.value.string_value for each in span.attributes}
    return told.get("rpc.response.status_code", "OK")


_NO_METRICS = "not yet: the services emit no metrics, and there are no alerts that name any"

CASES: tuple[Case, ...] = (
    here("telemetry/server-spans", server_spans, "OK", "INVALID_ARGUMENT", "CANCELLED", limit_s=60),
    here("telemetry/one-trace", one_trace, "OK", limit_s=60),
    not_here("telemetry/logs-in-trace", "not yet: log lines carry no trace id"),
    not_here("telemetry/sums", _NO_METRICS),
    not_here("telemetry/alerts", _NO_METRICS),
    not_here("soak/metric-series", _NO_METRICS),
)
