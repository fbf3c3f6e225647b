"""RewardService on the wire: validates and unpacks requests, calls a worker, packs its results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from reward_service.worker import Worker, WorkerSession
from specrej import telemetry
from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1 import reward_pb2_grpc
from specrej.contracts import Candidate, FinishReason, Prompt, wire
from specrej.contracts.errors import (
    InvalidRequest,
    NotFound,
    OutOfOrder,
    Unavailable,
    Violation,
    raise_if_any,
)
from specrej.contracts.validation import check_data, check_prompt
from specrej.server.commands import answer_commands
from specrej.server.health import Health
from specrej.server.serving import Context, Service
from specrej.telemetry import names


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Unavailable until `serve` is given the loaded rewards."""

    def __init__(self, max_batch: int, lease_s: float) -> None:
        self._max_batch = max_batch
        self._lease_s = lease_s
        self._health = Health()
        self._workers: dict[str, Worker] = {}  # by reward name, the default first

    def serve(self, workers: Sequence[Worker]) -> None:
        """Serve these from now on; the first is the default."""
        self._workers = {worker.description.name: worker for worker in workers}

    def service(self) -> Service:
        return Service(
            pb.DESCRIPTOR.services_by_name["RewardService"].full_name,
            lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server),
            self._health,
        )

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:  # noqa: N802
        self.check_loaded()
        prompt = wire.from_message(request.prompt, Prompt)
        responses = list(request.responses)
        worker, data = self.find(request.reward), request.data
        problems = [*_check_question(prompt), *self._check_size(responses, "responses")]
        raise_if_any([*problems, *_check_data(worker, data)])
        scores = await worker.score(prompt, responses, whole=not request.unfinished, data=data)
        return pb.ScoreResponse(scores=scores.values, computed_tokens=scores.computed_tokens)

    # The stub's type has async generators only; `specrej.server.serving` says why this is not one.
    async def ScoreSession(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ScoreSessionRequest], context: Context
    ) -> None:
        self.check_loaded()
        async with AsyncExitStack() as stack:
            stream = _ScoringStream(self, stack)
            stale = partial(pb.ScoreSessionResponse, stale=pb.StaleScoring())
            await answer_commands(request_iterator, context, stream.answer, stale, self._lease_s)

    async def Describe(  # noqa: N802
        self, request: pb.RewardServiceDescribeRequest, context: Context
    ) -> pb.RewardServiceDescribeResponse:
        self.check_loaded()
        described = [
            replace(worker.description, max_batch=self._max_batch)
            for worker in self._workers.values()
        ]
        rewards = [wire.to_message(reward, pb.RewardDescription) for reward in described]
        return pb.RewardServiceDescribeResponse(rewards=rewards)

    async def Watch(  # type: ignore[override]  # noqa: N802
        self, request: pb.RewardServiceWatchRequest, context: Context
    ) -> None:
        await self._health.report(self.Describe, pb.RewardServiceWatchResponse, request, context)

    def check_loaded(self) -> None:
        """Raises Unavailable while the rewards are being loaded."""
        if not self._workers:
            raise Unavailable("the rewards are being loaded")

    def find(self, name: str) -> Worker:
        """The worker of that reward, or the default for "".

        Raises:
            NotFound: no reward has this name.
        """
        worker = self._workers.get(name) if name else next(iter(self._workers.values()))
        if worker is None:
            raise NotFound(f'unknown reward "{name}"; available: {", ".join(self._workers)}')
        return worker

    def check_batch(self, candidates: Sequence[pb.ScoreCandidate]) -> Iterator[Violation]:
        """Every field of a prefix batch."""
        yield from self._check_size(candidates, "batch.candidates")
        seen: set[int] = set()
        for index, candidate in enumerate(candidates):
            path = f"batch.candidates[{index}].candidate_id"
            if candidate.candidate_id < 0:
                yield Violation(path, f"must be 0 or more, is {candidate.candidate_id}")
            elif candidate.candidate_id in seen:
                yield Violation(path, f"{candidate.candidate_id} occurs twice")
            seen.add(candidate.candidate_id)

    def _check_size(self, items: Sequence[object], path: str) -> Iterator[Violation]:
        if not 1 <= len(items) <= self._max_batch:
            yield Violation(path, f"must have 1 .. {self._max_batch} items, has {len(items)}")


class _ScoringStream:
    """One ScoreSession stream; its scoring session ends with `stack`."""

    def __init__(self, servicer: RewardServicer, stack: AsyncExitStack) -> None:
        self._servicer = servicer
        self._stack = stack
        self._session: WorkerSession | None = None

    async def answer(self, request: pb.ScoreSessionRequest) -> pb.ScoreSessionResponse:
        match request.WhichOneof("command"):
            case "open":
                with telemetry.span(names.SPAN_OPEN, {names.SEQUENCE: request.sequence}):
                    return pb.ScoreSessionResponse(opened=await self._open(request.open))
            case "batch":
                with telemetry.span(names.SPAN_SCORE, {names.SEQUENCE: request.sequence}):
                    return pb.ScoreSessionResponse(scores=await self._score(request.batch))
            case _:
                raise InvalidRequest([Violation("command", "must be open or batch")])

    async def _open(self, request: pb.OpenScoring) -> pb.ScoringOpened:
        if self._session is not None:
            raise OutOfOrder("the session is open already")
        prompt = wire.from_message(request.prompt, Prompt)
        worker = self._servicer.find(request.reward)
        problems = _check_question(prompt, "open.prompt")
        raise_if_any([*problems, *_check_data(worker, request.data, "open.data")])
        self._session = await self._stack.enter_async_context(worker.open(prompt, request.data))
        return pb.ScoringOpened(fingerprint=worker.description.fingerprint)

    async def _score(self, request: pb.ScoreBatch) -> pb.BatchScores:
        if self._session is None:
            raise OutOfOrder("open comes before the first batch")
        raise_if_any(self._servicer.check_batch(request.candidates))
        # Token counts and likelihoods are the generator's; no reward uses them.
        candidates = [
            Candidate(c.candidate_id, c.text, 0, 0.0, _finish(c)) for c in request.candidates
        ]
        scores = await self._session.score(candidates)
        return pb.BatchScores(
            scores=scores.values, computed_tokens=scores.computed_tokens, compare=scores.compare
        )


def _finish(candidate: pb.ScoreCandidate) -> FinishReason | None:
    if candidate.finished:
        return FinishReason.STOP
    return FinishReason.LENGTH if candidate.truncated else None


def _check_question(prompt: Prompt, path: str = "prompt") -> Iterator[Violation]:
    yield from check_prompt(prompt, path)
    if prompt.continue_final:
        yield Violation(f"{path}.continue_final", "must be false: responses have all of the answer")


def _check_data(worker: Worker, data: str, path: str = "data") -> Iterator[Violation]:
    if data and not worker.description.takes_data:
        yield Violation(path, f"must be empty: reward {worker.description.name} takes no data")
    yield from check_data(data, path)
