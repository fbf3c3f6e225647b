"""The only file that knows OpenTelemetry: spans around calls and rounds, logs with trace ids.

Without an OTLP endpoint the API's no-op tracer makes all of this free.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

Attribute = str | int | float | bool

_tracer = trace.get_tracer("specrej")

_MAX_CHAIN = 8  # of exceptions that led to each other, in a log

__all__ = [
    "Span",
    "configure",
    "end_with_code",
    "log_formatter",
    "outgoing_metadata",
    "server_span",
    "set_attributes",
    "span",
]


def configure(
    service: str, otlp_endpoint: str, log_level: str, *, log_error_text: bool = False
) -> None:
    """Set up logs, and the exporter if there is an endpoint; once per process, before any span."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(service, error_text=log_error_text))
    logging.basicConfig(level=log_level, handlers=[handler])
    if not otlp_endpoint:
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=otlp_endpoint.startswith("http:"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def log_formatter(service: str, *, error_text: bool = False) -> logging.Formatter:
    """The format of a service's logs; `error_text`: exceptions may say what they were about."""
    kind = logging.Formatter if error_text else _WithoutErrorText
    return kind(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s")


class _WithoutErrorText(logging.Formatter):
    """Tells where and of what kind exceptions were, not their text: it may quote a prompt."""

    def format(self, record: logging.LogRecord) -> str:
        # Other handlers leave what they made of the exception on the record, for all.
        cached, record.exc_text = record.exc_text, None
        try:
            return super().format(record)
        finally:
            record.exc_text = cached

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name of logging's
        error: BaseException | None = ei[1]
        parts: list[str] = []
        while error is not None and len(parts) < _MAX_CHAIN:
            frames = "".join(traceback.format_tb(error.__traceback__))
            parts.append(f"{frames}{type(error).__qualname__}")
            hidden = None if error.__suppress_context__ else error.__context__
            error = error.__cause__ or hidden
        return "\nafter:\n".join(parts)


@contextmanager
def span(name: str, **attributes: Attribute) -> Iterator[Span]:
    """A span inside this process; what ends it early is noted by its kind alone."""
    with _tracer.start_as_current_span(
        name, record_exception=False, set_status_on_exception=False
    ) as current:
        set_attributes(current, **attributes)
        try:
            yield current
        except BaseException as error:
            current.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
            raise


def set_attributes(current: Span, **attributes: Attribute) -> None:
    """Add attributes to a span, in the project's namespace."""
    current.set_attributes({f"specrej.{key}": value for key, value in attributes.items()})


@contextmanager
def server_span(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[Span]:
    """The span of one incoming call, child of the caller's span if the metadata names one."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    with _tracer.start_as_current_span(
        method.lstrip("/"),
        context=propagate.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.method": method.lstrip("/")},
        record_exception=False,
        set_status_on_exception=False,
    ) as current:
        yield current


def end_with_code(current: Span, code: str) -> None:
    """Note a failed call's gRPC status code on its span."""
    current.set_attribute("rpc.response.status_code", code)
    current.set_status(Status(StatusCode.ERROR, code))


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that makes the next service's span a child of the current one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
