"""The number of users over time, as shapes for Locust."""

from __future__ import annotations

import math
from typing import Any

from locust import LoadTestShape

from loadtest.options import counts

# Users start and stop per second: effectively at once.
_SPAWN_RATE = 100.0


class Shape(LoadTestShape):
    """A curve over --run-time; reads the options at each tick, as the page can change them."""

    abstract = True
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """The number of users and the spawn rate; None ends the test."""
        assert self.runner
        parsed: Any = self.runner.environment.parsed_options
        elapsed_s = self.get_run_time()  # type: ignore[no-untyped-call]
        share = elapsed_s / self.length_s(parsed)
        return None if share >= 1 else (self.users(share, parsed.num_users or 1), _SPAWN_RATE)

    def length_s(self, parsed: Any) -> float:
        """Seconds until the test ends."""
        return float(parsed.run_time or 60)

    @staticmethod
    def users(share: float, most: int) -> int:
        """The number of users after a share of the time, from 0 to 1."""
        raise NotImplementedError


class Ramp(Shape):
    """From one user to all, evenly."""

    @staticmethod
    def users(share: float, most: int) -> int:
        return min(most, 1 + math.floor(most * share))


class Spike(Shape):
    """A tenth of the users, all in the middle third, a tenth again."""

    @staticmethod
    def users(share: float, most: int) -> int:
        return most if 1 / 3 <= share < 2 / 3 else max(1, most // 10)


class Steps(Shape):
    """All users until every --n was used."""

    def length_s(self, parsed: Any) -> float:
        return len(counts(parsed.n)) * float(parsed.step_seconds)

    @staticmethod
    def users(share: float, most: int) -> int:
        return most


def use_shape(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`: use the shape that --shape names; otherwise Locust would use the
    first one in the file."""
    name = environment.parsed_options.shape.title()
    environment.shape_class = environment.available_shape_classes.get(name)
    if environment.shape_class:
        environment.shape_class.runner = environment.runner
