"""Open-loop users: `locust -f loadtest/openloop.py --users 4 --rate 0.5 ...`.

Each user sends --rate requests per second as a Poisson process and does not wait for answers.
Times count from the moment a request was due, so a slow client or service does not hide delays.
Requests sent more than 50 ms late are counted as "late start", requests that were not sent, because
--max-in-flight of the user were unanswered, as "missed".
"""

from __future__ import annotations

import random
import time
from typing import Any

from gevent.pool import Pool  # type: ignore[import-untyped]
from locust import events, task

from loadtest import options, shapes, thresholds
from loadtest.arrivals import LATE_S, poisson
from loadtest.thresholds import Kind
from loadtest.users import ApiUser, CallFailed
from loadtest.workload import LoadRequest

events.init_command_line_parser.add_listener(options.add_options)  # type: ignore[no-untyped-call]
events.init.add_listener(shapes.use_shape)  # type: ignore[no-untyped-call]
events.quitting.add_listener(thresholds.judge)  # type: ignore[no-untyped-call]


class PoissonUser(ApiUser):
    """A source of streaming requests."""

    def on_start(self) -> None:
        """Connect and draw the first arrival."""
        super().on_start()
        parsed: Any = self.environment.parsed_options
        self._pool = Pool(parsed.max_in_flight)
        self._started = time.perf_counter()
        self._arrivals_s = poisson(parsed.rate, random.SystemRandom().getrandbits(64))
        self._due = self._started + next(self._arrivals_s)

    def wait_time(self) -> float:
        """Seconds until the next request is due."""
        return max(0.0, self._due - time.perf_counter())

    @task
    def arrive(self) -> None:
        """Send the request that is due; do not wait for its answer."""
        late_s = time.perf_counter() - self._due
        if late_s < 0:  # Locust does not wait before the first task.
            return
        request, due = next(self.requests), self._due
        self._due = self._started + next(self._arrivals_s)
        if self._pool.full():
            self.fire(Kind.MISSED, request, late_s)
            return
        if late_s > LATE_S:
            self.fire(Kind.LATE, request, late_s)
        self._pool.spawn(self._send, request, due)

    def on_stop(self) -> None:
        """Wait up to --stop-timeout for calls; report unfinished ones as failed."""
        try:
            self._pool.join(timeout=self.environment.stop_timeout or 0)
        finally:
            # A killed greenlet reports nothing itself.
            for greenlet in list(self._pool):
                request, due = greenlet.args
                seconds = time.perf_counter() - due
                self.fire(Kind.FAILED, request, seconds, 0, CallFailed("UNFINISHED"))
            super().on_stop()
            self._pool.kill(block=False)

    def _send(self, request: LoadRequest, due: float) -> None:
        self.report(request, self.caller.stream(request.prompt, due, **request.options))
