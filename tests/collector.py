"""An OTLP collector: a real gRPC server that keeps the spans and metrics it receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

HOST = "127.0.0.1"
SERVER, CLIENT = trace_pb2.Span.SPAN_KIND_SERVER, trace_pb2.Span.SPAN_KIND_CLIENT


@dataclass(frozen=True, slots=True)
class Seen:
    """A span, and the service that sent it."""

    service: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def attributes(self) -> dict[str, Any]:
        return {item.key: _plain(item.value) for item in self.span.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span, and the last export of every metric of every service."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.metrics: dict[tuple[str, str], metrics_pb2.Metric] = {}  # by service and name
        # Trace ids by metric; an exemplar is sent once.
        self.exemplars: defaultdict[str, set[bytes]] = defaultdict(set)
        self.resources: dict[str, dict[str, Any]] = {}  # by service
        self.endpoint = ""

    async def Export(  # type: ignore[override] # noqa: N802
        self, request: Any, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for sent in request.resource_spans:
            service = self._service(sent)
            for scope in sent.scope_spans:
                self.spans += [Seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def take_metrics(self, request: Any) -> None:
        for sent in request.resource_metrics:
            service = self._service(sent)
            for scope in sent.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[service, metric.name] = metric
                    exemplars = (item for point in points(metric) for item in point.exemplars)
                    self.exemplars[metric.name] |= {item.trace_id for item in exemplars}

    def named(self, name: str, *, kind: int | None = None) -> list[Seen]:
        """Spans of a name, and of a kind if one is given."""
        return [seen for seen in self.spans if seen.name == name and kind in (None, seen.span.kind)]

    def trace(self, trace_id: bytes) -> list[Seen]:
        """All spans of one trace."""
        return [seen for seen in self.spans if seen.span.trace_id == trace_id]

    def _service(self, sent: Any) -> str:
        attributes = {item.key: _plain(item.value) for item in sent.resource.attributes}
        self.resources[attributes["service.name"]] = attributes
        return str(attributes["service.name"])


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def Export(  # type: ignore[override] # noqa: N802
        self, request: Any, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._collector.take_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens at its `endpoint`."""
    collector, server = Collector(), grpc.aio.server()
    add_traces: Callable[..., None] = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics: Callable[..., None] = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(collector, server)
    add_metrics(_Metrics(collector), server)
    collector.endpoint = f"http://{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def points(metric: metrics_pb2.Metric) -> Iterator[Any]:
    """Data points of any kind of metric."""
    yield from getattr(metric, str(metric.WhichOneof("data"))).data_points


def labels_of(point: Any) -> dict[str, Any]:
    """The attributes of a data point."""
    return {item.key: _plain(item.value) for item in point.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
