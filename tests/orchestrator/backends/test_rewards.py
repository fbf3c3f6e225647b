"""Several reward services as one: a scoring session survives the loss of one service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from reward_service.kinds.toy import ToyReward
from specrej.contracts import Candidate, Prompt, Schedule, Scores
from specrej.contracts.errors import NotFound, Overloaded, SpecrejError, Unavailable
from tests.orchestrator.backends.fleets import request, reward_services, target_of
from tests.orchestrator.runs import PROMPT, answer
from tests.serving import until
from tests.world import HeldReward

CANDIDATES = (Candidate(0, "one", 1, -1.0), Candidate(1, "two", 1, -1.0))


class HeldAt(HeldReward):
    """Waits in its batch of this number, from 1; 0: in none."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        if self.num_batches + 1 == self.batch:
            self.gate.clear()
        return super().score(prompt, candidates)


class Refuses(HeldReward):
    """Refuses batches of these numbers, from 1, which ends the session each time."""

    def __init__(self, *batches: int, error: type[SpecrejError] = Overloaded) -> None:
        super().__init__()
        self.batches = batches
        self.error = error

    def score(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Scores:
        if self.num_batches + 1 in self.batches:
            self.num_batches += 1
            raise self.error("not now")
        return super().score(prompt, candidates)


@pytest.mark.parametrize("batch", [1, 2, 3])
async def test_an_answer_does_not_change_if_its_reward_service_is_lost(batch: int) -> None:
    """And no batch is scored twice."""
    async with reward_services(ToyReward()) as running:
        undisturbed = await answer(request(12), ToyGenerator(), partial(running.client.open, "toy"))
    rewards = [HeldAt(batch), HeldAt(batch)]
    async with reward_services(*rewards) as running:
        scorer = partial(running.client.open, "toy")
        answering = asyncio.ensure_future(answer(request(12), ToyGenerator(), scorer))
        await until(lambda: any(reward.held for reward in rewards))
        lost, other = (0, 1) if rewards[0].held else (1, 0)
        rewards[other].batch = 0
        killing = asyncio.ensure_future(running.servers[lost].kill())
        moved = await answering
        rewards[lost].gate.set()
        await killing
    assert moved.candidates == undisturbed.candidates
    assert not moved.degraded
    assert rewards[other].num_batches == len(moved.rounds) - batch + 1


async def test_the_description_has_the_rewards_that_all_services_serve() -> None:
    async with reward_services(ToyReward(), ToyReward()) as running:
        assert [reward.name for reward in await running.client.describe()] == ["toy"]
        with pytest.raises(NotFound):
            async with running.client.open("other", PROMPT):
                pass


async def test_the_description_follows_the_service() -> None:
    """Guards against plans for a reward that the service has replaced."""
    reward = HeldReward()

    async def is_new() -> bool:
        return (await running.client.describe())[0].fingerprint == "new"

    async with reward_services(reward) as running:
        assert not await is_new()
        reward.fingerprint = "new"
        await until(is_new)


async def test_a_service_that_answers_is_not_away() -> None:
    """Guards against one reward's failure, such as that of a server of its own, that takes a
    service from all other requests."""
    reward = Refuses(*range(1, 9), error=Unavailable)
    async with reward_services(reward) as running:
        with pytest.raises(Unavailable):
            await answer(request(), ToyGenerator(), partial(running.client.open, "toy"))
        assert running.counts == (1, 0, 0)


@pytest.mark.parametrize("batches", [(2,), (2, 5)])
async def test_a_service_that_ended_the_session_is_tried_again(batches: tuple[int, ...]) -> None:
    """A session whose lease expired is no sign that its service is lost. Each failure has tries of
    its own: most of a long request's work is done at the second one."""
    reward = Refuses(*batches)
    async with reward_services(reward) as running:
        scorer = partial(running.client.open, "toy")
        many = request(12, schedule=Schedule(first=2, factor=1.5))
        generation = await answer(many, ToyGenerator(end_every=10**9), scorer)
    assert reward.num_batches == len(generation.rounds) + len(batches) > 6


async def test_no_session_continues_with_another_version() -> None:
    """Guards against scores of two versions in one ranking."""
    old, new = HeldReward(), HeldReward()
    new.fingerprint = "new"
    async with (
        reward_services(old, new, num_listed=1) as running,
        running.client.open("toy", PROMPT) as session,
    ):
        await session.score(CANDIDATES)
        running.resolver.targets |= {target_of(running.servers[1])}
        await until(lambda: running.counts == (1, 1, 0))
        await running.servers[0].kill()
        await until(lambda: running.counts[2] == 1)
        with pytest.raises(Unavailable):
            await session.score(CANDIDATES)
    assert new.num_batches == 0


async def test_a_session_that_moved_is_closed_at_once() -> None:
    """Guards against state that a service keeps, and a count, until the request ends."""
    rewards = [Refuses(2), Refuses(2)]
    async with reward_services(*rewards) as running:
        members = running.fleet.members()
        async with running.client.open("toy", PROMPT) as session:
            for _ in range(2):
                await session.score(CANDIDATES)
            assert all(reward.num_batches for reward in rewards), "the session has not moved"
            assert sum(backend.running for backend in members) == 1
            await until(lambda: sum(server.num_scoring for server in running.servers) == 1)
        assert sum(backend.running for backend in members) == 0


async def test_the_smallest_batch_of_all_services_counts() -> None:
    """Guards against a plan that the service of a session refuses."""
    async with reward_services(ToyReward(), ToyReward()) as running:
        servers: list[Any] = running.servers
        for server, most in zip(servers, (1024, 8), strict=True):
            server._servicer._max_batch = most

        async def is_least() -> bool:
            return [reward.max_batch for reward in await running.client.describe()] == [8]

        await until(is_least)


async def test_a_reward_that_some_services_have_is_found() -> None:
    """Guards a rollout that adds a reward against NOT_FOUND from services without it."""
    async with reward_services(ToyReward(), ToyReward("other")) as running:
        assert {reward.name for reward in await running.client.describe()} == {"toy", "other"}
        for name in ("toy", "other") * 4:
            async with running.client.open(name, Prompt(text=name)) as session:
                assert (await session.score(CANDIDATES)).values
