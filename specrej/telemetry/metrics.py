"""Instruments by their `names.Metric`; without an exporter they cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Observation

from specrej.telemetry.names import NAMESPACE, Metric

Label = str | int | float | bool

# A value of a gauge and its labels.
Observed = tuple[float, dict[str, Label]]
Observe = Callable[[], Iterable[Observed]]

# Instruments created before a provider is set belong to it once it is set.
_meter = api.get_meter(NAMESPACE)


def add(metric: Metric, count: float = 1, **labels: Label) -> None:
    """Add to a counter or an up-down counter."""
    _counter(metric).add(count, labels)


def record(metric: Metric, value: float, **labels: Label) -> None:
    """Record a value of a histogram."""
    _histogram(metric).record(value, labels)


def observe(metric: Metric, values: Observe) -> None:
    """Register the callback of a gauge; the exporter calls it from any thread."""

    def callback(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in values()]

    _meter.create_observable_gauge(metric.name, [callback], metric.unit, metric.description)


@cache
def _counter(metric: Metric) -> api.Counter | api.UpDownCounter:
    make = _meter.create_counter if metric.kind == "counter" else _meter.create_up_down_counter
    return make(metric.name, metric.unit, metric.description)


@cache
def _histogram(metric: Metric) -> api.Histogram:
    return _meter.create_histogram(
        metric.name,
        metric.unit,
        metric.description,
        explicit_bucket_boundaries_advisory=metric.buckets or None,
    )
