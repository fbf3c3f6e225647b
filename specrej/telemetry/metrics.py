"""Instruments by their `names.Metric`; free where nobody exports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Observation

from specrej.telemetry.names import NAMESPACE, Metric

Label = str | int | float | bool

# One of a gauge's values as of now, with its labels.
Observed = tuple[float, dict[str, Label]]
Observe = Callable[[], Iterable[Observed]]

# Instruments made before a provider is set are that provider's, once it is.
_meter = api.get_meter(NAMESPACE)


def add(metric: Metric, count: float = 1, **labels: Label) -> None:
    """To a counter, or to one that also goes down."""
    _counter(metric).add(count, labels)


def record(metric: Metric, value: float, **labels: Label) -> None:
    """One value of a histogram."""
    _histogram(metric).record(value, labels)


def observe(metric: Metric, values: Observe) -> None:
    """From now on a gauge is what `values` returns, whenever it is asked for; from any thread."""

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
