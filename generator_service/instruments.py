"""Telemetry of a generator: counters of steps, gauges of slots and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from generator_service.engine.commands import Load, Step
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed


def count_step(step: Step) -> None:
    """Count a step; from any thread, in a few microseconds."""
    if step.seconds:
        metrics.record(names.STEP_DURATION, step.seconds)
    if step.rows:
        metrics.record(names.STEP_ROWS, step.rows)
    for kind, tokens in (
        ("generated", step.generated),
        ("prefilled", step.prefilled),
        ("reused", step.reused),
    ):
        if tokens:
            metrics.add(names.ENGINE_TOKENS, tokens, kind=kind)


def observe(load: Callable[[], Load]) -> None:
    """Register gauges that show slots and sessions as `load` returns them."""

    def slots() -> Iterator[Observed]:
        gauge = load().slots
        yield gauge.owned, {"state": "owned"}
        yield gauge.cached, {"state": "cached"}
        yield gauge.capacity - gauge.owned - gauge.cached, {"state": "free"}

    def sessions() -> Iterator[Observed]:
        now = load()
        yield now.sessions, {"state": "open"}
        yield now.waiting, {"state": "waiting"}

    metrics.observe(names.SLOTS, slots)
    metrics.observe(names.SESSIONS, sessions)
