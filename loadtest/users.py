"""Locust users of the public API. Rows are reported by `Kind`; a response's length is its number of
generated tokens.

With --rate, each user sends that many requests per second as a Poisson process and does not wait
for answers (open loop). Times then count from the moment a request was due, so a slow client or
service does not hide delays. Requests sent more than 50 ms late are counted as "late start",
requests that were not sent, because --max-in-flight of the user were unanswered, as "missed".
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent as grpc_gevent
from gevent.pool import Pool  # type: ignore[import-untyped]
from locust import User, events, stats, task
from locust.env import Environment

from loadtest.bought import CALLS, Kind
from loadtest.calls import Caller, Outcome
from loadtest.workload import LoadRequest, poisson, requests
from specrej.security import credentials_from

# Must run before the first channel is created: otherwise one call blocks all users.
grpc_gevent.init_gevent()

# Four digits: Locust's own two are up to 5 % off.
stats.bucket_response_time = lambda response_time: round(float(f"{response_time:.4g}"))

LATE_S = 0.05  # a request that is sent later than this after it was due counts as late
_MAX_PAUSE_S = 0.1  # of the closed loop, between an answer and the next request


class CallFailed(Exception):
    """A call without an answer; Locust shows it as the name of its status."""

    def __repr__(self) -> str:
        return str(self)


class _Test:
    """The requests of one test, which the users of this process share: none is sent twice.

    Users that start later join the current step.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self, **_: Any) -> None:
        self._started = time.perf_counter()
        self._requests: Iterator[LoadRequest] | None = None

    def requests(self, environment: Environment) -> Iterator[LoadRequest]:
        if not self._requests:
            worker = max(0, getattr(environment.runner, "worker_index", 0))
            self._requests = requests(environment.parsed_options, worker, self._started)
        return self._requests


_test = _Test()
events.test_start.add_listener(_test.begin)  # type: ignore[no-untyped-call]


def _update_loop_time(**_: Any) -> None:
    # gevent's clock stands at a time before the imports: --run-time would be a second shorter.
    gevent.get_hub().loop.update_now()


events.init.add_listener(_update_loop_time)  # type: ignore[no-untyped-call]


class ApiUser(User):
    """Base of all users: a connection and a sequence of requests.

    call: sends one request; a method of `Caller`.
    """

    abstract = True
    call: Callable[..., Outcome]

    def on_start(self) -> None:
        """Connect with the credentials of the command line's environment variables."""
        parsed: Any = self.environment.parsed_options
        self.caller = Caller(
            self.host or "127.0.0.1:50050", parsed.request_timeout, **credentials_from(os.environ)
        )
        self.requests = _test.requests(self.environment)
        self._pool = Pool(parsed.max_in_flight)
        self._is_open_loop = parsed.rate > 0
        if self._is_open_loop:
            self._started = time.perf_counter()
            self._arrivals_s = poisson(parsed.rate, random.SystemRandom().getrandbits(64))
            self._due = self._started + next(self._arrivals_s)

    def on_stop(self) -> None:
        """Wait up to --stop-timeout for calls, report unfinished ones as failed, and disconnect."""
        try:
            self._pool.join(timeout=self.environment.stop_timeout or 0)
        finally:
            # A killed greenlet reports nothing itself.
            for greenlet in list(self._pool):
                request, due = greenlet.args
                seconds = time.perf_counter() - due
                self.fire(Kind.FAILED, request, seconds, 0, CallFailed("UNFINISHED"))
            self._pool.kill(block=False)  # first: a call that close() cancels would report itself
            self.caller.close()

    def wait_time(self) -> float:
        """Seconds until the next request."""
        if self._is_open_loop:
            return max(0.0, self._due - time.perf_counter())
        return random.uniform(0, _MAX_PAUSE_S)

    @task
    def send(self) -> None:
        """Send one request; in the open loop the one that is due, without waiting for it."""
        if self._is_open_loop:
            self._arrive()
        else:
            self._pool.spawn(self._call, next(self.requests), time.perf_counter()).get()

    def fire(
        self,
        kind: Kind,
        request: LoadRequest,
        seconds: float,
        tokens: int = 0,
        failure: Exception | None = None,
    ) -> None:
        """Add one measurement to the row of this kind and label, and to the totals if it is that
        of a call."""
        if kind not in CALLS:
            self.environment.stats.entries[request.label, kind.value].log(seconds * 1e3, tokens)
            return
        self.environment.events.request.fire(
            request_type=kind.value,
            name=request.label,
            response_time=seconds * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )

    def _arrive(self) -> None:
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
        self._pool.spawn(self._call, request, due)

    def _call(self, request: LoadRequest, started: float) -> None:
        outcome = self.call(self.caller, request.prompt, started, **request.options)
        for number, (seconds, tokens) in enumerate(outcome.rounds):
            kind = Kind.BETWEEN_ROUNDS if number else Kind.FIRST_ROUND
            self.fire(kind, request, seconds, tokens)
        if outcome.code != "OK":
            self.fire(Kind.FAILED, request, outcome.seconds, 0, CallFailed(outcome.code))
        else:
            kind = Kind.CACHED if outcome.cached else Kind.ANSWER
            self.fire(kind, request, outcome.seconds, outcome.tokens)
            self.fire(Kind.REWARD, request, outcome.reward, outcome.tokens)


class StreamingUser(ApiUser):
    """Sends streaming requests, whose rounds are timed."""

    weight = 3
    call = staticmethod(Caller.stream)


class UnaryUser(ApiUser):
    """Sends unary requests."""

    call = staticmethod(Caller.generate)
