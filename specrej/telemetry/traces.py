"""Spans of calls and their steps; trace context travels in the calls' metadata.

Without a collector nothing is recorded, and a span costs no more than a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specrej.telemetry import names

Attribute = str | int | float | bool | Sequence[str] | Sequence[float]
Metadata = Iterable[tuple[str, str | bytes]]

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
    return _recorded(name, attributes, kind)


@contextmanager
def _recorded(
    name: str, attributes: Mapping[str, Attribute] | None, kind: SpanKind
) -> Iterator[Span]:
    with (
        _tracer.start_as_current_span(
            name, None, kind, attributes, record_exception=False, set_status_on_exception=False
        ) as current,
        _perhaps_first(current),
    ):
        try:
            yield current
        except BaseException as error:
            current.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
            raise


@contextmanager
def server_span(
    name: str, metadata: Metadata, attributes: Mapping[str, Attribute]
) -> Iterator[Span]:
    """The span of one incoming call, child of the caller's span if the metadata names one."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    with (
        _tracer.start_as_current_span(
            name,
            _CONTEXT.extract(carrier),
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as current,
        _perhaps_first(current),
    ):
        yield current


@contextmanager
def _perhaps_first(current: Span) -> Iterator[None]:
    token = _first.set(current) if _first.get() is None else None
    try:
        yield
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
        self._span = _tracer.start_span(
            method,
            trace.set_span_in_context(first) if first else None,
            SpanKind.CLIENT,
            rpc(method),
        )

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


def end(current: Span, attribute: str, code: str | int) -> None:
    """Record the gRPC or HTTP status of an incoming call on its span."""
    current.set_attribute(attribute, code)
    if code >= 500 if isinstance(code, int) else code in _FAILURES:
        current.set_status(Status(StatusCode.ERROR, str(code)))


def annotate(attributes: Mapping[str, Attribute]) -> None:
    """Add attributes to the current span."""
    trace.get_current_span().set_attributes(attributes)


def rpc(method: str) -> dict[str, Attribute]:
    """Attributes of a span of a gRPC call."""
    return {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
