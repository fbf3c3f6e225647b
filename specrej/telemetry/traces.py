"""Spans of calls and their steps; trace context travels in the calls' metadata.

Without a collector nothing is recorded, and a span costs no more than a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from specrej.telemetry import names

__all__ = [
    "UNTRACED",
    "Attribute",
    "ClientSpan",
    "Span",
    "SpanKind",
    "annotate",
    "end_with_code",
    "server_span",
    "span",
]

Attribute = str | int | float | bool | Sequence[str] | Sequence[float]

_tracer = trace.get_tracer(names.NAMESPACE)

_UNRECORDED = nullcontext(trace.INVALID_SPAN)

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
        return _UNRECORDED
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
def server_span(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[Span]:
    """The span of one incoming call, child of the caller's span if the metadata names one."""
    with _serving(method, metadata, _rpc(method)) as current:
        yield current


@contextmanager
def http_span(
    method: str, route: str, headers: Iterable[tuple[str, str | bytes]]
) -> Iterator[Span]:
    """The same for an HTTP request to `route`, a template."""
    attributes: dict[str, Attribute] = {names.HTTP_METHOD: method, names.HTTP_ROUTE: route}
    with _serving(f"{method} {route}", headers, attributes) as current:
        yield current


@contextmanager
def _serving(
    name: str,
    metadata: Iterable[tuple[str, str | bytes]],
    attributes: Mapping[str, Attribute],
) -> Iterator[Span]:
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    with (
        _tracer.start_as_current_span(
            name,
            propagate.extract(carrier),
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
            _rpc(method),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Trace context that makes the server's span a child of this one."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def end(self, code: str) -> None:
        """End the span with a gRPC status; later calls have no effect."""
        if self._span.is_recording():
            self._span.set_attribute(names.RPC_CODE, code)
            if code != "OK":
                self._span.set_status(Status(StatusCode.ERROR, code))
            self._span.end()


def end_with_code(current: Span, code: str) -> None:
    """Record the gRPC status of an incoming call on its span."""
    current.set_attribute(names.RPC_CODE, code)
    if code in _FAILURES:
        current.set_status(Status(StatusCode.ERROR, code))


def end_with_status(current: Span, status: int) -> None:
    """Record the status of an incoming HTTP request on its span."""
    current.set_attribute(names.HTTP_STATUS, status)
    if status >= 500:
        current.set_status(Status(StatusCode.ERROR, str(status)))


def annotate(attributes: Mapping[str, Attribute]) -> None:
    """Add attributes to the current span."""
    trace.get_current_span().set_attributes(attributes)


def _rpc(method: str) -> dict[str, Attribute]:
    return {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
