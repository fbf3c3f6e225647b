"""Spans around calls and what they are made of; traces go on where the metadata says.

Without a collector the API's no-op tracer makes all of this free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

# The first span that was opened in this context: of the call that is served here, mostly.
_first: ContextVar[Span | None] = ContextVar("first", default=None)

# Metadata of a call that belongs to no trace: nobody on its way records it (W3C trace context, the
# sampled flag off).
UNTRACED = (("traceparent", "00-00000000000000000000000000000001-0000000000000001-00"),)

# What the conventions call a server's own failures.
_FAILURES = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)


@contextmanager
def span(
    name: str, attributes: Mapping[str, Attribute] | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> Iterator[Span]:
    """A span inside this process; what ends it early is noted by its kind alone.

    The context must not be left for a while in between: no `yield` of a generator in it.
    """
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
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    with (
        _tracer.start_as_current_span(
            method,
            propagate.extract(carrier),
            SpanKind.SERVER,
            _rpc(method),
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
    """The span of one outgoing call, from now until `end`; never the current one.

    So it may outlive the context in which the call was made, as the calls of streams do.
    """

    def __init__(self, method: str, *, outlives: bool = False) -> None:
        """`method`: "package.Service/Method"; `outlives`: the current span, but not the first."""
        first = _first.get() if outlives else None
        self._span = _tracer.start_span(
            method,
            trace.set_span_in_context(first) if first else None,
            SpanKind.CLIENT,
            _rpc(method),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What makes the span of whoever serves the call a child of this one."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())

    def end(self, code: str) -> None:
        """The call has ended, with this gRPC status; only the first time counts."""
        if self._span.is_recording():
            self._span.set_attribute(names.RPC_CODE, code)
            if code != "OK":
                self._span.set_status(Status(StatusCode.ERROR, code))
            self._span.end()


def end_with_code(current: Span, code: str) -> None:
    """Note the gRPC status of a call that came in on its span."""
    current.set_attribute(names.RPC_CODE, code)
    if code in _FAILURES:
        current.set_status(Status(StatusCode.ERROR, code))


def annotate(attributes: Mapping[str, Attribute]) -> None:
    """Add attributes to the current span."""
    trace.get_current_span().set_attributes(attributes)


def _rpc(method: str) -> dict[str, Attribute]:
    return {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
