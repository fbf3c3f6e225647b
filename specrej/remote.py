"""Generator and rewards over gRPC, behind the same Protocols as local ones.

A session is one stream; leaving its context ends the stream, and the peer frees what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio

from specrej import contracts as c
from specrej import telemetry
from specrej.backend.v1 import generator_pb2, generator_pb2_grpc, reward_pb2, reward_pb2_grpc
from specrej.contracts import wire
from specrej.contracts.errors import InternalError, SpecrejError, Unavailable
from specrej.contracts.status import from_backend_error, has_details
from specrej.contracts.validation import MAX_BATCH
from specrej.server.serving import time_left_s
from specrej.v1 import common_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

_SESSION = "specrej.backend.v1.GeneratorService/Session"
_SCORE_SESSION = "specrej.backend.v1.RewardService/ScoreSession"
_BACKEND = "a backend"
_DESCRIBE_TIMEOUT_S = 5.0
_WATCH_TIMEOUT_S = 1e8  # in place of the backend's own, which is for calls that end
_AFTER_OURS_S = 1.0
# Before the first write of a stream that is started again: in it the status may arrive.
_RESTART_PAUSES_S = (0.02, 0.1, 0.5)
# The result field of each command.
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
        self._start = partial(start, metadata=self._span.metadata)
        self._call = self._start(timeout=_backend_time_s())
        self._restart_pauses_s: Sequence[float] = _RESTART_PAUSES_S
        self._make = make
        self._sequence = 0
        self._is_waiting = self._is_abandoned = False

    @property
    def can_finish(self) -> bool:
        """Whether every command was answered, so that the stream can be closed in order."""
        return not self._is_waiting

    async def call(
        self, receive: Callable[[Response], object] | None = None, **command: Any
    ) -> Response:
        """Send a command, given as a field of the request, and return its answer; `receive` is
        called with each part that precedes it.

        Raises:
            SpecrejError: the error that the peer's status stands for.
            Unavailable: the previous command was cancelled, which has ended the stream.
            InternalError: the answer belongs to another command.
        """
        if self._is_abandoned:  # grpc would raise CancelledError in a task that is not cancelled
            raise Unavailable("a backend's stream was abandoned")
        self._sequence += 1
        self._is_waiting = True
        (kind,) = command
        try:
            await self._send(self._make(sequence=self._sequence, **command))
            while _is_part(answer := await self._call.read()) and receive:
                receive(cast(Response, answer))
        except grpc.aio.AioRpcError as failure:
            raise self._failed(failure) from failure
        except asyncio.CancelledError:
            self._is_abandoned = True
            raise
        if answer is grpc.aio.EOF:
            raise InternalError("a backend ended its stream before it answered")
        response: Any = answer
        if (response.sequence, response.WhichOneof("result")) != (self._sequence, _RESULTS[kind]):
            raise InternalError("a backend sent the answer of another command")
        self._is_waiting, self._restart_pauses_s = False, ()
        return cast(Response, answer)

    async def finish(self) -> None:
        """Half-close and wait until the peer ends the stream.

        Raises:
            SpecrejError: of the peer's status.
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
            # The call may be over already: `read` raises the reason.
            with suppress(asyncio.InvalidStateError):
                await self._call.write(request)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is not grpc.StatusCode.INTERNAL or has_details(failure):
                raise self._failed(failure) from failure
            # Not the peer's status: grpc reports so a stream that the peer ended before a write,
            # and drops the status (grpc/grpc#36066). A stream without an answer is started again to
            # receive it.
            if not self._restart_pauses_s:
                self._span.end(grpc.StatusCode.UNAVAILABLE.name)
                raise Unavailable("a backend ended the stream") from failure
            pause_s, *self._restart_pauses_s = self._restart_pauses_s
            self._call = self._start(timeout=_backend_time_s())
            await asyncio.sleep(pause_s)
            await self._send(request)


def _is_part(answer: Any) -> bool:
    return answer is not grpc.aio.EOF and answer.WhichOneof("result") == "grown"


def _backend_time_s() -> float | None:
    """The deadline sent to backends, a little later than the request's.

    A backend gives up by itself if this process hangs, but never before this process does.
    """
    left_s = time_left_s()
    return None if left_s is None else max(0.0, left_s) + _AFTER_OURS_S


async def _described(describe: Callable[..., Awaitable[Any]], request: Any) -> Any:
    """Raises SpecrejError: of the peer's status."""
    try:
        # It belongs to no request: without a span here or at the backend.
        return await describe(request, timeout=_DESCRIBE_TIMEOUT_S, metadata=telemetry.UNTRACED)
    except grpc.aio.AioRpcError as failure:
        raise from_backend_error(failure, _BACKEND) from failure


async def _reports(
    watch: Callable[..., Any], request: Any, read: Callable[[Any], T]
) -> AsyncIterator[T | None]:
    """Descriptions while the backend serves; None: as the one before.

    Raises:
        SpecrejError: of the peer's status.
    """
    call = watch(request, timeout=_WATCH_TIMEOUT_S, metadata=telemetry.UNTRACED)
    try:
        while (report := await call.read()) is not grpc.aio.EOF:
            yield read(report.description) if report.HasField("description") else None
    except grpc.aio.AioRpcError as failure:
        raise from_backend_error(failure, _BACKEND) from failure
    finally:
        call.cancel()


class RemoteGenerator:
    """A `Generator` behind a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = generator_pb2_grpc.GeneratorServiceStub(channel)

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[RemoteSession]:
        stream = _CommandStream[generator_pb2.SessionRequest, generator_pb2.SessionResponse](
            self._stub.Session, generator_pb2.SessionRequest, _SESSION
        )
        try:
            command = wire.to_message(spec, generator_pb2.OpenSession)
            opened = (await stream.call(open=command)).opened
            if opened.n != spec.n and (spec.n or not 0 < opened.n <= MAX_BATCH):
                raise InternalError(f"a generator opened {opened.n} candidates instead of {spec.n}")
            yield RemoteSession(stream, opened)
            # Answered once the slots are free, so that they are free before the caller's answer.
            # If the peer is gone by now, its slots are free as well.
            if stream.can_finish:
                with suppress(SpecrejError):
                    await stream.call(close=generator_pb2.CloseSession())
                    await stream.finish()
        finally:
            stream.cancel()

    async def check(self, spec: c.SessionSpec) -> None:
        opening = wire.to_message(spec, generator_pb2.OpenSession)
        request = generator_pb2.GeneratorServiceCheckRequest(open=opening)
        try:
            await self._stub.Check(request, timeout=_backend_time_s())
        except grpc.aio.AioRpcError as failure:
            raise from_backend_error(failure, _BACKEND) from failure

    async def describe(self) -> c.GeneratorDescription:
        request = generator_pb2.GeneratorServiceDescribeRequest()
        return _generator(await _described(self._stub.Describe, request))

    def watch(self, interval_s: float) -> AsyncIterator[c.GeneratorDescription | None]:
        request = generator_pb2.GeneratorServiceWatchRequest(interval_s=interval_s)
        return _reports(self._stub.Watch, request, _generator)


def _generator(answer: generator_pb2.GeneratorServiceDescribeResponse) -> c.GeneratorDescription:
    return wire.from_message(answer.generator, c.GeneratorDescription)


class RemoteSession:
    """A `Session` on a stream."""

    def __init__(
        self,
        stream: _CommandStream[generator_pb2.SessionRequest, generator_pb2.SessionResponse],
        opened: generator_pb2.SessionOpened,
    ) -> None:
        self._stream = stream
        self.fingerprint = opened.fingerprint
        self.n = opened.n
        self.prompt_tokens = opened.prompt_tokens
        self.max_tokens = opened.max_tokens
        self.reduced = opened.reduced
        self.costly_rounds = opened.costly_rounds
        self.answer_form = wire.from_message(opened.answer_form, c.AnswerForm)
        self._texts = wire.StreamedTexts()

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        def receive(part: generator_pb2.SessionResponse) -> None:
            if report:
                report(self._texts.from_message(part.grown))

        command = generator_pb2.ExtendSession(until_tokens=until_tokens, report=report is not None)
        try:
            batch = (await self._stream.call(receive, extend=command)).prefix_batch
            # Converting a thousand texts takes milliseconds: not on the event loop.
            return await asyncio.to_thread(self._texts.from_message, batch)
        except ValueError as error:
            raise InternalError("a generator sent an invalid round") from error

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        command = generator_pb2.PruneSession(
            keep=sorted(keep),
            forks=[
                common_pb2.Fork(candidate_id=number, parent_id=parent)
                for number, parent in forks.items()
            ],
        )
        answer = await self._stream.call(prune=command)
        self._texts.fork(forks)
        return wire.from_message(answer.pruned, c.Pruned)


class RemoteRewards:
    """The rewards of one reward service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = reward_pb2_grpc.RewardServiceStub(channel)

    @asynccontextmanager
    async def open(
        self, name: str, prompt: c.Prompt, data: str = ""
    ) -> AsyncIterator[RemoteScoringSession]:
        """A session of the reward of that name; leaving the context frees its state there."""
        stream = _CommandStream[reward_pb2.ScoreSessionRequest, reward_pb2.ScoreSessionResponse](
            self._stub.ScoreSession, reward_pb2.ScoreSessionRequest, _SCORE_SESSION
        )
        try:
            command = reward_pb2.OpenScoring(
                reward=name, prompt=wire.to_message(prompt, common_pb2.Prompt), data=data
            )
            opened = (await stream.call(open=command)).opened
            yield RemoteScoringSession(stream, opened.fingerprint)
            if stream.can_finish:
                with suppress(SpecrejError):
                    await stream.finish()
        finally:
            stream.cancel()

    async def describe(self) -> tuple[c.RewardDescription, ...]:
        """The rewards that are served; the first is the default."""
        request = reward_pb2.RewardServiceDescribeRequest()
        return _rewards(await _described(self._stub.Describe, request))

    def watch(self, interval_s: float) -> AsyncIterator[tuple[c.RewardDescription, ...] | None]:
        request = reward_pb2.RewardServiceWatchRequest(interval_s=interval_s)
        return _reports(self._stub.Watch, request, _rewards)


def _rewards(answer: reward_pb2.RewardServiceDescribeResponse) -> tuple[c.RewardDescription, ...]:
    return tuple(wire.from_message(reward, c.RewardDescription) for reward in answer.rewards)


@dataclass(frozen=True, slots=True)
class RemoteScoringSession:
    """A `ScoringSession` on a stream."""

    _stream: _CommandStream[reward_pb2.ScoreSessionRequest, reward_pb2.ScoreSessionResponse]
    fingerprint: str  # of the reward

    async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
        batch = reward_pb2.ScoreBatch(
            candidates=[
                reward_pb2.ScoreCandidate(
                    candidate_id=one.id,
                    text=one.text,
                    finished=one.finish is c.FinishReason.STOP,
                    truncated=one.finish is c.FinishReason.LENGTH,
                )
                for one in candidates
            ]
        )
        scores = (await self._stream.call(batch=batch)).scores
        values, computed = tuple(scores.scores), scores.computed_tokens
        return c.Scores(values, computed, self.fingerprint, scores.compare)
