"""Steps through several N, as a shape for Locust."""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

from loadtest.options import counts

# Users start and stop per second: effectively at once.
_SPAWN_RATE = 100.0


class Steps(LoadTestShape):
    """All users until every --n was used; reads the options at each tick, as the page can change
    them."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """The number of users and the spawn rate; None ends the test."""
        assert self.runner
        parsed: Any = self.runner.environment.parsed_options
        elapsed_s = self.get_run_time()  # type: ignore[no-untyped-call]
        is_over = elapsed_s >= len(counts(parsed.n)) * float(parsed.step_seconds)
        return None if is_over else (parsed.num_users or 1, _SPAWN_RATE)


def use_shape(environment: Any, **_: Any) -> None:
    """Listener of Locust's `init`: use the shape that --shape names; otherwise Locust would use the
    one in the file."""
    name = environment.parsed_options.shape.title()
    environment.shape_class = environment.available_shape_classes.get(name)
    if environment.shape_class:
        environment.shape_class.runner = environment.runner
