"""The public port: weighted rewards, vetoes, and answers without a reward service."""

from __future__ import annotations

import math
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from orchestrator.cache import Secret
from orchestrator.edge.planning import Defaults, Planner
from specrej import contracts as c
from specrej.contracts import wire
from specrej.contracts.errors import InternalError, Overloaded, Unavailable
from specrej.security import Share
from specrej.v1 import orchestrator_pb2 as pb
from tests.world import ALL, Code, World, generation, rewards, small_request, world


async def test_a_score_is_the_weighted_sum_of_rewards(service: World) -> None:
    weights = rewards(("toy", 3.0), ("likelihood", 0.25), ("other", -1.0))
    weighted = await service.answer(small_request(selection=ALL | weights))
    plain = await service.answer(small_request(selection=ALL))
    toy_scores = {ranked.candidate_id: ranked.score for ranked in plain.candidates}
    for ranked in weighted.candidates:
        toy = toy_scores[ranked.candidate_id]
        assert list(ranked.rewards) == [toy, ranked.mean_logprob, toy]
        assert ranked.score == math.fsum((3.0 * toy, 0.25 * ranked.mean_logprob, -toy))
    assert weighted.fingerprints.reward != plain.fingerprints.reward
    # Two rewards have computed the texts of one.
    assert weighted.usage.reward_tokens == 2 * plain.usage.reward_tokens > 0


async def test_the_likelihood_needs_no_reward_service(service: World) -> None:
    """As the requested reward, or in place of one that was never described."""
    await service.reward_server.kill()
    reply = await service.answer(small_request(selection=rewards(("likelihood", 1))))
    assert reply.score == reply.candidates[0].mean_logprob
    assert reply.usage.reward_tokens == 0
    assert (await service.refusal(small_request())).code() is Code.UNAVAILABLE
    for selection in ({}, rewards(("toy", 1))):
        reply = await service.answer(small_request(selection=selection, allow_degraded=True))
        assert list(reply.degradations) == [pb.DEGRADATION_REWARD]


@pytest.mark.parametrize("kind", [Unavailable, Overloaded, InternalError])
async def test_a_reward_that_cannot_be_described_is_replaced_if_allowed(
    kind: type[Exception],
) -> None:
    """Guards against INTERNAL where a foreign program answers on the reward service's port."""
    described = [c.RewardDescription("toy", "f", "a toy")]

    class Failing:
        fails = False
        open = print

        async def describe(self) -> list[c.RewardDescription]:
            if self.fails:
                raise kind("failed")
            return described

    served: Any = Failing()
    known, unknown = (Planner(ToyGenerator(), served, secret=Secret()) for _ in range(2))
    asked = c.GenerationRequest(c.Prompt.from_user("hi"), allow_degraded=True)
    arguments = (asked, "", Share(), (), math.inf)
    await known.plan(*arguments)
    served.fails = True
    assert not (await known.plan(*arguments)).has_no_rewards
    assert (await unknown.plan(*arguments)).has_no_rewards


MIXED = (
    c.WeightedReward("toy", 3.0, c.Normalization("fixed", 0.25, 0.125)),
    c.WeightedReward("likelihood", -0.5, c.Normalization("batch")),
    c.WeightedReward("other", 1.0, veto_below=0.0),
)


@pytest.mark.parametrize(
    ("default", "described_names"),
    [
        ((), ["toy", "other", "likelihood"]),
        (MIXED, ["toy", "other", "likelihood"]),
        ((c.WeightedReward("other"),), ["other", "toy", "likelihood"]),
        ((c.WeightedReward("likelihood"),), ["likelihood", "toy", "other"]),
    ],
)
async def test_the_default_rewards_are_used_and_described_first(
    default: tuple[c.WeightedReward, ...], described_names: list[str]
) -> None:
    async with world(defaults=Defaults(rewards=default)) as service:
        without_names = await service.answer(small_request(selection=ALL))
        given = [wire.to_message(reward, pb.WeightedReward) for reward in default]
        selection = {"rewards": given} if default else rewards(("toy", 1))
        named = await service.answer(small_request(selection=ALL | selection))
        described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert generation(without_names) == generation(named)
    assert list(described.rewards) == described_names


async def test_raw_scores_are_in_the_callers_order(cached_service: World) -> None:
    """Guards against a cached answer with the values in the order of another request."""
    weights = [("toy", 1.0), ("likelihood", 1.0)]
    generated = await cached_service.answer(small_request(selection=rewards(*weights)))
    reversed_ = await cached_service.answer(small_request(selection=rewards(*weights[::-1])))
    assert reversed_.cached and not generated.cached
    for reply, index in ((generated, 1), (reversed_, 0)):
        assert reply.candidates[0].rewards[index] == reply.candidates[0].mean_logprob
        assert reply.candidates[0].rewards[index - 1] > 0
