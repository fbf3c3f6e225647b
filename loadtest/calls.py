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
from specrej.v1 import orchestrator_pb2_grpc


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: a status, seconds, generated tokens and reward."""

    code: str
    seconds: float
    tokens: int = 0
    reward: float = 0.0


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

    def generate(self, prompt: str, **options: Any) -> Outcome:
        """Make a call; stopping the greenlet cancels it."""
        message = build_request(prompt, **options)
        metadata = [("authorization", f"Bearer {self._token.get()}")] if self._token else []
        started = time.perf_counter()
        call = self._stub.Generate.future(message, timeout=self._timeout_s, metadata=metadata)
        try:
            answer = call.result()
        except grpc.RpcError:
            return Outcome(call.code().name, time.perf_counter() - started)
        finally:
            call.cancel()
        seconds = time.perf_counter() - started
        return Outcome("OK", seconds, answer.usage.generated_tokens, answer.score)
