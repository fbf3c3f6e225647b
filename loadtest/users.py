"""Users for Locust, who ask, wait for the answer and ask again: a closed loop.

What they see is reported under the kinds of kinds.py; a response's length is its generated tokens.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gevent  # type: ignore[import-untyped]
import grpc.experimental.gevent as grpc_gevent
from locust import User, between, events, task

from loadtest.calls import Caller, Outcome
from loadtest.kinds import ANSWER, BETWEEN_ROUNDS, CACHED, FAILED, FIRST_ROUND
from loadtest.questions import Question, questions
from specrej.credentials import credentials_from

# Before any channel is made: grpc's own threads would block every user at once.
grpc_gevent.init_gevent()

DEFAULT_ADDRESS = "127.0.0.1:50050"


class CallFailed(Exception):
    """A call that ended without an answer; shown as the name of its status."""

    def __repr__(self) -> str:
        return str(self)


class _Clock:
    """When this process's part of the test began: users that come later join the step under way."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def restart(self, **_: Any) -> None:
        self.began = time.perf_counter()


_clock = _Clock()
events.test_start.add_listener(_clock.restart)  # type: ignore[no-untyped-call]


def _tell_the_time(**_: Any) -> None:
    # The event loop has not looked at the clock since before the imports: --run-time would begin
    # then, and have a second less.
    gevent.get_hub().loop.update_now()


events.init.add_listener(_tell_the_time)  # type: ignore[no-untyped-call]


class AskingUser(User):
    """Has a channel and questions."""

    abstract = True

    def on_start(self) -> None:
        """Connect; a token and certificates come by the command line's variables."""
        parsed: Any = self.environment.parsed_options
        worker = max(0, getattr(self.environment.runner, "worker_index", 0))
        self.caller = Caller(
            self.host or DEFAULT_ADDRESS, parsed.request_timeout, **credentials_from(os.environ)
        )
        self.questions = questions(parsed, worker, _clock.began)

    def on_stop(self) -> None:
        """Cancel what runs."""
        self.caller.close()

    def report(self, question: Question, outcome: Outcome) -> None:
        """All that was seen of a call."""
        for number, seen in enumerate(outcome.rounds):
            kind = BETWEEN_ROUNDS if number else FIRST_ROUND
            self.fire(kind, question, seen.seconds, seen.tokens)
        if outcome.code != "OK":
            self.fire(FAILED, question, outcome.seconds, 0, CallFailed(outcome.code))
        else:
            kind = CACHED if outcome.cached else ANSWER
            self.fire(kind, question, outcome.seconds, outcome.tokens)

    def fire(
        self,
        kind: str,
        question: Question,
        seconds: float,
        tokens: int = 0,
        failure: Exception | None = None,
    ) -> None:
        """One row's worth for Locust."""
        self.environment.events.request.fire(
            request_type=kind,
            name=question.label,
            response_time=seconds * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )


class StreamingUser(AskingUser):
    """Follows its requests round by round."""

    wait_time = between(0, 0.1)
    weight = 3

    @task
    def stream(self) -> None:
        """One request, from question to answer."""
        asked = next(self.questions)
        began = time.perf_counter()
        self.report(asked, self.caller.stream(asked.prompt, began, **asked.options))


class UnaryUser(AskingUser):
    """Waits for whole answers."""

    wait_time = between(0, 0.1)

    @task
    def generate(self) -> None:
        """One request, from question to answer."""
        asked = next(self.questions)
        began = time.perf_counter()
        self.report(asked, self.caller.generate(asked.prompt, began, **asked.options))
