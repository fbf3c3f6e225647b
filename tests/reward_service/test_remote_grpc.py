"""One reward service in front of another, over real gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reward_service.reward import WholeBatchReward, score, score_batch
from reward_service.servicer import RewardServicer
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.errors import InvalidRequest, RewardInvalid, Unavailable
from specrej.security import new_token
from tests.certificates import Authority, place
from tests.faults.rogue import grpc_rogue
from tests.reward_service.conftest import Start
from tests.reward_service.fakes import FinishedReward, FixedReward, GatedReward
from tests.reward_service.tiny import load
from tests.serving import listening

PROMPT = Prompt.from_user("Write it.")


async def connected(start: Start, *rewards: WholeBatchReward, **options: Any) -> Any:
    address = await start(*rewards)
    return await asyncio.to_thread(lambda: load("grpc", address=address, **options))


async def test_scores_are_those_of_the_other_service(start: Start) -> None:
    reward = await connected(start, ToyReward(), FixedReward([1.0]))
    assert (reward.name, reward.fingerprint) == ("r", ToyReward().fingerprint)
    assert reward.description == ToyReward().description
    scores = await asyncio.to_thread(score, reward, PROMPT, ["aab", "", "b"])
    assert scores == Scores((2 / 3, 0.0, 0.0), 2)


async def test_a_session_sends_what_has_ended_and_goes_on_after_close(start: Start) -> None:
    """Guards the other service's option `unfinished`, and the contract of sessions."""
    reward = await connected(start, FinishedReward())
    batch = [Candidate(0, "a", 0, 0.0), Candidate(1, "a", 0, 0.0, FinishReason.STOP)]

    def twice() -> list[Scores]:
        session = reward.open(PROMPT)
        first = score_batch(session, reward, batch)
        session.close()
        return [first, score_batch(session, reward, batch[1:])]

    assert await asyncio.to_thread(twice) == [Scores((0.0, 1.0), 7), Scores((1.0,), 7)]


async def test_errors_of_the_other_service_are_raised(start: Start) -> None:
    reward = await connected(start, FixedReward([float("nan")]))
    with pytest.raises(RewardInvalid):
        await asyncio.to_thread(score, reward, PROMPT, ["a"])
    with pytest.raises(InvalidRequest):
        await asyncio.to_thread(score, reward, Prompt(text=" "), ["a"])


@pytest.mark.parametrize("fault", ["wrong_ids", "no_scores", "stale"])
async def test_answer_to_another_request_is_refused(fault: str) -> None:
    """Guards against the scores of one batch being taken for those of another."""
    async with grpc_rogue(fault) as port:
        reward = await asyncio.to_thread(lambda: load("grpc", address=f"127.0.0.1:{port}"))
        with pytest.raises(RewardInvalid, match="does not belong to the request"):
            await asyncio.to_thread(score, reward, PROMPT, ["a", "b"])


async def test_a_reward_that_is_not_served_there_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="serves toy"):
        await connected(start, ToyReward(), reward="other")


async def test_late_answer_is_unavailable(start: Start) -> None:
    """Guards the reward's thread, for which all of its sessions wait."""
    gated = GatedReward()
    reward = await connected(start, gated, timeout_s=0.5)
    try:
        with pytest.raises(Unavailable):
            await asyncio.to_thread(score, reward, PROMPT, ["a"])
    finally:
        gated.gate.set()


async def test_token_is_sent_over_tls(tmp_path: Path) -> None:
    """A refused token is no fault of the caller: UNAVAILABLE."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    token, line = new_token("front")
    place(tmp_path / "tokens", line)
    place(tmp_path / "token", token)
    worker = await Worker.start(ToyReward)
    servicer = RewardServicer(max_batch=8, lease_s=30)
    servicer.serve([worker])
    secured: dict[str, Any] = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    secured["tokens_file"] = str(tmp_path / "tokens")

    def check(address: str) -> None:
        spec: dict[str, Any] = {"address": address, "tls_ca": str(authority.path), "timeout_s": 10}
        reward = load("grpc", **spec, token_file=str(tmp_path / "token"))
        assert score(reward, PROMPT, ["aab"]).values == (2 / 3,)
        place(tmp_path / "tokens", "")
        with pytest.raises(Unavailable, match="refused this service's token"):
            score(reward, PROMPT, ["aab"])
        with pytest.raises(RuntimeError, match="UNAUTHENTICATED"):
            load("grpc", **spec)

    async with listening(servicer.service(), **secured) as address:
        await asyncio.to_thread(check, address)
    worker.close()
