"""The curves of curves.py as Locust's shapes of load."""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

from loadtest.curves import constant, ramp, spike
from loadtest.options import counts

# Users come and go as fast as the shape wants them to.
_PER_SECOND = 100.0


_SHAPES = {"ramp": ramp, "spike": spike, "steps": constant}


class Shape(LoadTestShape):
    """What --shape names, for as long as --run-time, or as --n takes."""

    # Locust would use it without being asked if it were found in a locustfile.
    abstract = True

    def __init__(self, parsed: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._users_at = _SHAPES[parsed.shape]
        self._users = parsed.num_users or 1
        steps_s = len(counts(parsed.n)) * parsed.step_seconds
        self._length_s = steps_s if parsed.shape == "steps" else parsed.run_time or 60

    def tick(self) -> tuple[int, float] | None:
        """Users and how many come or go per second; None at the end."""
        elapsed_s = self.get_run_time()  # type: ignore[no-untyped-call]
        if elapsed_s >= self._length_s:
            return None
        return self._users_at(elapsed_s, self._length_s, self._users), _PER_SECOND


def use_shape(environment: Any, **_: Any) -> None:
    """Listens to Locust's `init`; workers are told how many users to have."""
    parsed = environment.parsed_options
    if parsed.shape != "constant" and not parsed.worker:
        environment.shape_class = Shape(parsed)
        environment.shape_class.runner = environment.runner
