"""The only package that knows OpenTelemetry: traces, metrics, logs, and the names of all of it."""

from specrej.telemetry import metrics, names
from specrej.telemetry.traces import (
    Span,
    configure,
    end_with_code,
    log_formatter,
    outgoing_metadata,
    server_span,
    set_attributes,
    span,
)

__all__ = [
    "Span",
    "configure",
    "end_with_code",
    "log_formatter",
    "metrics",
    "names",
    "outgoing_metadata",
    "server_span",
    "set_attributes",
    "span",
]
