"""Traces, metrics, logs and their names; the only package that imports OpenTelemetry.

Spans of calls are our own: the aio server interceptor of opentelemetry-instrumentation-grpc 0.66b2
iterates over what a handler of a stream returns, so handlers that are coroutines, as all of ours,
fail; it also records the text of exceptions, which may quote a prompt, and has no metrics.
"""

from specrej.telemetry import metrics as metrics
from specrej.telemetry import names as names
from specrej.telemetry.logs import log_formatter as log_formatter
from specrej.telemetry.logs import note as note
from specrej.telemetry.setup import configured as configured
from specrej.telemetry.traces import NO_SPAN as NO_SPAN
from specrej.telemetry.traces import UNTRACED as UNTRACED
from specrej.telemetry.traces import Call as Call
from specrej.telemetry.traces import ClientSpan as ClientSpan
from specrej.telemetry.traces import Span as Span
from specrej.telemetry.traces import SpanKind as SpanKind
from specrej.telemetry.traces import annotate as annotate
from specrej.telemetry.traces import served as served
from specrej.telemetry.traces import served_http as served_http
from specrej.telemetry.traces import span as span
