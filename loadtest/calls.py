"""One timed call of the public API on a blocking stub. Imports nothing of Locust.

With grpc's gevent support enabled, a call blocks only its greenlet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import grpc

from specrej.channel import open_blocking_channel
from specrej.client import Options, build_request
from specrej.credentials import Credentials
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """A completed round: seconds since the previous round or the start, tokens generated in it."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: a status name, seconds, generated tokens (0 from the cache), rounds."""

    code: str
    seconds: float
    tokens: int = 0
    cached: bool = False
    rounds: tuple[RoundEvent, ...] = ()


class Caller:
    """A channel to "host:port" and its stub. Calls are not retried, so that refusals count."""

    def __init__(self, address: str, timeout_s: float, **credentials: Unpack[Credentials]) -> None:
        self._timeout_s = timeout_s
        self._channel = open_blocking_channel(address, retries=False, **credentials)
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def close(self) -> None:
        """Cancel all calls and disconnect."""
        self._channel.close()

    def generate(self, prompt: str, started: float, **options: Unpack[Options]) -> Outcome:
        """Make a unary call; `started` is a reading of time.perf_counter()."""
        try:
            answer = self._stub.Generate(build_request(prompt, **options), timeout=self._timeout_s)
        except grpc.RpcError as error:
            return _failed(error, started, [])
        return _answered(answer, started, [])

    def stream(self, prompt: str, started: float, **options: Unpack[Options]) -> Outcome:
        """Make a streaming call and time every round."""
        message = orchestrator_pb2.GenerateStreamRequest(request=build_request(prompt, **options))
        rounds: list[RoundEvent] = []
        previous = started
        try:
            events: Iterator[Any] = self._stub.GenerateStream(message, timeout=self._timeout_s)
            for event in events:
                if event.HasField("round_completed"):
                    now = time.perf_counter()
                    tokens = event.round_completed.round.generated_tokens
                    rounds.append(RoundEvent(now - previous, tokens))
                    previous = now
                elif event.HasField("finished"):
                    return _answered(event.finished, started, rounds)
        except grpc.RpcError as error:
            return _failed(error, started, rounds)
        return Outcome("NO_ANSWER", time.perf_counter() - started)


def _answered(answer: Any, started: float, rounds: list[RoundEvent]) -> Outcome:
    tokens = 0 if answer.cached else answer.usage.generated_tokens
    return Outcome("OK", time.perf_counter() - started, tokens, answer.cached, tuple(rounds))


def _failed(error: Any, started: float, rounds: list[RoundEvent]) -> Outcome:
    return Outcome(error.code().name, time.perf_counter() - started, rounds=tuple(rounds))
