"""A reward of another reward service, such as one on a machine with a GPU.

Sessions remain sessions there, so that what it keeps of a prompt's texts is used.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from reward_service.reward import WholeBatchTask
from reward_service.specs import GRPCSpec, Resources
from specrej import wire
from specrej.channel import open_blocking_channel
from specrej.contracts import Candidate, FinishReason, Prompt, RewardDescription, Scores
from specrej.errors import InternalError, NotFound, RewardInvalid, Unavailable
from specrej.status import from_backend_error
from specrej.v1 import common_pb2, reward_pb2_grpc
from specrej.v1 import reward_pb2 as pb

# Batches under way at the same time.
_CONCURRENT = 8


class GRPCReward:
    """Scores by a reward of the service at the spec's address.

    Raises:
        ValueError: there is no such reward, or the credentials cannot be used.
        OSError: a file of theirs cannot be read.
        RuntimeError: the service does not answer within `timeout_s`.
    """

    token_budget = _CONCURRENT

    def __init__(self, spec: GRPCSpec, resources: Resources) -> None:
        self.name = spec.name
        self.timeout_s = spec.timeout_s
        channel = open_blocking_channel(spec.address, retries=False, **spec.credentials)
        self.stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        described = self._describe(spec)
        self.remote_name = described.name
        self.fingerprint = described.fingerprint
        self.description = described.description
        self._threads = ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="grpc-reward")

    def open(self, prompt: Prompt, *, once: bool = False) -> _GRPCSession:
        """Connects with the first batch, which raises InvalidRequest for a bad prompt."""
        return _GRPCSession(self, prompt)

    def compute(self, pieces: Sequence[WholeBatchTask]) -> None:
        """At the same time, as the other service merges them."""
        list(self._threads.map(WholeBatchTask.run, pieces))

    def _describe(self, spec: GRPCSpec) -> RewardDescription:
        try:
            answer = self.stub.Describe(
                pb.RewardServiceDescribeRequest(), timeout=spec.timeout_s, wait_for_ready=True
            )
        except grpc.RpcError as failure:
            code = failure.code().name
            raise RuntimeError(f"reward {spec.name}: {spec.address}: {code}") from None
        rewards = [wire.from_message(reward, RewardDescription) for reward in answer.rewards]
        served = {reward.name: reward for reward in rewards}
        described = served.get(spec.reward) if spec.reward else next(iter(rewards), None)
        if described is None:
            raise ValueError(f"reward {spec.name}: {spec.address} serves {', '.join(served)}")
        return described


class _GRPCSession:
    """One stream, opened by the first batch, and again by the first one after `close`."""

    def __init__(self, reward: GRPCReward, prompt: Prompt) -> None:
        self._reward = reward
        self._prompt = prompt
        self._stream: _Stream | None = None

    def begin(self, candidates: Sequence[Candidate]) -> WholeBatchTask:
        return WholeBatchTask(partial(self._score, candidates))

    def close(self) -> None:
        if self._stream:
            self._stream.close()
        self._stream = None

    def _score(self, candidates: Sequence[Candidate]) -> Scores:
        self._stream = self._stream or self._open()
        messages = [
            pb.ScoreCandidate(
                candidate_id=c.id, text=c.text, finished=c.finish is FinishReason.STOP
            )
            for c in candidates
        ]
        answer = self._stream.send("scores", batch=pb.ScoreBatch(candidates=messages)).scores
        return Scores(tuple(answer.scores), answer.computed_tokens)

    def _open(self) -> _Stream:
        stream = _Stream(self._reward)
        command = pb.OpenScoring(
            reward=self._reward.remote_name, prompt=wire.to_message(self._prompt, common_pb2.Prompt)
        )
        # The other service may serve other weights by now, and cached answers are keyed by this.
        self._reward.fingerprint = stream.send("opened", open=command).opened.fingerprint
        return stream


class _Stream:
    """Numbered commands over one call, one at a time."""

    def __init__(self, reward: GRPCReward) -> None:
        self._reward = reward
        self._requests: queue.SimpleQueue[pb.ScoreSessionRequest | None] = queue.SimpleQueue()
        self._answers = reward.stub.ScoreSession(iter(self._requests.get, None))
        self._sequence = 0

    def send(self, kind: str, **command: Any) -> pb.ScoreSessionResponse:
        """The answer to a command, of that kind, within `timeout_s`.

        Raises:
            SpecrejError: the one of the peer's status.
            RewardInvalid: the answer is of another kind, or to another command.
        """
        self._sequence += 1
        self._requests.put(pb.ScoreSessionRequest(sequence=self._sequence, **command))
        late = threading.Timer(self._reward.timeout_s, self._answers.cancel)
        late.start()
        try:
            answer: pb.ScoreSessionResponse = next(self._answers)
        except StopIteration:
            self.close()
            raise InternalError("a reward ended its stream before it answered") from None
        except grpc.RpcError as failure:
            self.close()  # or grpc's thread would wait for requests for ever
            error = from_backend_error(failure, "a reward")
            if isinstance(error, NotFound):  # it existed when this service started
                error = Unavailable("a reward is gone")
            raise error from failure
        finally:
            late.cancel()
        if (answer.sequence, answer.WhichOneof("result")) != (self._sequence, kind):
            self.close()
            name = self._reward.name
            text = f"reward {name} sent an answer that does not belong to the request"
            raise RewardInvalid(text, metadata={"reward": name})
        return answer

    def close(self) -> None:
        self._requests.put(None)
        with suppress(grpc.RpcError):
            self._answers.cancel()
