"""Telemetry of one incoming call or HTTP request: a span, counts by code, a log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specrej.telemetry import logs, metrics, names, traces

log = logging.getLogger(f"{names.NAMESPACE}.requests")


@dataclass(slots=True)
class Call:
    """The name of the gRPC status that the call ends with."""

    code: str = "OK"


@contextmanager
def served(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[Call]:
    """A call of `method` ("package.Service/Method") for as long as the context lasts.

    The interceptor sets `code` if it is not OK. A call with noted facts is logged when it ends.
    """
    call, began, labels = Call(), time.perf_counter(), {names.RPC_METHOD: method}
    metrics.add(names.RPC_STARTED, 1, **labels)
    metrics.add(names.RPC_IN_FLIGHT, 1, **labels)
    with traces.server_span(method, metadata) as span, logs.noting() as facts:
        try:
            yield call
        finally:
            seconds = time.perf_counter() - began
            traces.end_with_code(span, call.code)
            metrics.record(names.RPC_DURATION, seconds, **labels, **{names.RPC_CODE: call.code})
            metrics.add(names.RPC_IN_FLIGHT, -1, **labels)
            if facts:
                ending: dict[str, logs.Fact] = {
                    "code": call.code,
                    "total_ms": round(seconds * 1e3, 3),
                }
                logs.log_facts(log, "request", {**facts, **ending})


@dataclass(slots=True)
class HTTPCall:
    """The status that the request ends with."""

    status: int = 200


@contextmanager
def served_http(
    method: str, route: str, headers: Iterable[tuple[str, str | bytes]]
) -> Iterator[HTTPCall]:
    """An HTTP request to `route`, a template, for as long as the context lasts; see `served`."""
    call, began, labels = HTTPCall(), time.perf_counter(), {names.HTTP_ROUTE: route}
    metrics.add(names.HTTP_IN_FLIGHT, 1, **labels)
    with traces.http_span(method, route, headers) as span, logs.noting() as facts:
        try:
            yield call
        finally:
            seconds = time.perf_counter() - began
            traces.end_with_status(span, call.status)
            status = {names.HTTP_STATUS: call.status}
            metrics.record(names.HTTP_DURATION, seconds, **labels, **status)
            metrics.add(names.HTTP_IN_FLIGHT, -1, **labels)
            if facts:
                total_ms = round(seconds * 1e3, 3)
                ending: dict[str, logs.Fact] = {"status": call.status, "total_ms": total_ms}
                logs.log_facts(log, "request", {**facts, "route": route, **ending})
