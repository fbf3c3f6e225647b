"""Generator and rewards across the network, behind the same Protocols as local ones.

A session is one stream; leaving its context ends the stream, and with it what the peer holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio

from specrej import telemetry, wire
from specrej.contracts import (
    Candidate,
    FinishReason,
    GeneratorDescription,
    Prompt,
    Pruned,
    RewardDescription,
    Round,
    Sampling,
    Scores,
)
from specrej.errors import InternalError, SpecrejError, Unavailable
from specrej.serving import time_left_s
from specrej.status import from_backend_error
from specrej.v1 import generator_pb2, generator_pb2_grpc, reward_pb2, reward_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")

_SESSION = "specrej.v1.GeneratorService/Session"
_SCORE_SESSION = "specrej.v1.RewardService/ScoreSession"
_BACKEND = "a backend"
_DESCRIBE_TIMEOUT_S = 5.0
_AFTER_OURS_S = 1.0
# What each command is answered with.
_RESULTS = {
    "open": "opened",
    "extend": "prefix_batch",
    "prune": "pruned",
    "close": "closed",
    "batch": "scores",
}


class _CommandStream(Generic[Request, Response]):
    """Numbered commands over one bidirectional call, one at a time."""

    def __init__(
        self,
        start: Callable[..., grpc.aio.StreamStreamCall[Request, Response]],
        make: Callable[..., Request],
        method: str,
    ) -> None:
        self._span = telemetry.ClientSpan(method, outlives=True)
        self._call = start(metadata=self._span.metadata, timeout=_backend_time_s())
        self._make = make
        self._sequence = 0
        self._is_waiting = False

    @property
    def can_finish(self) -> bool:
        """Whether the peer has answered so far; one that has not will not say goodbye either."""
        return not self._is_waiting

    async def ask(self, **command: Any) -> Response:
        """Send a command, a field of the request by its name, and wait for its answer.

        Raises:
            SpecrejError: what the peer's status stands for.
            InternalError: it answers, but not this.
        """
        self._sequence += 1
        self._is_waiting = True
        (kind,) = command
        await self._send(self._make(sequence=self._sequence, **command))
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise self._failed(failure) from failure
        if answer is grpc.aio.EOF:
            raise InternalError("a backend ended its stream before it answered")
        told: Any = answer
        if (told.sequence, told.WhichOneof("result")) != (self._sequence, _RESULTS[kind]):
            raise InternalError("a backend answers something else than it was asked")
        self._is_waiting = False
        return cast(Response, answer)

    async def finish(self) -> None:
        """Half-close and wait for the peer's end of the stream.

        Raises:
            SpecrejError: what the peer's status stands for.
        """
        try:
            with suppress(asyncio.InvalidStateError):
                await self._call.done_writing()
            if await self._call.read() is grpc.aio.EOF:
                self._span.end(grpc.StatusCode.OK.name)
        except grpc.aio.AioRpcError as failure:
            raise self._failed(failure) from failure

    def cancel(self) -> None:
        """End the stream, if it has not ended."""
        self._call.cancel()
        self._span.end(grpc.StatusCode.CANCELLED.name)

    def _failed(self, failure: grpc.aio.AioRpcError) -> SpecrejError:
        self._span.end(failure.code().name)
        return from_backend_error(failure, _BACKEND)

    async def _send(self, request: Request) -> None:
        try:
            # The call may be over already: reading tells why.
            with suppress(asyncio.InvalidStateError):
                await self._call.write(request)
        except grpc.aio.AioRpcError as failure:
            error = self._failed(failure)
            if failure.code() is grpc.StatusCode.INTERNAL:
                # No peer's status: grpc's word for a stream that breaks inside a write.
                raise Unavailable("a backend broke off") from failure
            raise error from failure


def _backend_time_s() -> float | None:
    """The deadline handed down, a little later than ours: a backend is to give up by itself if this
    process hangs, and not to be first with a status that is not our caller's."""
    left_s = time_left_s()
    return None if left_s is None else max(0.0, left_s) + _AFTER_OURS_S


async def _described(describe: Callable[..., Awaitable[Any]], request: Any) -> Any:
    """Raises SpecrejError: what the peer's status stands for."""
    try:
        # Asked again and again, for nobody's request: no span here, and none over there.
        return await describe(request, timeout=_DESCRIBE_TIMEOUT_S, metadata=telemetry.UNTRACED)
    except grpc.aio.AioRpcError as failure:
        raise from_backend_error(failure, _BACKEND) from failure


class RemoteGenerator:
    """A `Generator` behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[RemoteSession]:
        stream = _CommandStream[generator_pb2.SessionRequest, generator_pb2.SessionResponse](
            self._stub.Session, generator_pb2.SessionRequest, _SESSION
        )
        try:
            command = generator_pb2.OpenSession(
                prompt=wire.prompt_to_wire(prompt),
                n=n,
                sampling=wire.sampling_to_wire(sampling),
                first_round_tokens=first_round_tokens,
                cache_salt=cache_salt,
                first_candidate_id=first_candidate,
            )
            opened = (await stream.ask(open=command)).opened
            yield RemoteSession(stream, opened)
            # Answered once the slots are free, so that they are before our caller hears of it.
            # A peer that has gone by now has freed them too, and costs nobody the answer.
            if stream.can_finish:
                with suppress(SpecrejError):
                    await stream.ask(close=generator_pb2.CloseSession())
                    await stream.finish()
        finally:
            stream.cancel()

    async def describe(self) -> GeneratorDescription:
        request = generator_pb2.GeneratorServiceDescribeRequest()
        answer = await _described(self._stub.Describe, request)
        return wire.generator_from_wire(answer)


class RemoteSession:
    """A `Session` on a stream."""

    def __init__(
        self,
        stream: _CommandStream[generator_pb2.SessionRequest, generator_pb2.SessionResponse],
        opened: generator_pb2.SessionOpened,
    ) -> None:
        self._stream = stream
        # A generator that is older than the field tells nothing.
        self._made_by = frozenset({opened.fingerprint} - {""})
        self.n = opened.n
        self.prompt_tokens = opened.prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        command = generator_pb2.ExtendSession(until_tokens=until_tokens)
        answer = await self._stream.ask(extend=command)
        # A batch of a thousand texts takes milliseconds to unpack: not on the event loop.
        ended = await asyncio.to_thread(wire.round_from_wire, answer.prefix_batch)
        return replace(ended, made_by=self._made_by)

    async def prune(self, keep: Collection[int]) -> Pruned:
        answer = await self._stream.ask(prune=generator_pb2.PruneSession(keep=sorted(keep)))
        slots = wire.gauge_from_wire(answer.pruned.slots)
        return Pruned(answer.pruned.freed_slots, slots)


class RemoteRewards:
    """The rewards of one reward service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = reward_pb2_grpc.RewardServiceStub(channel)

    def scorer(self, name: str) -> RemoteScorer:
        """A `Scorer` for the reward of that name."""
        return RemoteScorer(self._stub, name)

    async def describe(self) -> tuple[RewardDescription, ...]:
        """The rewards that are served; the first is the default."""
        request = reward_pb2.RewardServiceDescribeRequest()
        answer = await _described(self._stub.Describe, request)
        return tuple(map(wire.reward_from_wire, answer.rewards))


class RemoteScorer:
    """A `Scorer` behind a channel."""

    def __init__(self, stub: Any, name: str) -> None:
        self._stub = stub
        self._name = name

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[RemoteScoringSession]:
        stream = _CommandStream[reward_pb2.ScoreSessionRequest, reward_pb2.ScoreSessionResponse](
            self._stub.ScoreSession, reward_pb2.ScoreSessionRequest, _SCORE_SESSION
        )
        try:
            command = reward_pb2.OpenScoring(reward=self._name, prompt=wire.prompt_to_wire(prompt))
            opened = (await stream.ask(open=command)).opened
            yield RemoteScoringSession(stream, opened.fingerprint)
            if stream.can_finish:
                with suppress(SpecrejError):
                    await stream.finish()
        finally:
            stream.cancel()


class RemoteScoringSession:
    """A `ScoringSession` on a stream."""

    def __init__(
        self,
        stream: _CommandStream[reward_pb2.ScoreSessionRequest, reward_pb2.ScoreSessionResponse],
        fingerprint: str,
    ) -> None:
        self._stream = stream
        self._fingerprint = fingerprint

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        batch = reward_pb2.ScoreBatch(
            candidates=[
                reward_pb2.ScoreCandidate(
                    candidate_id=c.id, text=c.text, finished=c.finish is FinishReason.STOP
                )
                for c in candidates
            ]
        )
        scores = (await self._stream.ask(batch=batch)).scores
        return Scores(tuple(scores.scores), scores.computed_tokens, self._fingerprint)
