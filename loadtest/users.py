"""Locust users of the public API. Rows are reported by `Kind`; a response's length is its number of
generated tokens. Each user waits for its answer before it sends the next request.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent as grpc_gevent
from gevent.pool import Pool  # type: ignore[import-untyped]
from locust import User, events, stats, task
from locust.env import Environment

from loadtest.bought import Kind
from loadtest.calls import Caller
from loadtest.workload import LoadRequest, requests
from specrej.security import credentials_from

# Must run before the first channel is created: otherwise one call blocks all users.
grpc_gevent.init_gevent()

# Four digits: Locust's own two are up to 5 % off.
stats.bucket_response_time = lambda response_time: round(float(f"{response_time:.4g}"))

_MAX_PAUSE_S = 0.1  # between an answer and the next request


class CallFailed(Exception):
    """A call without an answer; Locust shows it as the name of its status."""

    def __repr__(self) -> str:
        return str(self)


class _Test:
    """The requests of one test, which the users of this process share: none is sent twice."""

    _requests: Iterator[LoadRequest] | None = None

    def begin(self, **_: Any) -> None:
        self._requests = None

    def requests(self, environment: Environment) -> Iterator[LoadRequest]:
        if not self._requests:
            worker = max(0, getattr(environment.runner, "worker_index", 0))
            self._requests = requests(environment.parsed_options, worker)
        return self._requests


_test = _Test()
events.test_start.add_listener(_test.begin)  # type: ignore[no-untyped-call]


def _update_loop_time(**_: Any) -> None:
    # gevent's clock stands at a time before the imports: --run-time would be a second shorter.
    gevent.get_hub().loop.update_now()


events.init.add_listener(_update_loop_time)  # type: ignore[no-untyped-call]


class ApiUser(User):
    """A connection and a sequence of requests."""

    def on_start(self) -> None:
        """Connect with the credentials of the command line's environment variables."""
        parsed: Any = self.environment.parsed_options
        self.caller = Caller(
            self.host or "127.0.0.1:50050", parsed.request_timeout, **credentials_from(os.environ)
        )
        self.requests = _test.requests(self.environment)
        self._pool = Pool()

    def on_stop(self) -> None:
        """Wait up to --stop-timeout for a call, report an unfinished one as failed, and disconnect.

        Locust does not wait for a user's call, so the call has a greenlet of its own.
        """
        try:
            self._pool.join(timeout=self.environment.stop_timeout or 0)
        finally:
            # A killed greenlet reports nothing itself.
            for greenlet in list(self._pool):
                request, started = greenlet.args
                seconds = time.perf_counter() - started
                self.fire(Kind.FAILED, request, seconds, 0, CallFailed("UNFINISHED"))
            self._pool.kill(block=False)  # first: a call that close() cancels would report itself
            self.caller.close()

    def wait_time(self) -> float:
        """Seconds until the next request."""
        return random.uniform(0, _MAX_PAUSE_S)

    @task
    def send(self) -> None:
        """Send one request and wait for its answer."""
        self._pool.spawn(self._call, next(self.requests), time.perf_counter()).get()

    def _call(self, request: LoadRequest, _started: float) -> None:
        outcome = self.caller.generate(request.prompt, **request.options)
        if outcome.code != "OK":
            self.fire(Kind.FAILED, request, outcome.seconds, 0, CallFailed(outcome.code))
        else:
            self.fire(Kind.ANSWER, request, outcome.seconds, outcome.tokens)
            row = self.environment.stats.entries[request.label, Kind.REWARD.value]
            row.log(outcome.reward * 1e3, outcome.tokens)

    def fire(
        self,
        kind: Kind,
        request: LoadRequest,
        seconds: float,
        tokens: int,
        failure: Exception | None = None,
    ) -> None:
        """Add a call to the row of this kind and label, and to the totals."""
        self.environment.events.request.fire(
            request_type=kind.value,
            name=request.label,
            response_time=seconds * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )
