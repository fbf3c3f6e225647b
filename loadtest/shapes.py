"""The number of users over time, as shapes for Locust."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from locust import LoadTestShape

from loadtest.options import counts
from loadtest.workload import constant, ramp, spike

# Users start and stop per second: effectively at once.
_SPAWN_RATE = 100.0


class Shape(LoadTestShape):
    """A curve over --run-time; reads the options at each tick, as the page can change them."""

    abstract = True
    use_common_options = True
    curve: ClassVar[Callable[[float, float, int], int]]

    def tick(self) -> tuple[int, float] | None:
        """The number of users and the spawn rate; None ends the test."""
        assert self.runner
        parsed: Any = self.runner.environment.parsed_options
        elapsed_s = self.get_run_time()  # type: ignore[no-untyped-call]
        length_s = self.length_s(parsed)
        if elapsed_s >= length_s:
            return None
        return type(self).curve(elapsed_s, length_s, parsed.num_users or 1), _SPAWN_RATE

    def length_s(self, parsed: Any) -> float:
        """Seconds until the test ends."""
        return float(parsed.run_time or 60)


class Ramp(Shape):
    """From one user to all."""

    curve = ramp


class Spike(Shape):
    """A tenth of the users, all, a tenth."""

    curve = spike


class Steps(Shape):
    """All users until every --n was used."""

    curve = constant

    def length_s(self, parsed: Any) -> float:
        return len(counts(parsed.n)) * float(parsed.step_seconds)


def use_shape(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`: use the shape that --shape names; otherwise Locust would use the
    first one in the file."""
    name = environment.parsed_options.shape.title()
    environment.shape_class = environment.available_shape_classes.get(name)
    if environment.shape_class:
        environment.shape_class.runner = environment.runner
