"""RewardService over real gRPC, on rewards without models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import pytest

from reward_service.kinds.toy import ToyReward
from reward_service.reward import Reward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1.reward_pb2_grpc import RewardServiceStub
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.v1 import common_pb2
from tests.serving import failure_of, reason_of, retry_info_s, serving, violations_of

PROMPT = common_pb2.Prompt(text="Write it.")
Code = grpc.StatusCode
# Starts a service with rewards (none: still loading) and options; returns a stub of it.
Serve = Callable[..., Awaitable[Any]]


class FinishedReward(Reward):
    """1 for texts that ended by themselves, 0 for others."""

    name, fingerprint, description = "finished", "f", "Whether it ended."

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(float(c.finish is FinishReason.STOP) for c in candidates))


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def serve(*rewards: Reward, lease_s: float = 30) -> Any:
            workers = [await Worker.start(partial(lambda one: one, reward)) for reward in rewards]
            for worker in workers:
                stack.callback(worker.close)
            servicer = RewardServicer(8, lease_s)
            servicer.serve(workers)
            channel = await stack.enter_async_context(serving(servicer.service()))
            return RewardServiceStub(channel)

        yield serve


def score_request(*responses: str, reward: str = "") -> pb.ScoreRequest:
    return pb.ScoreRequest(reward=reward, prompt=PROMPT, responses=responses)


def open_request(sequence: int = 1, **changes: Any) -> pb.ScoreSessionRequest:
    scoring = pb.OpenScoring(**dict[str, Any](prompt=PROMPT) | changes)
    return pb.ScoreSessionRequest(sequence=sequence, open=scoring)


def batch_request(sequence: int, *candidates: tuple[int, str]) -> pb.ScoreSessionRequest:
    batch = [pb.ScoreCandidate(candidate_id=i, text=text) for i, text in candidates]
    return pb.ScoreSessionRequest(sequence=sequence, batch=pb.ScoreBatch(candidates=batch))


async def converse(stub: Any, *requests: pb.ScoreSessionRequest) -> list[pb.ScoreSessionResponse]:
    """The answers to messages sent one after the other on a stream, which is then half-closed."""
    call = stub.ScoreSession()
    answers = []
    for request in requests:
        await call.write(request)
        answer = await call.read()
        if isinstance(answer, pb.ScoreSessionResponse):
            answers.append(answer)
    await call.done_writing()
    assert await call.code() is Code.OK
    return answers


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    """The code and the reason of a call's error."""
    error = await failure_of(call)
    return error.code(), reason_of(error)


async def bad_fields(call: Any) -> list[str]:
    error = await failure_of(call)
    assert error.code() is Code.INVALID_ARGUMENT
    return [*violations_of(error)]


async def test_rewards_have_names_and_the_first_is_the_default(serve: Serve) -> None:
    stub = await serve(ToyReward(), FinishedReward())
    described = (await stub.Describe(pb.RewardServiceDescribeRequest())).rewards
    names = [(reward.name, reward.max_batch) for reward in described]
    assert names == [("toy", 8), ("finished", 8)]
    assert described[0].fingerprint == ToyReward().fingerprint
    assert described[0].description == ToyReward().description
    answer = await stub.Score(score_request("aab", "", "b", "aab"))
    assert list(answer.scores) == [2 / 3, 0, 0, 2 / 3]
    assert answer.computed_tokens == 2
    assert list((await stub.Score(score_request("b", reward="toy"))).scores) == [0]
    assert list((await stub.Score(score_request("b", reward="finished"))).scores) == [1]


async def test_unknown_reward_is_not_found(serve: Serve) -> None:
    stub = await serve(ToyReward())
    calls = [stub.Score(score_request("a", reward="T")), converse(stub, open_request(reward="T"))]
    for call in calls:
        error = await failure_of(call)
        assert error.code() is Code.NOT_FOUND
        assert error.details() == 'unknown reward "T"; available: toy'


async def test_every_violation_of_score_is_reported(serve: Serve) -> None:
    stub = await serve(ToyReward())
    assert await bad_fields(stub.Score(pb.ScoreRequest())) == ["prompt", "responses"]
    both = pb.ScoreRequest(prompt=common_pb2.Prompt(text=" \n"), responses=["a"] * 9)
    assert await bad_fields(stub.Score(both)) == ["prompt.text", "responses"]


BAD_PROMPT = common_pb2.Prompt(messages=[common_pb2.Message(role="assistant", content="Hm.")])


@pytest.mark.parametrize(
    ("requests", "fields"),
    [
        ([open_request(prompt=BAD_PROMPT)], ["open.prompt.messages[0].role"]),
        ([open_request(), batch_request(2)], ["batch.candidates"]),
        ([open_request(), batch_request(2, *[(i, "a") for i in range(9)])], ["batch.candidates"]),
        (
            [open_request(), batch_request(2, (0, ""), (-1, "a"), (0, "a"))],
            [f"batch.candidates[{index}].candidate_id" for index in (1, 2)],
        ),
        ([open_request(), pb.ScoreSessionRequest(sequence=2)], ["command"]),
    ],
)
async def test_every_violation_of_a_session_is_reported(
    serve: Serve, requests: list[pb.ScoreSessionRequest], fields: list[str]
) -> None:
    assert await bad_fields(converse(await serve(ToyReward()), *requests)) == fields


async def test_session_scores_batch_after_batch(serve: Serve) -> None:
    """Candidates grow, vanish, come in any order; scores are in the batch's order."""
    opened, first, second, old = await converse(
        await serve(ToyReward()),
        open_request(),
        batch_request(2, (5, "ab"), (0, ""), (3, "a")),
        batch_request(7, (3, "a b")),
        batch_request(1, (3, "a")),
    )
    assert opened.opened.fingerprint == ToyReward().fingerprint
    assert list(first.scores.scores) == [0.5, 0, 1]
    assert list(second.scores.scores) == [pytest.approx(1 / 3)]
    assert [answer.sequence for answer in (opened, first, second)] == [1, 2, 7]
    assert (first.scores.computed_tokens, second.scores.computed_tokens) == (2, 2)
    assert old == pb.ScoreSessionResponse(sequence=1, stale=pb.StaleScoring())


async def test_reward_receives_which_texts_have_ended(serve: Serve) -> None:
    """Guards how unfinished turns are closed: an open text has another score."""
    stub = await serve(FinishedReward())
    request = score_request("a", "b")
    assert list((await stub.Score(request)).scores) == [1, 1]
    request.unfinished = True
    assert list((await stub.Score(request)).scores) == [0, 0]
    batch = batch_request(2, (0, "a"), (1, "b"))
    batch.batch.candidates[1].finished = True
    _, answer = await converse(stub, open_request(), batch)
    assert list(answer.scores.scores) == [0, 1]


async def test_command_at_the_wrong_time_is_out_of_order(serve: Serve) -> None:
    """Guards against a prompt that changes in the middle of a session."""
    stub = await serve(ToyReward())
    for requests in ([batch_request(1, (0, "a"))], [open_request(1), open_request(2)]):
        call = converse(stub, *requests)
        assert await failure(call) == (Code.FAILED_PRECONDITION, "OUT_OF_ORDER")


async def test_session_without_commands_ends_with_its_lease(serve: Serve) -> None:
    call = (await serve(ToyReward(), lease_s=0.5)).ScoreSession()
    await call.write(open_request())
    await call.read()
    assert await failure(call.read()) == (Code.FAILED_PRECONDITION, "SESSION_EXPIRED")


async def test_every_call_is_unavailable_before_the_rewards_are_loaded(serve: Serve) -> None:
    stub = await serve()
    calls = (
        stub.Score(score_request("a")),
        stub.Describe(pb.RewardServiceDescribeRequest()),
        converse(stub, open_request()),
    )
    for call in calls:
        error = await failure_of(call)
        assert error.code() is Code.UNAVAILABLE
        assert retry_info_s(error)
