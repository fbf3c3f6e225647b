"""One reward service in front of another, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from reward_service.kinds.remote import RemoteWorker
from reward_service.kinds.toy import ToyReward
from reward_service.servicer import RewardServicer
from reward_service.worker import Worker
from specrej.backend.v1 import reward_pb2 as pb
from specrej.backend.v1 import reward_pb2_grpc
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.contracts.errors import InvalidRequest, Overloaded, RewardInvalid, Unavailable
from specrej.security import new_token
from specrej.server import interceptor
from specrej.server.serving import Context, Service
from tests.certificates import Authority, place
from tests.reward_service.conftest import Start
from tests.reward_service.fakes import FinishedReward, FixedReward
from tests.reward_service.tiny import connect, remote_worker
from tests.serving import listening, until

PROMPT = Prompt.from_user("Write it.")


def front_of(address: str, **options: Any) -> AbstractAsyncContextManager[RemoteWorker]:
    """A worker of the default reward at `address`."""
    return remote_worker("grpc", address=address, **options)


async def test_scores_are_those_of_the_other_service(start: Start) -> None:
    async with front_of(await start(ToyReward(), FixedReward([1.0]))) as worker:
        described, toy = worker.description, ToyReward()
        assert (described.name, described.fingerprint) == ("r", toy.fingerprint)
        assert described.description == toy.description
        assert worker.max_batch == 8  # larger batches would fail there
        assert await worker.score(PROMPT, ["aab", "", "b"]) == Scores(
            (2 / 3, 0.0, 0.0), 2, toy.fingerprint
        )


async def test_a_session_sends_what_has_ended(start: Start) -> None:
    """Guards the other service's option `unfinished`."""
    batch = [Candidate(0, "a", 0, 0.0), Candidate(1, "a", 0, 0.0, FinishReason.STOP)]
    async with front_of(await start(FinishedReward())) as worker, worker.open(PROMPT) as session:
        assert (await session.score(batch)).values == (0.0, 1.0)
        assert (await session.score(batch[1:])).values == (1.0,)


async def test_errors_of_the_other_service_are_raised(start: Start) -> None:
    async with front_of(await start(FixedReward([float("nan")]))) as worker:
        with pytest.raises(RewardInvalid):
            await worker.score(PROMPT, ["a"])
        with pytest.raises(InvalidRequest):
            await worker.score(Prompt(text=" "), ["a"])


async def test_a_reward_that_is_not_served_there_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="serves toy"):
        await connect("grpc", address=await start(ToyReward()), reward="other")
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1"):
        await connect("grpc", address="127.0.0.1:1", timeout_s=0.1)


async def test_the_start_waits_for_a_service_that_loads() -> None:
    """Guards against a start that fails, as all reward services listen before they have loaded."""
    servicer = RewardServicer(64, 60)
    worker = await Worker.start(ToyReward, 64, 0.0)
    try:
        async with listening(servicer.service()) as address:
            starting = asyncio.ensure_future(connect("grpc", address=address, timeout_s=20))
            asyncio.get_running_loop().call_later(0.3, servicer.serve, [worker])
            connected = await starting
            assert connected.fingerprint == ToyReward().fingerprint
            await connected.aclose()
    finally:
        worker.close()
        await worker.join(20)


async def test_a_busy_service_is_served(start: Start) -> None:
    """Guards against a start that fails because the other service's queue is full."""
    front = await connect("grpc", address=await start(ToyReward()))
    scorer = front._scorer = mock.Mock(side_effect=Overloaded("full"))
    worker = await RemoteWorker.start(mock.AsyncMock(return_value=front))
    assert scorer.called
    worker.close()
    await worker.join(20)


class Hanging(reward_pb2_grpc.RewardServiceServicer):
    """Opens sessions and answers no batch."""

    def __init__(self) -> None:
        self.times_left: list[float] = []  # of batches
        self.num_cancelled = 0

    async def Describe(self, _: object, context: Context) -> pb.RewardServiceDescribeResponse:  # noqa: N802
        return pb.RewardServiceDescribeResponse(rewards=[pb.RewardDescription(name="toy")])

    async def ScoreSession(self, requests: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        number = (await anext(requests)).sequence
        opened = pb.ScoringOpened(fingerprint="f")
        await context.write(pb.ScoreSessionResponse(sequence=number, opened=opened))
        await anext(requests)
        self.times_left.append(context.time_remaining() or math.inf)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def test_a_late_or_cancelled_call_ends_there() -> None:
    """Guards against a call without an end, and work there for a caller that is gone."""
    hanging = Hanging()  # type: ignore[abstract]
    register = partial(reward_pb2_grpc.add_RewardServiceServicer_to_server, hanging)
    deadline = interceptor._deadline.set(time.monotonic() + 20)
    try:
        async with (
            listening(Service("specrej.backend.v1.RewardService", register)) as address,
            front_of(address, timeout_s=2.0) as impatient,
            front_of(address) as patient,
        ):
            with pytest.raises(Unavailable, match=r"did not answer within 2 s"):
                await impatient.score(PROMPT, ["a"])
            await until(lambda: hanging.num_cancelled == 1)
            call = asyncio.create_task(patient.score(PROMPT, ["a"]))
            await until(lambda: len(hanging.times_left) == 2)
            call.cancel()
            await until(lambda: hanging.num_cancelled == 2)
            with pytest.raises(asyncio.CancelledError):
                await call
    finally:
        interceptor._deadline.reset(deadline)
    assert all(10 < left_s < 22 for left_s in hanging.times_left)


async def test_token_is_sent_over_tls(start: Start, tmp_path: Path) -> None:
    """A refused token is no fault of the caller: UNAVAILABLE."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    token, line = new_token("front")
    place(tmp_path / "tokens", line)
    place(tmp_path / "token", token)
    keys = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    address = await start(ToyReward(), tokens_file=str(tmp_path / "tokens"), **keys)
    spec: dict[str, Any] = {"address": address, "tls_ca": str(authority.path), "timeout_s": 10}
    async with front_of(**spec, token_file=str(tmp_path / "token")) as front:
        assert (await front.score(PROMPT, ["aab"])).values == (2 / 3,)
        place(tmp_path / "tokens", "")
        with pytest.raises(Unavailable, match="refused this service's token"):
            await front.score(PROMPT, ["aab"])
    with pytest.raises(RuntimeError, match="UNAUTHENTICATED"):
        await connect("grpc", **spec)
