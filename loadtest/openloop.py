"""Requests that come as they please: `locust -f loadtest/openloop.py --users 4 --rate 0.5 ...`.

Each user is a source of its own and sends --rate requests per second, as a Poisson process. Nobody
waits for an answer before the next request is sent. Times are measured from the moment a request
was due, so that a client or a service that falls behind does not hide its delay. What was sent more
than 50 ms late is counted ("late start"), as is what was not sent at all ("missed").
"""

from __future__ import annotations

import random
import time
from typing import Any

from gevent.pool import Pool  # type: ignore[import-untyped]
from locust import events, task

from loadtest import options, shapes, thresholds
from loadtest.arrivals import LATE_S, poisson
from loadtest.kinds import FAILED, LATE, MISSED
from loadtest.questions import Question
from loadtest.users import AskingUser, CallFailed

events.init_command_line_parser.add_listener(options.add_options)  # type: ignore[no-untyped-call]
events.init.add_listener(shapes.use_shape)  # type: ignore[no-untyped-call]
events.quitting.add_listener(thresholds.judge)  # type: ignore[no-untyped-call]


class PoissonUser(AskingUser):
    """A source of streaming requests."""

    def on_start(self) -> None:
        """Connect and draw the first arrival."""
        super().on_start()
        parsed: Any = self.environment.parsed_options
        self._pool = Pool(parsed.max_in_flight)
        self._began = time.perf_counter()
        self._arrivals = poisson(parsed.rate, random.SystemRandom().getrandbits(64))
        self._due = self._began + next(self._arrivals)

    def wait_time(self) -> float:
        """Seconds until the next request is due."""
        return max(0.0, self._due - time.perf_counter())

    @task
    def arrive(self) -> None:
        """Send what is due, and wait for nothing."""
        late_s = time.perf_counter() - self._due
        if late_s < 0:  # Locust does not wait before the first task.
            return
        asked, due = next(self.questions), self._due
        self._due = self._began + next(self._arrivals)
        if self._pool.full():
            self.fire(MISSED, asked, late_s)
            return
        if late_s > LATE_S:
            self.fire(LATE, asked, late_s)
        self._pool.spawn(self._ask, asked, due)

    def on_stop(self) -> None:
        """Wait for what is under way, as long as --stop-timeout; the rest has failed."""
        try:
            self._pool.join(timeout=self.environment.stop_timeout or 0)
        finally:
            # Greenlets that are killed report nothing by themselves.
            for greenlet in list(self._pool):
                asked, due = greenlet.args
                self.fire(FAILED, asked, time.perf_counter() - due, 0, CallFailed("UNFINISHED"))
            super().on_stop()
            self._pool.kill(block=False)

    def _ask(self, asked: Question, due: float) -> None:
        self.report(asked, self.caller.stream(asked.prompt, due, **asked.options))
