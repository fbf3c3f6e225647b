"""One timed call of the public API on a blocking stub. Imports nothing of Locust.

With grpc's gevent support enabled, a call blocks only its greenlet.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Unpack

import grpc

from specrej.client.channel import open_blocking_channel
from specrej.client.client import build_request
from specrej.security import Credentials, watch_token
from specrej.v1 import orchestrator_pb2, orchestrator_pb2_grpc


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: a status, seconds, generated tokens, reward, and of each round the seconds
    since the previous one or the start, and its tokens."""

    code: str
    seconds: float
    tokens: int = 0
    reward: float = 0.0
    rounds: tuple[tuple[float, int], ...] = ()


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

    def stream(self, prompt: str, **options: Any) -> Outcome:
        """Make a streaming call and time every round; stopping the greenlet cancels the call.

        Reads the stream to its status: otherwise the server would count the call as cancelled.
        """
        message = orchestrator_pb2.GenerateStreamRequest(request=build_request(prompt, **options))
        metadata = [("authorization", f"Bearer {self._token.get()}")] if self._token else []
        rounds: list[tuple[float, int]] = []
        started = previous = time.perf_counter()
        code, answer = "NO_ANSWER", None
        events = self._stub.GenerateStream(message, timeout=self._timeout_s, metadata=metadata)
        try:
            for event in events:
                now = time.perf_counter()
                if event.HasField("round_completed"):
                    tokens = event.round_completed.round.generated_tokens
                    rounds.append((now - previous, tokens))
                    previous = now
                elif event.HasField("finished"):
                    seconds, answer = now - started, event.finished
        except grpc.RpcError as error:
            failure: Any = error
            code = failure.code().name
        finally:
            events.cancel()
        if answer is None:
            return Outcome(code, time.perf_counter() - started, rounds=tuple(rounds))
        return Outcome("OK", seconds, answer.usage.generated_tokens, answer.score, tuple(rounds))
