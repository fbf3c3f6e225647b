"""The span and the counts of one served call, without exporters."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from specrej import telemetry
from specrej.telemetry import names, traces


def test_a_served_call_is_part_of_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_tracer", TracerProvider().get_tracer("test"))
    caller = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")
    with telemetry.served("service/Method", [caller]):
        context = trace.get_current_span().get_span_context()
    assert trace.format_trace_id(context.trace_id) == "1" * 32


def test_a_call_is_in_flight_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[float] = []

    def add(metric: names.Metric, count: float = 1, **_: Any) -> None:
        counts.extend([count] if metric is names.RPC_IN_FLIGHT else [])

    monkeypatch.setattr(telemetry.metrics, "add", add)
    with telemetry.served("service/Method", ()):
        assert sum(counts) == 1
    assert sum(counts) == 0
