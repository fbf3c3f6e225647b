"""Telemetry of a process: logs to stderr, traces and metrics to a collector.

Metrics are also served at a Prometheus endpoint. Without a collector and a port nothing is kept,
and telemetry costs next to nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from threading import Thread, active_count
from typing import TYPE_CHECKING, Any

from specrej.telemetry import logs, names, traces

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import CollectorRegistry

    from specrej.settings import ProcessSettings

# Time to send pending data when a process ends, and then for cancelled calls to end.
FLUSH_S = 2.0
_CANCELLED_S = 0.5

# The time without a byte after which a connection to the metrics port is closed, and the threads of
# this process beyond which a further connection is.
SILENT_S = 5.0
_MOST_THREADS = 1024
_BACKLOG = 512


@dataclass(slots=True)
class _Outlets:
    """Exporters, and `ends`: functions that send pending data and wait."""

    ends: list[Callable[[], object]] = field(default_factory=list)
    exporters: list[Any] = field(default_factory=list)  # each with a `shutdown`

    def close(self) -> None:
        """Send pending data within a bound, so that no collector delays the end of a process."""
        threads = [Thread(target=end, daemon=True) for end in self.ends]
        for thread in threads:
            thread.start()
        if _all_end(threads, FLUSH_S):
            return
        for exporter in self.exporters:
            exporter.shutdown()  # ends its retries
        _all_end(threads, _CANCELLED_S)


def _all_end(threads: list[Thread], bound_s: float) -> bool:
    until = time.monotonic() + bound_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


@contextmanager
def configured(service: str, settings: ProcessSettings) -> Iterator[None]:
    """Set up telemetry from the settings for the context; once per process.

    Leaving takes at most 2.5 seconds, whether or not pending data can be sent.

    Raises:
        OSError: the metrics port cannot be bound.
    """
    logs.configure(
        service,
        settings.log_level,
        as_json=settings.log_format == "json",
        error_text=settings.log_error_text,
    )
    outlets = _Outlets()
    if settings.otlp_endpoint or settings.metrics_port:
        _open(outlets, service, settings)
    try:
        yield
    finally:
        outlets.close()


def _open(outlets: _Outlets, service: str, settings: ProcessSettings) -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    resource = _resource(service)
    readers: list[MetricReader] = []
    if settings.metrics_port:
        readers.append(_prometheus(settings))
    if settings.otlp_endpoint:
        readers.append(_send(outlets, resource, settings.otlp_endpoint))
    provider = MeterProvider(readers, resource, shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    outlets.ends.append(provider.shutdown)


def _resource(service: str) -> Resource:
    from opentelemetry.sdk.resources import Resource

    instance = Resource({names.SERVICE_INSTANCE: str(uuid.uuid4())})
    named = {names.SERVICE_NAME: service, names.SERVICE_NAMESPACE: names.NAMESPACE}
    named[names.SERVICE_VERSION] = version("specrej")
    return instance.merge(Resource.create(named))  # OTEL_RESOURCE_ATTRIBUTES may name another


def _send(outlets: _Outlets, resource: Resource, endpoint: str) -> MetricReader:
    """Send spans from now on; the reader sends metrics."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter, sender = OTLPSpanExporter(endpoint=endpoint), OTLPMetricExporter(endpoint=endpoint)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    traces.use_provider()
    outlets.exporters += [exporter, sender]
    outlets.ends.append(provider.shutdown)
    return PeriodicExportingMetricReader(sender)


def _prometheus(settings: ProcessSettings) -> MetricReader:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    host = settings.host.strip("[]")
    try:
        serve_metrics(settings.metrics_port, host, registry)
    except OSError as error:
        address = f"{host}:{settings.metrics_port}"
        raise OSError(f"cannot listen on {address} (metrics_port)") from error
    return reader


def serve_metrics(port: int, host: str, registry: CollectorRegistry) -> WSGIServer:
    """Serve the metrics of a registry over HTTP until the process ends; a thread per connection, in
    a bounded number; silent ones are closed. On loopback the `Host` must be, too: a web page whose
    own name resolves to this machine (DNS rebinding) must not read them. Elsewhere Prometheus uses
    names that this process does not know, and policies decide who may connect.

    Raises:
        OSError: the address cannot be bound.
    """
    from prometheus_client import start_http_server

    from specrej.security import is_loopback

    server, _ = start_http_server(port, host, registry)
    handler: Any = server.RequestHandlerClass
    # Otherwise each connection that sends nothing would hold a thread.
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": SILENT_S})
    server.socket.listen(_BACKLOG)  # the library's 5 would delay all connections of a flood
    server.verify_request = lambda *_: active_count() < _MOST_THREADS  # type: ignore[method-assign]
    app: Any = server.get_app()

    def checked(environ: dict[str, Any], start: Any) -> Any:
        named = environ.get("HTTP_HOST", host)
        if is_loopback(host) and not is_loopback(named.rpartition(":")[0] or named):
            start("403 Forbidden", [])
            return []
        return app(environ, start)

    server.set_app(checked)
    return server
