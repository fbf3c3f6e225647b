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
from tests.orchestrator.backends.fleets import PROMPT, Known, answered, request, reward_services
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
