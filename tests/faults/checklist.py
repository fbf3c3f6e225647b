"""The faults that the service must survive, as the cases that cover them."""

from __future__ import annotations

from tests.faults import (
    bad_input,
    bounds,
    caching,
    cancellation,
    control_tokens,
    engines,
    killed,
    load,
    readers,
    redis_faults,
    remote_rewards,
    starts,
    steps,
    stream_order,
    trust,
)
from tests.faults.case import Case

# How many faults each group has, so that no case goes missing; cases add variants.
NUM_FAULTS = {
    "faults": 40,
    "order": 9,
    "cancel": 9,
    "bad": 26,
    "bounds": 3,
    "load": 9,
    "readers": 4,
    "soak": 3,
    "starts": 7,
    "cache": 2,
    "telemetry": 5,
    "trust": 9,
    "remote": 4,
}
_COLLECTOR = "telemetry/test_setup.py::test_a_dead_collector_does_not_delay_the_end"
_ELSEWHERE = {
    "faults/collector-down": _COLLECTOR,
    "faults/collector-hanging": _COLLECTOR,
    "telemetry/server-spans": "telemetry/test_traces.py"
    "::test_cancelled_calls_end_their_spans_with_the_code",
    "telemetry/one-trace": "telemetry/test_traces.py"
    "::test_a_request_is_one_trace_through_everything",
    "telemetry/logs-in-trace": "telemetry/test_traces.py::test_logs_of_a_request_are_in_its_trace",
    "telemetry/sums": "telemetry/test_metrics.py::test_calls_reconcile",
    "telemetry/alerts": "deploy/test_dashboards.py::test_every_queried_series_is_emitted",
    "soak/flat": "faults/soak.py",
    "soak/positive-control": "faults/soak.py",
    "soak/metric-series": "faults/soak.py",
}

CASES: tuple[Case, ...] = (
    *killed.CASES,
    *engines.CASES,
    *redis_faults.CASES,
    *stream_order.CASES,
    *cancellation.CASES,
    *bad_input.CASES,
    *bounds.CASES,
    *control_tokens.CASES,
    *load.CASES,
    *readers.CASES,
    *starts.CASES,
    *steps.CASES,
    *caching.CASES,
    *trust.CASES,
    *remote_rewards.CASES,
    *(Case(name, elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
)
