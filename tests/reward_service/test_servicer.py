"""RewardService over real gRPC, on rewards without models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from reward_service.reward import WholeBatchReward
from reward_service.servicer import MAX_RESPONSE_CHARACTERS
from reward_service.toy import ToyReward
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.errors import (
    InvalidRequest,
    NotFound,
    OutOfOrder,
    Overloaded,
    RewardInvalid,
    SessionExpired,
    SpecrejError,
    Unavailable,
)
from specrej.status import from_rpc_error
from specrej.v1 import common_pb2
from specrej.v1 import reward_pb2 as pb
from specrej.v1.reward_pb2_grpc import RewardServiceStub
from tests.reward_service.conftest import Serve
from tests.reward_service.fakes import FixedReward, GatedReward

if TYPE_CHECKING:
    from specrej.v1.reward_pb2_grpc import RewardServiceAsyncStub

PROMPT = common_pb2.Prompt(text="Say it.")
SERVICE = "specrej.v1.RewardService"
Code = grpc.StatusCode


def stub_of(channel: grpc.aio.Channel) -> RewardServiceAsyncStub:
    return RewardServiceStub(channel)


def score_request(*responses: str, reward: str = "") -> pb.ScoreRequest:
    return pb.ScoreRequest(reward=reward, prompt=PROMPT, responses=responses)


def open_request(sequence: int = 1, **changes: Any) -> pb.ScoreSessionRequest:
    scoring = pb.OpenScoring(**({"prompt": PROMPT} | changes))
    return pb.ScoreSessionRequest(sequence=sequence, open=scoring)


def batch_request(sequence: int, *candidates: tuple[int, str]) -> pb.ScoreSessionRequest:
    batch = [pb.ScoreCandidate(candidate_id=i, text=text) for i, text in candidates]
    return pb.ScoreSessionRequest(sequence=sequence, batch=pb.ScoreBatch(candidates=batch))


async def converse(
    channel: grpc.aio.Channel, *requests: pb.ScoreSessionRequest
) -> list[pb.ScoreSessionResponse]:
    """The answers to some messages on one stream, sent one after the other, then half-closed."""
    call = stub_of(channel).ScoreSession()
    answers = []
    for request in requests:
        await call.write(request)
        answer = await call.read()
        if isinstance(answer, pb.ScoreSessionResponse):
            answers.append(answer)
    await call.done_writing()
    assert await call.code() is Code.OK
    return answers


async def failure(awaitable: Any, code: grpc.StatusCode, kind: type[SpecrejError]) -> SpecrejError:
    """The error that a call is answered with; its code and exception type are checked."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await awaitable
    assert raised.value.code() is code
    error = from_rpc_error(raised.value)
    assert type(error) is kind
    return error


async def bad_fields(awaitable: Any) -> list[str]:
    error = await failure(awaitable, Code.INVALID_ARGUMENT, InvalidRequest)
    assert isinstance(error, InvalidRequest)
    return [violation.field for violation in error.violations]


async def test_score(serve: Serve) -> None:
    stub = stub_of(await serve(ToyReward()))
    answer = await stub.Score(score_request("aab", "", "b", "aab"))
    assert list(answer.scores) == [2 / 3, 0, 0, 2 / 3]
    assert answer.computed_tokens == 2


async def test_rewards_are_found_by_name_and_the_first_is_the_default(serve: Serve) -> None:
    stub = stub_of(await serve(ToyReward(), FixedReward([7.0])))
    assert list((await stub.Score(score_request("a"))).scores) == [1]
    assert list((await stub.Score(score_request("a", reward="toy"))).scores) == [1]
    assert list((await stub.Score(score_request("a", reward="fixed"))).scores) == [7]


@pytest.mark.parametrize("name", ["other", "../../x", "TOY", "\0"])
async def test_an_unknown_reward_is_not_found(serve: Serve, name: str) -> None:
    channel = await serve(ToyReward())
    call = stub_of(channel).Score(score_request("a", reward=name))
    await failure(call, Code.NOT_FOUND, NotFound)
    session = converse(channel, open_request(reward=name))
    await failure(session, Code.NOT_FOUND, NotFound)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.ScoreRequest(), ["prompt", "responses"]),
        (pb.ScoreRequest(prompt=PROMPT), ["responses"]),
        (
            pb.ScoreRequest(prompt=common_pb2.Prompt(text=" \n"), responses=["a"]),
            ["prompt.text"],
        ),
        (
            pb.ScoreRequest(
                prompt=common_pb2.Prompt(
                    messages=[common_pb2.Message(role="robot", content="")], text="both"
                ),
                responses=["a"] * 9,
            ),
            [
                "prompt",
                "prompt.messages[0].role",
                "prompt.messages[0].content",
                "prompt.messages[0].role",
                "responses",
            ],
        ),
        (
            score_request("a", "x" * (MAX_RESPONSE_CHARACTERS + 1), "x" * MAX_RESPONSE_CHARACTERS),
            ["responses[1]"],
        ),
    ],
)
async def test_score_names_every_bad_field(
    serve: Serve, request_: pb.ScoreRequest, fields: list[str]
) -> None:
    stub = stub_of(await serve(ToyReward()))
    assert await bad_fields(stub.Score(request_)) == fields


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (batch_request(2), ["batch.candidates"]),
        (batch_request(2, *[(i, "a") for i in range(9)]), ["batch.candidates"]),
        (
            batch_request(2, (0, ""), (-1, "a"), (0, "x" * (MAX_RESPONSE_CHARACTERS + 1))),
            [
                "batch.candidates[2].text",
                "batch.candidates[1].candidate_id",
                "batch.candidates[2].candidate_id",
            ],
        ),
        (pb.ScoreSessionRequest(sequence=2), ["command"]),
        (batch_request(0, (0, "a")), ["sequence"]),
        (batch_request(-5, (0, "a")), ["sequence"]),
    ],
)
async def test_a_session_names_every_bad_field(
    serve: Serve, request_: pb.ScoreSessionRequest, fields: list[str]
) -> None:
    channel = await serve(ToyReward())
    assert await bad_fields(converse(channel, open_request(), request_)) == fields


async def test_a_bad_prompt_is_refused_when_a_session_opens(serve: Serve) -> None:
    channel = await serve(ToyReward())
    prompt = common_pb2.Prompt(messages=[common_pb2.Message(role="assistant", content="Hm.")])
    fields = await bad_fields(converse(channel, open_request(prompt=prompt)))
    assert fields == ["open.prompt.messages[0].role"]


async def test_a_thousand_bad_fields_are_still_an_answer(serve: Serve) -> None:
    """Guards against trailers too large for the client, which then sees another status."""
    channel = await serve(ToyReward(), max_batch=1024)
    batch = batch_request(2, *[(-1, "a")] * 1024)
    fields = await bad_fields(converse(channel, open_request(), batch))
    assert fields[:2] == ["batch.candidates[0].candidate_id", "batch.candidates[1].candidate_id"]
    assert fields[-1] == "request"  # how many more there are


async def test_a_session_scores_batch_after_batch(serve: Serve) -> None:
    """Candidates grow, vanish, come in any order; scores come in the batch's order."""
    channel = await serve(ToyReward())
    opened, first, second = await converse(
        channel,
        open_request(),
        batch_request(2, (5, "ab"), (0, ""), (3, "a")),
        batch_request(7, (3, "a b")),
    )
    assert opened.opened.fingerprint == ToyReward().fingerprint
    assert list(first.scores.scores) == [0.5, 0, 1]
    assert list(second.scores.scores) == [pytest.approx(1 / 3)]
    assert [answer.sequence for answer in (opened, first, second)] == [1, 2, 7]
    assert (first.scores.computed_tokens, second.scores.computed_tokens) == (2, 2)


async def test_a_repeated_number_is_answered_alike_and_computed_once(serve: Serve) -> None:
    """Guards a retried message: same answer, whatever it carries; older ones are stale."""
    channel = await serve(ToyReward())
    _, first, again, old, later, opened_again = await converse(
        channel,
        open_request(),
        batch_request(2, (0, "a")),
        batch_request(2, (0, "bbb")),
        batch_request(1, (0, "a")),
        batch_request(3, (0, "ab")),
        open_request(1),
    )
    assert again == first
    assert old == pb.ScoreSessionResponse(sequence=1, stale=pb.StaleScoring())
    assert list(later.scores.scores) == [0.5]
    assert opened_again.WhichOneof("result") == "stale"


async def test_a_batch_before_open_is_out_of_order(serve: Serve) -> None:
    channel = await serve(ToyReward())
    session = converse(channel, batch_request(1, (0, "a")))
    await failure(session, Code.FAILED_PRECONDITION, OutOfOrder)


async def test_opening_twice_is_out_of_order(serve: Serve) -> None:
    """Guards against a prompt that changes under its candidates."""
    channel = await serve(ToyReward())
    session = converse(channel, open_request(1), open_request(2))
    await failure(session, Code.FAILED_PRECONDITION, OutOfOrder)


@pytest.mark.parametrize("num_messages", [0, 1])
async def test_a_silent_peer_loses_its_session(serve: Serve, num_messages: int) -> None:
    """Guards against streams that are held for ever by peers that hang."""
    call = stub_of(await serve(ToyReward(), lease_s=0.5)).ScoreSession()
    for _ in range(num_messages):
        await call.write(open_request())
        await call.read()
    await failure(call.read(), Code.FAILED_PRECONDITION, SessionExpired)


async def test_half_closing_at_once_is_fine(serve: Serve) -> None:
    assert await converse(await serve(ToyReward())) == []


@pytest.mark.parametrize("values", [[float("nan")], [float("-inf")], [], [1.0, 2.0]])
async def test_an_invalid_reward_says_so(serve: Serve, values: list[float]) -> None:
    """Guards the orchestrator's choice to degrade: ErrorInfo REWARD_INVALID, code INTERNAL."""
    stub = stub_of(await serve(FixedReward(values)))
    await failure(stub.Score(score_request("a")), Code.INTERNAL, RewardInvalid)


async def test_an_invalid_reward_says_so_in_a_session(serve: Serve) -> None:
    channel = await serve(FixedReward([float("nan")]))
    session = converse(channel, open_request(), batch_request(2, (0, "a")))
    await failure(session, Code.INTERNAL, RewardInvalid)


async def test_a_full_queue_is_refused_with_a_delay(serve: Serve) -> None:
    reward = GatedReward()
    stub = stub_of(await serve(reward, queue_limit=1))
    running = asyncio.ensure_future(stub.Score(score_request("a")))
    assert await asyncio.to_thread(reward.entered.wait, 10)
    refused = stub.Score(score_request("b"))
    error = await failure(refused, Code.RESOURCE_EXHAUSTED, Overloaded)
    assert error.retry_after_s
    reward.gate.set()
    assert list((await running).scores) == [0]


async def test_a_call_whose_deadline_passes_in_the_queue_is_never_computed(serve: Serve) -> None:
    reward = GatedReward()
    stub = stub_of(await serve(reward, deadline_s=0.1))
    for text in ("running", "late"):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Score(score_request(text))
        assert raised.value.code() is Code.DEADLINE_EXCEEDED
    reward.gate.set()
    await stub.Score(score_request("next"), timeout=20)
    assert reward.seen == ["running", "next"]


async def test_a_cancelled_call_leaves_the_service_in_order(serve: Serve) -> None:
    """Guards against lost room in the queue, and answers that go to the next caller."""
    reward = GatedReward()
    stub = stub_of(await serve(reward, queue_limit=2))
    session = stub.ScoreSession()
    await session.write(open_request())
    await session.read()
    await session.write(batch_request(2, (0, "cancelled")))
    assert await asyncio.to_thread(reward.entered.wait, 10)
    session.cancel()
    assert await session.code() is Code.CANCELLED
    reward.gate.set()
    for text in ("b", "c", "d"):
        assert len((await stub.Score(score_request(text, text))).scores) == 2


async def test_nothing_is_served_before_the_rewards_are_loaded(serve: Serve) -> None:
    channel = await serve()
    stub = stub_of(channel)
    calls = (
        stub.Score(score_request("a")),
        stub.Describe(pb.RewardServiceDescribeRequest()),
        stub.ScoreSession().read(),
    )
    for call in calls:
        error = await failure(call, Code.UNAVAILABLE, Unavailable)
        assert error.retry_after_s
    assert await health(channel, "") == health_pb2.HealthCheckResponse.NOT_SERVING


class FinishedReward(WholeBatchReward):
    """1 for what has ended, 0 for what goes on."""

    def __init__(self) -> None:
        super().__init__("finished", "f", "Whether it ended.")

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(float(c.finish is FinishReason.STOP) for c in candidates))


async def test_rewards_are_told_what_has_ended(serve: Serve) -> None:
    """Guards how unfinished turns are closed: a prefix scored as an answer is another number."""
    channel = await serve(FinishedReward())
    stub = stub_of(channel)
    request = score_request("a", "b")
    assert list((await stub.Score(request)).scores) == [1, 1]
    request.unfinished = True
    assert list((await stub.Score(request)).scores) == [0, 0]
    batch = batch_request(2, (0, "a"), (1, "b"))
    batch.batch.candidates[1].finished = True
    _, answer = await converse(channel, open_request(), batch)
    assert list(answer.scores.scores) == [0, 1]


async def test_describe(serve: Serve) -> None:
    stub = stub_of(await serve(ToyReward(), FixedReward([0.0]), max_batch=5))
    answer = await stub.Describe(pb.RewardServiceDescribeRequest())
    toy = ToyReward()
    assert [reward.name for reward in answer.rewards] == ["toy", "fixed"]
    assert answer.rewards[0].fingerprint == toy.fingerprint
    assert answer.rewards[0].description == toy.description
    assert {reward.max_batch for reward in answer.rewards} == {5}


async def test_a_bug_in_a_reward_is_opaque(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against class names, paths and prompts that leave the process in an error."""

    class Buggy(GatedReward):
        def score(self, prompt: Prompt, texts: Any) -> Any:
            if self._warm:
                raise KeyError("secret")
            return super().score(prompt, texts)

    stub = stub_of(await serve(Buggy()))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Score(score_request("a"))
    assert raised.value.code() is Code.INTERNAL
    assert "secret" not in str(raised.value.details())
    assert "secret" in caplog.text


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


async def test_health_and_reflection(serve: Serve) -> None:
    channel = await serve(ToyReward())
    for service in ("", SERVICE):
        assert await health(channel, service) == health_pb2.HealthCheckResponse.SERVING
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = make_stub(channel).ServerReflectionInfo(iter([request]))
    answer = await call.read()
    assert SERVICE in [service.name for service in answer.list_services_response.service]
