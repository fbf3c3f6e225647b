"""One timed call of the public API on a blocking stub. Imports nothing of Locust.

With grpc's gevent support enabled, a call blocks only its greenlet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import grpc

from specrej.client.channel import open_blocking_channel
from specrej.client.client import build_request
from specrej.security import TENANT_METADATA, Credentials, watch_token
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc


@dataclass(frozen=True, slots=True)
class RoundEvent:
    """A completed round: seconds since the previous round or the start, tokens generated in it."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: a status name, seconds, generated tokens (0 from the cache), rounds.

    `admitted_s`: seconds to the first event of a stream, when its session was open; 0 without one.
    """

    code: str
    seconds: float
    tokens: int = 0
    cached: bool = False
    admitted_s: float = 0.0
    rounds: tuple[RoundEvent, ...] = ()


class Caller:
    """A channel to "host:port" and its stub. Calls are not retried, so that refusals count."""

    def __init__(self, address: str, timeout_s: float, **credentials: Unpack[Credentials]) -> None:
        self._timeout_s = timeout_s
        self._token = watch_token(credentials)
        self._channel = open_blocking_channel(address, **credentials)
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def close(self) -> None:
        """Cancel all calls and disconnect."""
        self._channel.close()

    def generate(self, prompt: str, started: float, tenant: str = "", **options: Any) -> Outcome:
        """Make a unary call; `started` is a reading of time.perf_counter()."""
        message = build_request(prompt, **options)
        try:
            answer = self._stub.Generate(message, **self._arguments(tenant))
        except grpc.RpcError as error:
            return _failed(error, started)
        return _answered(answer, started)

    def stream(self, prompt: str, started: float, tenant: str = "", **options: Any) -> Outcome:
        """Make a streaming call and time every round; stopping the greenlet cancels the call.

        Reads the stream to its status: otherwise the server would count the call as cancelled.
        """
        message = orchestrator_pb2.GenerateStreamRequest(request=build_request(prompt, **options))
        rounds: list[RoundEvent] = []
        previous, admitted_s, answer = started, 0.0, None
        events = self._stub.GenerateStream(message, **self._arguments(tenant))
        try:
            for event in events:
                now = time.perf_counter()
                if event.HasField("admitted"):
                    admitted_s = now - started
                elif event.HasField("round_completed"):
                    tokens = event.round_completed.round.generated_tokens
                    rounds.append(RoundEvent(now - previous, tokens))
                    previous = now
                elif event.HasField("finished"):
                    answer = _answered(event.finished, started, admitted_s, rounds)
        except grpc.RpcError as error:
            return answer or _failed(error, started, admitted_s, rounds)
        finally:
            events.cancel()
        return answer or Outcome("NO_ANSWER", time.perf_counter() - started)

    def _arguments(self, tenant: str) -> dict[str, Any]:
        metadata = [(TENANT_METADATA, tenant)] if tenant else []
        if self._token:
            metadata.append(("authorization", f"Bearer {self._token.get()}"))
        return {"timeout": self._timeout_s, "metadata": metadata}


def _answered(
    answer: Any, started: float, admitted_s: float = 0.0, rounds: Sequence[RoundEvent] = ()
) -> Outcome:
    tokens = 0 if answer.cached else answer.usage.generated_tokens
    seconds = time.perf_counter() - started
    return Outcome("OK", seconds, tokens, answer.cached, admitted_s, tuple(rounds))


def _failed(
    error: Any, started: float, admitted_s: float = 0.0, rounds: Sequence[RoundEvent] = ()
) -> Outcome:
    seconds = time.perf_counter() - started
    return Outcome(error.code().name, seconds, admitted_s=admitted_s, rounds=tuple(rounds))
