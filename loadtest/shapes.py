"""The number of users over time, as shapes for Locust."""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

from loadtest.curves import constant, ramp, spike
from loadtest.options import counts

# Users start and stop per second: effectively at once.
_SPAWN_RATE = 100.0


_SHAPES = {"ramp": ramp, "spike": spike, "steps": constant}


class Shape(LoadTestShape):
    """The shape that --shape names. It lasts --run-time; steps last until every --n was used."""

    # Locust would instantiate a concrete class that it finds in a locustfile.
    abstract = True

    def __init__(self, parsed: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._users_at = _SHAPES[parsed.shape]
        self._users = parsed.num_users or 1
        steps_s = len(counts(parsed.n)) * parsed.step_seconds
        self._length_s = steps_s if parsed.shape == "steps" else parsed.run_time or 60

    def tick(self) -> tuple[int, float] | None:
        """The number of users and the spawn rate; None ends the test."""
        elapsed_s = self.get_run_time()  # type: ignore[no-untyped-call]
        if elapsed_s >= self._length_s:
            return None
        return self._users_at(elapsed_s, self._length_s, self._users), _SPAWN_RATE


def use_shape(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`; workers get their number of users from the master."""
    parsed = environment.parsed_options
    if parsed.shape != "constant" and not parsed.worker:
        environment.shape_class = Shape(parsed)
        environment.shape_class.runner = environment.runner
