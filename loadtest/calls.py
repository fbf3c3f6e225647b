"""One call of the public API on a blocking stub, timed: what a user sees of it.

Knows nothing of Locust. With grpc's gevent support on, a call blocks its greenlet alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Unpack

import grpc

from specrej.channel import open_blocking_channel
from specrej.client import Options, build_request
from specrej.credentials import Credentials
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """A round's end as it arrived: seconds since the one before, or since the beginning."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: a status name, seconds, tokens generated for it, rounds that arrived.

    An answer from the cache took no tokens.
    """

    code: str
    seconds: float
    tokens: int = 0
    cached: bool = False
    rounds: tuple[RoundSeen, ...] = ()


class Caller:
    """A channel to "host:port" and its stub; calls are never retried, so that refusals show."""

    def __init__(self, address: str, timeout_s: float, **credentials: Unpack[Credentials]) -> None:
        self._timeout_s = timeout_s
        self._channel = open_blocking_channel(address, retries=False, **credentials)
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def close(self) -> None:
        """Cancel what runs and disconnect."""
        self._channel.close()

    def generate(self, prompt: str, began: float, **options: Unpack[Options]) -> Outcome:
        """Wait for the whole answer; `began` is a reading of time.perf_counter()."""
        watch = _Watch(began)
        try:
            answer = self._stub.Generate(build_request(prompt, **options), timeout=self._timeout_s)
        except grpc.RpcError as error:
            return watch.failed(error)
        return watch.answered(answer)

    def stream(self, prompt: str, began: float, **options: Unpack[Options]) -> Outcome:
        """The same, following every round."""
        watch = _Watch(began)
        message = orchestrator_pb2.GenerateStreamRequest(request=build_request(prompt, **options))
        try:
            for event in self._stub.GenerateStream(message, timeout=self._timeout_s):
                if event.HasField("round_completed"):
                    watch.saw_round(event.round_completed.round.generated_tokens)
                elif event.HasField("finished"):
                    return watch.answered(event.finished)
        except grpc.RpcError as error:
            return watch.failed(error)
        return Outcome("NO_ANSWER", watch.seconds())


class _Watch:
    """Times of one call."""

    def __init__(self, began: float) -> None:
        self._began = self._since = began
        self._rounds: list[RoundSeen] = []

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def saw_round(self, tokens: int) -> None:
        now = time.perf_counter()
        self._rounds.append(RoundSeen(now - self._since, tokens))
        self._since = now

    def answered(self, answer: orchestrator_pb2.GenerateResponse) -> Outcome:
        tokens = 0 if answer.cached else answer.usage.generated_tokens
        return Outcome("OK", self.seconds(), tokens, answer.cached, tuple(self._rounds))

    def failed(self, error: Any) -> Outcome:
        return Outcome(error.code().name, self.seconds(), rounds=tuple(self._rounds))
