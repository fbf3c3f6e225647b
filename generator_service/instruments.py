"""What telemetry is told of a generator; the engine itself knows no telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from generator_service.steps import Load, Step
from specrej.telemetry import metrics, names
from specrej.telemetry.metrics import Observed


def count_step(step: Step) -> None:
    """From any thread, a few microseconds."""
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
    """From now on gauges show slots and sessions."""

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
