"""Gauges of the requests that run and wait, and of the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from orchestrator.cache import tenant_digest
from orchestrator.edge.admission import Admission
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed

_MAX_TENANTS = 10  # in a metric; OpenTelemetry merges those beyond 2,000 different ones


def observe_admission(admission: Admission) -> None:
    """Register gauges of the requests that run and wait; tenants are their digests."""

    def tenants() -> Iterator[Observed]:
        for tenant, tokens in admission.heaviest(_MAX_TENANTS):
            yield tokens, {"tenant": tenant_digest(tenant)}

    metrics.observe(names.REQUESTS_RUNNING, lambda: [(admission.running, {})])
    metrics.observe(names.REQUESTS_QUEUED, lambda: [(admission.queued, {})])
    metrics.observe(names.TOKENS_QUEUED, lambda: [(admission.queued_tokens, {})])
    metrics.observe(names.TENANT_TOKENS, tenants)


def observe_backends(backends: Mapping[str, Callable[[], Mapping[str, int]]]) -> None:
    """Register a gauge of the backends of each kind, by state."""

    def counts() -> Iterator[Observed]:
        for kind, states in backends.items():
            for state, count in states().items():
                yield count, {"kind": kind, "state": state}

    metrics.observe(names.BACKENDS, counts)
