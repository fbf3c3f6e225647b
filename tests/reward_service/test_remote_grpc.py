"""One reward service in front of another, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from reward_service.catalog import load_reward
from reward_service.remote_grpc import GRPCReward
from reward_service.reward import WholeBatchReward, score, score_batch
from reward_service.servicer import RewardServicer
from reward_service.settings import GRPCSpec, RewardSettings
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.contracts import Candidate, FinishReason, Prompt, Scores
from specrej.errors import InvalidRequest, RewardInvalid, Unavailable
from specrej.security import new_token
from tests.certificates import Authority, place
from tests.faults.rogue import grpc_rogue
from tests.reward_service.conftest import Start
from tests.reward_service.fakes import FixedReward, GatedReward
from tests.specrej.fakes import serve

PROMPT = Prompt.from_user("Say it.")


class FinishedReward(WholeBatchReward):
    """1 for what has ended, 0 for what goes on."""

    def __init__(self) -> None:
        super().__init__("finished", "f", "Whether it ended.")

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(float(c.finish is FinishReason.STOP) for c in candidates), 7)


async def connected(start: Start, *rewards: WholeBatchReward, **options: Any) -> GRPCReward:
    address = await start(*rewards)
    return await asyncio.to_thread(lambda: GRPCReward("far", address, **options))


async def test_it_is_the_other_services_reward(start: Start) -> None:
    reward = await connected(start, ToyReward(), FixedReward([1.0]))
    assert (reward.name, reward.fingerprint) == ("far", ToyReward().fingerprint)
    assert reward.description == ToyReward().description
    scores = await asyncio.to_thread(score, reward, PROMPT, ["aab", "", "b"])
    assert scores == Scores((2 / 3, 0.0, 0.0), 2)


async def test_what_has_ended_is_told(start: Start) -> None:
    """Guards the setting for unfinished texts, which is the other end's."""
    reward = await connected(start, FinishedReward())
    batch = [Candidate(0, "a", 0, 0.0), Candidate(1, "a", 0, 0.0, FinishReason.STOP)]

    def scored() -> Scores:
        return score_batch(reward.open(PROMPT), reward, batch)

    assert await asyncio.to_thread(scored) == Scores((0.0, 1.0), 7)


async def test_a_session_goes_on_after_close(start: Start) -> None:
    """Guards the contract of sessions: closed ones compute everything again."""
    reward = await connected(start, ToyReward())

    def twice() -> list[Scores]:
        session = reward.open(PROMPT)
        first = score_batch(session, reward, [Candidate(0, "a", 0, 0.0)])
        session.close()
        return [first, score_batch(session, reward, [Candidate(0, "b", 0, 0.0)])]

    assert await asyncio.to_thread(twice) == [Scores((1.0,), 1), Scores((0.0,), 1)]


async def test_errors_of_the_other_end_are_ours(start: Start) -> None:
    reward = await connected(start, FixedReward([float("nan")]))
    with pytest.raises(RewardInvalid):
        await asyncio.to_thread(score, reward, PROMPT, ["a"])
    with pytest.raises(InvalidRequest):
        await asyncio.to_thread(score, reward, Prompt(text=" "), ["a"])


@pytest.mark.parametrize("what", ["wrong_ids", "no_scores", "stale"])
async def test_an_answer_to_something_else_is_refused(what: str) -> None:
    """Guards against the scores of one batch being taken for those of another."""
    async with grpc_rogue() as port:
        address = f"127.0.0.1:{port}"
        reward = await asyncio.to_thread(lambda: GRPCReward("far", address, reward=what))
        with pytest.raises(RewardInvalid, match="something else"):
            await asyncio.to_thread(score, reward, PROMPT, ["a"])


async def test_a_reward_that_is_not_served_there_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="serves toy"):
        await connected(start, ToyReward(), reward="other")


async def test_nobody_there_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1: DEADLINE_EXCEEDED|UNAVAILABLE"):
        await asyncio.to_thread(lambda: GRPCReward("far", "127.0.0.1:1", timeout_s=0.2))


async def test_an_answer_that_takes_too_long_is_unavailable(start: Start) -> None:
    """Guards the reward's thread, on which all of its sessions wait."""
    gated = GatedReward()
    reward = await connected(start, gated, timeout_s=0.5)
    try:
        with pytest.raises(Unavailable):
            await asyncio.to_thread(score, reward, PROMPT, ["a"])
    finally:
        gated.gate.set()


async def test_a_worker_drives_it_as_any_reward(start: Start) -> None:
    reward = await connected(start, ToyReward())
    worker = await Worker.start(lambda: reward)
    try:
        calls = (worker.score(PROMPT, [text]) for text in ("a", "ab", "b"))
        found = await asyncio.gather(*calls)
        assert [scores.values for scores in found] == [(1.0,), (0.5,), (0.0,)]
    finally:
        worker.close()


async def test_it_shows_its_token_over_tls(tmp_path: Path) -> None:
    """Guards the options of the kind grpc, and against a refused token being our caller's fault."""
    authority = Authority(tmp_path)
    pair = authority.issue()
    token, line = new_token("front")
    place(tmp_path / "tokens", line)
    place(tmp_path / "token", token)
    worker = await Worker.start(ToyReward)
    servicer = RewardServicer(max_batch=8, lease_s=30)
    servicer.serve([worker])
    secured = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    secured["tokens_file"] = str(tmp_path / "tokens")
    spec = {"name": "far", "kind": "grpc", "tls_ca": str(authority.path), "timeout_s": 10}

    def ask(address: str) -> None:
        known = GRPCSpec(**spec, address=address, token_file=str(tmp_path / "token"))
        reward = load_reward(known, RewardSettings())
        assert score(reward, PROMPT, ["aab"]).values == (2 / 3,)
        place(tmp_path / "tokens", "")
        with pytest.raises(Unavailable, match="does not let this service in"):
            score(reward, PROMPT, ["aab"])
        with pytest.raises(RuntimeError, match="UNAUTHENTICATED"):
            load_reward(GRPCSpec(**spec, address=address), RewardSettings())

    async with serve(servicer.service().name, servicer.service().register, **secured) as address:
        await asyncio.to_thread(ask, address)
    worker.close()
