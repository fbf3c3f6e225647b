"""Traces, metrics, logs and their names; the only package that imports OpenTelemetry."""

from specrej.telemetry import metrics, names
from specrej.telemetry.calls import Call, served, served_http
from specrej.telemetry.logs import log_formatter, note
from specrej.telemetry.setup import configured
from specrej.telemetry.traces import NO_SPAN, UNTRACED, ClientSpan, Span, SpanKind, annotate, span

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
