"""Telemetry of one incoming call or HTTP request: a span, counts by code, a log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from specrej.telemetry import logs, metrics, names, traces

log = logging.getLogger(f"{names.NAMESPACE}.requests")


@dataclass(slots=True)
class Call:
    """The name of the gRPC status, or the HTTP status, that the call ends with."""

    code: str | int


class _Protocol(NamedTuple):
    in_flight: names.Metric
    duration: names.Metric
    code: str  # name of the attribute and label
    field: str  # the same in the log


# Of RFC 9110 and RFC 5789; OpenTelemetry's conventions have _OTHER for all others.
_HTTP_METHODS = frozenset(
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]
)

_GRPC = _Protocol(names.RPC_IN_FLIGHT, names.RPC_DURATION, names.RPC_CODE, "code")
_HTTP = _Protocol(names.HTTP_IN_FLIGHT, names.HTTP_DURATION, names.HTTP_STATUS, "status")


def served(method: str, metadata: traces.Metadata) -> AbstractContextManager[Call]:
    """A call of `method` ("package.Service/Method") for as long as the context lasts.

    The interceptor sets `code` if it is not OK. A call with noted facts is logged when it ends.
    """
    labels = {names.RPC_METHOD: method}
    metrics.add(names.RPC_STARTED, 1, **labels)
    span = traces.server_span(method, metadata, traces.rpc(method))
    return _served(Call("OK"), span, _GRPC, labels, {})


def served_http(method: str, route: str, headers: traces.Metadata) -> AbstractContextManager[Call]:
    """An HTTP request to `route`, a template, for as long as the context lasts; see `served`."""
    labels = {names.HTTP_ROUTE: route}
    # Unauthenticated callers cannot choose span names.
    method = method if method in _HTTP_METHODS else "_OTHER"
    span = traces.server_span(f"{method} {route}", headers, {names.HTTP_METHOD: method, **labels})
    return _served(Call(200), span, _HTTP, labels, {"route": route})


@contextmanager
def _served(
    call: Call,
    server_span: AbstractContextManager[traces.Span],
    protocol: _Protocol,
    labels: Mapping[str, str],
    logged: Mapping[str, str],
) -> Iterator[Call]:
    began = time.perf_counter()
    metrics.add(protocol.in_flight, 1, **labels)
    with server_span as span, logs.noting() as facts:
        try:
            yield call
        finally:
            seconds = time.perf_counter() - began
            traces.end(span, protocol.code, call.code)
            metrics.record(protocol.duration, seconds, **labels, **{protocol.code: call.code})
            metrics.add(protocol.in_flight, -1, **labels)
            if facts:
                ending = {protocol.field: call.code, "total_ms": round(seconds * 1e3, 3)}
                logs.log_facts(log, "request", {**facts, **logged, **ending})
