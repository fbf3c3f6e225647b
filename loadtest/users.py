"""Locust users of the public API. Rows are reported by `Kind`; a response's length is its number of
generated tokens."""

from __future__ import annotations

import os
import time
from typing import Any

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent as grpc_gevent
from locust import User, between, events, task

from loadtest.calls import Caller, Outcome
from loadtest.thresholds import Kind
from loadtest.workload import LoadRequest, requests
from specrej.credentials import credentials_from

# Must run before the first channel is created: otherwise one call blocks all users.
grpc_gevent.init_gevent()

DEFAULT_ADDRESS = "127.0.0.1:50050"


class CallFailed(Exception):
    """A call without an answer; Locust shows it as the name of its status."""

    def __repr__(self) -> str:
        return str(self)


class _TestStart:
    """The start of the test in this process; users that start later join the current step."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def reset(self, **_: Any) -> None:
        self.at = time.perf_counter()


_test_start = _TestStart()
events.test_start.add_listener(_test_start.reset)  # type: ignore[no-untyped-call]


def _update_loop_time(**_: Any) -> None:
    # gevent's clock stands at a time before the imports: --run-time would be a second shorter.
    gevent.get_hub().loop.update_now()


events.init.add_listener(_update_loop_time)  # type: ignore[no-untyped-call]


class ApiUser(User):
    """Base of all users: a connection and a sequence of requests."""

    abstract = True

    def on_start(self) -> None:
        """Connect with the credentials of the command line's environment variables."""
        parsed: Any = self.environment.parsed_options
        worker = max(0, getattr(self.environment.runner, "worker_index", 0))
        self.caller = Caller(
            self.host or DEFAULT_ADDRESS, parsed.request_timeout, **credentials_from(os.environ)
        )
        self.requests = requests(parsed, worker, _test_start.at)

    def on_stop(self) -> None:
        """Cancel all calls."""
        self.caller.close()

    def report(self, request: LoadRequest, outcome: Outcome) -> None:
        """Report a call and its rounds to Locust."""
        for number, event in enumerate(outcome.rounds):
            kind = Kind.BETWEEN_ROUNDS if number else Kind.FIRST_ROUND
            self.fire(kind, request, event.seconds, event.tokens)
        if outcome.code != "OK":
            self.fire(Kind.FAILED, request, outcome.seconds, 0, CallFailed(outcome.code))
        else:
            kind = Kind.CACHED if outcome.cached else Kind.ANSWER
            self.fire(kind, request, outcome.seconds, outcome.tokens)

    def fire(
        self,
        kind: Kind,
        request: LoadRequest,
        seconds: float,
        tokens: int = 0,
        failure: Exception | None = None,
    ) -> None:
        """Add one measurement to the row of this kind, algorithm and N."""
        self.environment.events.request.fire(
            request_type=kind.value,
            name=request.label,
            response_time=seconds * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )


class StreamingUser(ApiUser):
    """Sends streaming requests, each after the answer to the one before."""

    wait_time = between(0, 0.1)
    weight = 3

    @task
    def stream(self) -> None:
        """Send one request and follow its rounds."""
        request = next(self.requests)
        started = time.perf_counter()
        self.report(request, self.caller.stream(request.prompt, started, **request.options))


class UnaryUser(ApiUser):
    """Sends unary requests, each after the answer to the one before."""

    wait_time = between(0, 0.1)

    @task
    def generate(self) -> None:
        """Send one request and wait for the whole answer."""
        request = next(self.requests)
        started = time.perf_counter()
        self.report(request, self.caller.generate(request.prompt, started, **request.options))
