"""Many reward services as one: a scoring session goes on elsewhere, and nothing is scored twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from generator_service.toy import ToyGenerator
from orchestrator.backends.rewards import FleetRewards
from reward_service.toy import ToyReward
from specrej.contracts import Candidate, Degradation, Prompt, Scores
from specrej.errors import NotFound, Overloaded, Unavailable
from tests.orchestrator.backends.fleets import (
    ONCE,
    PROMPT,
    QUICK,
    Known,
    answered,
    num_serving,
    request,
    reward_services,
    target_of,
)
from tests.orchestrator.services import HeldReward, reward_backend
from tests.serving import until


class _HoldsAt(HeldReward):
    """Held at its batch of that number, from 1; 0: never."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        if self.num_batches + 1 == self.batch:
            self.gate.clear()
        return super().score(prompt, candidates)


@pytest.mark.parametrize("batch", [1, 2, 3])
async def test_a_request_survives_the_loss_of_its_reward_service(batch: int) -> None:
    asked = request(12)
    one, two = _HoldsAt(batch), _HoldsAt(batch)
    async with (
        reward_backend(ToyReward()) as alone,
        reward_services(Known([alone])) as fleet,
    ):
        undisturbed = await answered(asked, ToyGenerator(), FleetRewards(fleet).scorer("toy"))
    async with (
        reward_backend(one) as first,
        reward_backend(two) as second,
        reward_services(Known([first, second])) as fleet,
    ):
        scorer = FleetRewards(fleet).scorer("toy")
        running = asyncio.ensure_future(answered(asked, ToyGenerator(), scorer))
        await until(lambda: bool(one.held or two.held))
        ill, well, dying = (one, two, first) if one.held else (two, one, second)
        well.batch = 0
        killing = asyncio.ensure_future(dying.kill())
        moved = await running
        ill.gate.set()
        await killing
        assert moved.candidates == undisturbed.candidates
        assert not moved.degraded
        assert well.num_batches == len(moved.rounds) - batch + 1


async def test_the_last_one_is_lost() -> None:
    asked = request(8, allow_degraded=True)
    one = HeldReward()
    async with reward_backend(one) as only, reward_services(Known([only])) as fleet:
        one.gate.clear()
        scorer = FleetRewards(fleet).scorer("toy")
        running = asyncio.ensure_future(answered(asked, ToyGenerator(), scorer))
        await until(lambda: one.held == 1)
        killing = asyncio.ensure_future(only.kill())
        assert (await running).degradations == (Degradation.REWARD,)
        one.gate.set()
        await killing
        with pytest.raises(Unavailable):
            await answered(request(8), ToyGenerator(), FleetRewards(fleet).scorer("toy"))


async def test_what_all_of_them_serve() -> None:
    async with (
        reward_backend(ToyReward()) as first,
        reward_backend(ToyReward()) as second,
        reward_services(Known([first, second])) as fleet,
    ):
        rewards = FleetRewards(fleet)
        assert [each.name for each in await rewards.describe()] == ["toy"]
        with pytest.raises(NotFound):
            async with rewards.scorer("other").open(PROMPT):
                pass


class _RefusesOnce(HeldReward):
    """Drops its second batch, and the session with it."""

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        if self.num_batches == 1:
            self.num_batches += 1
            raise Overloaded("not now")
        return super().score(prompt, candidates)


async def test_the_only_one_is_asked_again() -> None:
    """One that has only dropped the session, as a lease that ran out does, is no loss."""
    one = _RefusesOnce()
    async with reward_backend(one) as only, reward_services(Known([only])) as fleet:
        scorer = FleetRewards(fleet).scorer("toy")
        generation = await answered(request(12), ToyGenerator(), scorer)
    assert one.num_batches == len(generation.rounds) + 1


class _Version(HeldReward):
    """One of several of the same name."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint


async def test_no_session_goes_on_with_another_reward() -> None:
    """Guards against scores of two versions in one ranking."""
    old, new = _Version("old"), _Version("new")
    candidates = (Candidate(0, "one", 1, -1.0), Candidate(1, "two", 1, -1.0))
    async with reward_backend(old) as first, reward_backend(new) as second:
        known = Known([first])
        async with (
            reward_services(known, QUICK) as fleet,
            FleetRewards(fleet).scorer("toy").open(PROMPT) as session,
        ):
            await session.score(candidates)
            known.targets |= {target_of(second)}
            await until(lambda: num_serving(fleet) == 2)
            await first.kill()
            await until(lambda: fleet.counts()["away"] == 1)
            with pytest.raises(Unavailable):
                await session.score(candidates)
    assert new.num_batches == 0


async def test_a_place_that_is_left_is_left_at_once() -> None:
    """Guards against what a lost service keeps, and is counted for, until the request is over."""
    one, two = _RefusesOnce(), _RefusesOnce()
    candidates = (Candidate(0, "one", 1, -1.0), Candidate(1, "two", 1, -1.0))
    async with (
        reward_backend(one) as first,
        reward_backend(two) as second,
        reward_services(Known([first, second])) as fleet,
    ):
        async with FleetRewards(fleet).scorer("toy").open(PROMPT) as session:
            for _ in range(2):
                await session.score(candidates)
            assert one.num_batches and two.num_batches  # it has moved
            assert sum(each.running for each in fleet.members()) == 1
            await until(lambda: first.is_idle != second.is_idle)
        assert sum(each.running for each in fleet.members()) == 0


async def test_rewards_are_described_as_of_now() -> None:
    """Guards against an answer kept under the name of a reward that did not judge it."""
    one = _Version("old")
    async with reward_backend(one) as only, reward_services(Known([only]), ONCE) as fleet:
        rewards = FleetRewards(fleet)
        assert [each.fingerprint for each in await rewards.describe()] == ["old"]
        one.fingerprint = "new"
        assert [each.fingerprint for each in await rewards.describe()] == ["new"]
