"""Traces, metrics, logs and their names; the only package that imports OpenTelemetry.

Spans of calls are our own: the aio server interceptor of opentelemetry-instrumentation-grpc 0.66b2
iterates over what a handler of a stream returns, so handlers that are coroutines, as all of ours,
fail; it also records the text of exceptions, which may quote a prompt, and has no metrics.
"""

from specrej.telemetry import metrics, names
from specrej.telemetry.logs import log_formatter, note
from specrej.telemetry.setup import configured
from specrej.telemetry.traces import (
    NO_SPAN,
    UNTRACED,
    Call,
    ClientSpan,
    Span,
    SpanKind,
    annotate,
    served,
    served_http,
    span,
)

__all__ = [
    "UNTRACED",
    "Call",
    "NO_SPAN",
    "ClientSpan",
    "Span",
    "SpanKind",
    "annotate",
    "configured",
    "log_formatter",
    "metrics",
    "names",
    "note",
    "served",
    "served_http",
    "span",
]
