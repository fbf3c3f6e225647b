"""A reward of another reward service: this one in front, more machines behind.

Sessions stay sessions, so that what the other end keeps of a prompt's texts is used.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Unpack

import grpc

from specrej import wire
from specrej.channel import open_blocking_channel
from specrej.contracts import Candidate, FinishReason, Prompt, RewardDescription, Scores
from specrej.credentials import Credentials
from specrej.errors import InternalError, NotFound, RewardInvalid, Unavailable
from specrej.status import from_backend_error
from specrej.v1 import reward_pb2 as pb
from specrej.v1 import reward_pb2_grpc

# Sessions that are asked at the same time.
_AT_ONCE = 8


class GRPCReward:
    """Scores with `reward` ("": its default) of the service at `address`, "host:port".

    Raises:
        ValueError: there is no such reward, or the credentials cannot be used.
        OSError: a file of theirs cannot be read.
        RuntimeError: nobody answers there within `timeout_s`.
    """

    token_budget = _AT_ONCE

    def __init__(
        self,
        name: str,
        address: str,
        *,
        reward: str = "",
        timeout_s: float = 60.0,
        **credentials: Unpack[Credentials],
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._channel = open_blocking_channel(address, retries=False, **credentials)
        self.stub: Any = reward_pb2_grpc.RewardServiceStub(self._channel)
        described = self._describe(reward, address)
        self.remote_name = described.name
        self.fingerprint = described.fingerprint
        self.description = described.description
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grpc-reward")

    def open(self, prompt: Prompt, *, once: bool = False) -> _GRPCSession:
        """Raises InvalidRequest: the reward cannot take this prompt."""
        return _GRPCSession(self, prompt)

    def compute(self, pieces: Sequence[_GRPCTask]) -> None:
        """At the same time: the other end merges them."""
        for done in [self._threads.submit(piece.run) for piece in pieces]:
            done.result()

    def _describe(self, reward: str, address: str) -> RewardDescription:
        try:
            answer = self.stub.Describe(
                pb.RewardServiceDescribeRequest(), timeout=self.timeout_s, wait_for_ready=True
            )
        except grpc.RpcError as failure:
            raise RuntimeError(f"reward {self.name}: {address}: {failure.code().name}") from None
        known = {each.name: each for each in map(wire.reward_from_wire, answer.rewards)}
        found = known.get(reward) if reward else next(iter(known.values()), None)
        if found is None:
            raise ValueError(f"reward {self.name}: {address} serves {', '.join(known)}")
        return found


class _GRPCSession:
    """One stream, opened by its first batch, and again where a session goes on after `close`."""

    def __init__(self, reward: GRPCReward, prompt: Prompt) -> None:
        self._reward = reward
        self._prompt = prompt
        self._stream: _Stream | None = None

    def begin(self, candidates: Sequence[Candidate]) -> _GRPCTask:
        return _GRPCTask(self, candidates)

    def score(self, candidates: Sequence[Candidate]) -> Scores:
        """Not by the reward's own thread: it waits for the other end."""
        self._stream = self._stream or self._open()
        batch = pb.ScoreBatch(candidates=map(_to_wire, candidates))
        answer = self._stream.ask("scores", batch=batch).scores
        return Scores(tuple(answer.scores), answer.computed_tokens)

    def close(self) -> None:
        if self._stream:
            self._stream.close()
        self._stream = None

    def _open(self) -> _Stream:
        stream = _Stream(self._reward)
        command = pb.OpenScoring(
            reward=self._reward.remote_name, prompt=wire.prompt_to_wire(self._prompt)
        )
        # The other end may serve other weights by now, and answers are cached by this.
        self._reward.fingerprint = stream.ask("opened", open=command).opened.fingerprint
        return stream


class _GRPCTask:
    """A task of one piece: itself. What fails in it fails alone, whatever else is in the pass."""

    def __init__(self, session: _GRPCSession, candidates: Sequence[Candidate]) -> None:
        self._session = session
        self._candidates = candidates
        self._scores = Scores(())
        self._error: BaseException | None = None
        self.next_tokens = 1

    def take(self) -> _GRPCTask:
        self.next_tokens = 0
        return self

    def run(self) -> None:
        try:
            self._scores = self._session.score(self._candidates)
        except BaseException as error:
            self._error = error

    def scores(self) -> Scores:
        if self._error:
            raise self._error
        return self._scores


class _Stream:
    """Numbered commands over one call, one at a time."""

    def __init__(self, reward: GRPCReward) -> None:
        self._reward = reward
        self._requests: queue.SimpleQueue[pb.ScoreSessionRequest | None] = queue.SimpleQueue()
        self._answers = reward.stub.ScoreSession(iter(self._requests.get, None))
        self._sequence = 0

    def ask(self, kind: str, **command: Any) -> pb.ScoreSessionResponse:
        """Send a command and wait for its answer, of that kind, `timeout_s` at most.

        Raises:
            SpecrejError: what the peer's status stands for.
            RewardInvalid: it answers something else.
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
            if isinstance(error, NotFound):  # it was there when this service started
                error = Unavailable("a reward is gone")
            raise error from failure
        finally:
            late.cancel()
        if (answer.sequence, answer.WhichOneof("result")) != (self._sequence, kind):
            self.close()
            name = self._reward.name
            text = f"reward {name} answers something else than it was asked"
            raise RewardInvalid(text, metadata={"reward": name})
        return answer

    def close(self) -> None:
        self._requests.put(None)
        with suppress(grpc.RpcError):
            self._answers.cancel()


def _to_wire(candidate: Candidate) -> pb.ScoreCandidate:
    finished = candidate.finish is FinishReason.STOP
    return pb.ScoreCandidate(candidate_id=candidate.id, text=candidate.text, finished=finished)
