"""gRPC users for Locust: `make loadtest`, or `locust -f loadtest/locustfile.py --host HOST:PORT`.

Each user asks, waits for the answer, asks again. Besides the whole answer (`generate`), time to the
first round and time between rounds are reported as requests of their own; the length of a response
is its number of generated tokens. A token and certificates come by the command line's variables:
SPECREJ_TOKEN or SPECREJ_TOKEN_FILE, SPECREJ_TLS, SPECREJ_TLS_CA, SPECREJ_TLS_CERT, SPECREJ_TLS_KEY.
"""

from __future__ import annotations

import itertools
import os
import time
from argparse import ArgumentParser
from typing import Any

import grpc
import grpc.experimental.gevent as grpc_gevent
from locust import User, between, events, task

from specrej.channel import open_blocking_channel
from specrej.credentials import credentials_from
from specrej.v1 import common_pb2, orchestrator_pb2, orchestrator_pb2_grpc

# Before any channel is made: grpc's own threads would block every user at once.
grpc_gevent.init_gevent()

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Name three uses of a brick.",
    "What should I pack for three days of hiking?",
    "Write a short birthday wish for a colleague.",
)
_seeds = itertools.count(1)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--n", type=int, default=16, help="candidates per request")
    parser.add_argument("--alpha", type=float, default=0.5, help="fraction rejected per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="most new tokens")
    parser.add_argument("--best-of-n", action="store_true", help="never reject: the baseline")
    parser.add_argument("--cached", action="store_true", help="equal requests, cache on")
    parser.add_argument("--request-timeout", type=float, default=120, help="deadline in seconds")


events.init_command_line_parser.add_listener(_add_options)  # type: ignore[no-untyped-call]


class StreamingUser(User):
    """Follows its requests round by round."""

    wait_time = between(0, 0.1)

    def on_start(self) -> None:
        address = self.host or "127.0.0.1:50050"
        self._channel = open_blocking_channel(
            address, retries=False, **credentials_from(os.environ)
        )
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def on_stop(self) -> None:
        self._channel.close()

    @task
    def generate(self) -> None:
        """One request, from question to answer."""
        options = self.environment.parsed_options
        message = orchestrator_pb2.GenerateStreamRequest(request=_request(options))
        began = since = time.perf_counter()
        tokens, failure, rounds = 0, None, 0
        try:
            for event in self._stub.GenerateStream(message, timeout=options.request_timeout):
                if event.HasField("round_completed"):
                    name = "between rounds" if rounds else "first round"
                    made = event.round_completed.round.generated_tokens
                    self._report(name, since, made)
                    since, rounds = time.perf_counter(), rounds + 1
                if event.HasField("finished"):
                    tokens = event.finished.usage.generated_tokens
        except grpc.RpcError as error:
            failure = error
        self._report("generate", began, tokens, failure)

    def _report(
        self, name: str, since: float, tokens: int, failure: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type="grpc",
            name=name,
            response_time=(time.perf_counter() - since) * 1e3,
            response_length=tokens,
            exception=failure,
            context={},
        )


def _request(options: Any) -> orchestrator_pb2.GenerateRequest:
    number = 0 if options.cached else next(_seeds)
    algorithm = (
        orchestrator_pb2.ALGORITHM_BEST_OF_N
        if options.best_of_n
        else orchestrator_pb2.ALGORITHM_SPECULATIVE_REJECTION
    )
    cache = (
        orchestrator_pb2.CACHE_CONTROL_USE
        if options.cached
        else orchestrator_pb2.CACHE_CONTROL_BYPASS
    )
    turn = common_pb2.Message(role="user", content=PROMPTS[number % len(PROMPTS)])
    return orchestrator_pb2.GenerateRequest(
        prompt=common_pb2.Prompt(messages=[turn]),
        sampling=common_pb2.Sampling(max_tokens=options.max_tokens, seed=number),
        selection=orchestrator_pb2.Selection(n=options.n, alpha=options.alpha, algorithm=algorithm),
        cache_control=cache,
    )
