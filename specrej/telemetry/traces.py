"""Spans of calls and their steps; an incoming call also has counts by code and a log line.

Trace context travels in the metadata of calls. Without a collector nothing is recorded, and a span
costs no more than a call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specrej.telemetry import logs, metrics, names

Attribute = str | int | float | bool | Sequence[str] | Sequence[float]
Metadata = Iterable[tuple[str, str | bytes]]

log = logging.getLogger(f"{names.NAMESPACE}.requests")
_tracer = trace.get_tracer(names.NAMESPACE)

# Without baggage, whose parser logs callers' text, line by line.
_CONTEXT = TraceContextTextMapPropagator()

NO_SPAN = nullcontext(trace.INVALID_SPAN)

# The first span opened in this context, normally that of the served call.
_first: ContextVar[Span | None] = ContextVar("first", default=None)

# Metadata of a call that no service records: W3C trace context with the sampled flag off.
UNTRACED = (("traceparent", "00-00000000000000000000000000000001-0000000000000001-00"),)

# Server failures according to the conventions.
_FAILURES = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
# Of RFC 9110 and RFC 5789; OpenTelemetry's conventions have _OTHER for all others.
_HTTP_METHODS = frozenset(
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]
)


def use_provider() -> None:
    """Record with the provider that was set after this module was imported."""
    global _tracer
    _tracer = trace.get_tracer(names.NAMESPACE)


def span(
    name: str, attributes: Mapping[str, Attribute] | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> AbstractContextManager[Span]:
    """A span inside this process; an exception is recorded by its type only.

    Do not `yield` from a generator inside the context: other code would run in the span. Without a
    collector the current span, which the caller may have sent, stays current.
    """
    if isinstance(_tracer, trace.ProxyTracer):  # no provider is set
        return NO_SPAN
    return _current(name, kind, attributes)


@contextmanager
def _current(
    name: str,
    kind: SpanKind,
    attributes: Mapping[str, Attribute] | None,
    parent: Context | None = None,
) -> Iterator[Span]:
    with _tracer.start_as_current_span(
        name, parent, kind, attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        token = _first.set(current) if _first.get() is None else None
        try:
            yield current
        except BaseException as error:
            if kind is not SpanKind.SERVER:  # a served call ends with its code
                current.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
            raise
        finally:
            if token:
                _first.reset(token)


class ClientSpan:
    """The span of one outgoing call, from construction to `end`; never the current span.

    It may outlive the context in which the call was made, as streams do.
    """

    def __init__(self, method: str, *, outlives: bool = False) -> None:
        """`method`: "package.Service/Method"; `outlives`: a child of the context's first span."""
        first = _first.get() if outlives else None
        parent = trace.set_span_in_context(first) if first else None
        self._span = _tracer.start_span(method, parent, SpanKind.CLIENT, _rpc(method))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Trace context that makes the server's span a child of this one."""
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def end(self, code: str) -> None:
        """End the span with a gRPC status; later calls have no effect."""
        if self._span.is_recording():
            self._span.set_attribute(names.RPC_CODE, code)
            if code != "OK":
                self._span.set_status(Status(StatusCode.ERROR, code))
            self._span.end()


def annotate(attributes: Mapping[str, Attribute]) -> None:
    """Add attributes to the current span."""
    trace.get_current_span().set_attributes(attributes)


def _rpc(method: str) -> dict[str, Attribute]:
    return {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}


@dataclass(slots=True)
class Call:
    """The name of the gRPC status, or the HTTP status, that an incoming call ends with."""

    code: str | int


def served(method: str, metadata: Metadata) -> AbstractContextManager[Call]:
    """A call of `method` ("package.Service/Method") for as long as the context lasts.

    The interceptor sets `code` if it is not OK. A call with noted facts is logged when it ends.
    """
    labels = {names.RPC_METHOD: method}
    metrics.add(names.RPC_STARTED, 1, **labels)
    return _served(Call("OK"), method, metadata, _rpc(method), labels, {})


def served_http(
    method: str, route: str, scheme: str, headers: Metadata
) -> AbstractContextManager[Call]:
    """An HTTP request to `route`, a template, for as long as the context lasts; see `served`."""
    # Unauthenticated callers cannot choose span names.
    method = method if method in _HTTP_METHODS else "_OTHER"
    labels = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route, names.URL_SCHEME: scheme}
    return _served(Call(200), f"{method} {route}", headers, labels, labels, {"route": route})


@contextmanager
def _served(
    call: Call,
    name: str,
    metadata: Metadata,
    attributes: Mapping[str, Attribute],
    labels: Mapping[str, str],
    facts: Mapping[str, str],
) -> Iterator[Call]:
    is_rpc = names.RPC_METHOD in labels
    in_flight = names.RPC_IN_FLIGHT if is_rpc else names.HTTP_IN_FLIGHT
    duration = names.RPC_DURATION if is_rpc else names.HTTP_DURATION
    attribute = names.RPC_CODE if is_rpc else names.HTTP_STATUS
    began = time.perf_counter()
    parent = _CONTEXT.extract({key: text for key, text in metadata if isinstance(text, str)})
    metrics.add(in_flight, 1, **labels)
    with _current(name, SpanKind.SERVER, attributes, parent) as current, logs.noting() as noted:
        try:
            yield call
        finally:
            code, seconds = call.code, time.perf_counter() - began
            current.set_attribute(attribute, code)
            if code in _FAILURES or (isinstance(code, int) and code >= 500):
                current.set_status(Status(StatusCode.ERROR, str(code)))
            metrics.record(duration, seconds, **labels, **{attribute: code})
            metrics.add(in_flight, -1, **labels)
            if noted:
                ending = {"code" if is_rpc else "status": code, "total_ms": round(seconds * 1e3, 3)}
                log.info("request", extra={"facts": {**noted, **facts, **ending}})
