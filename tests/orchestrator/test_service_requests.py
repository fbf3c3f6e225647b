"""The public port: invalid requests and messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from orchestrator.cache import Secret
from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.planning import Planner
from orchestrator.edge.service import Orchestrator
from specrej.contracts import (
    Branching,
    GenerationRequest,
    Prompt,
    RewardDescription,
    Selection,
    WeightedReward,
)
from specrej.contracts.errors import InvalidRequest
from specrej.security import Share
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.caching import new_cache
from tests.serving import reason_of, violations_of
from tests.world import Code, HeldGenerator, World, rewards, small_request, world


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_all_violations_are_reported_at_once(service: World, stream: bool) -> None:
    """Guards both methods against a port that skips the checks of `contracts.validation`."""
    message = small_request(
        sampling={"max_tokens": 0}, selection={"alpha": 1, "algorithm": 7}, cache_control=9
    )
    error = await service.refusal(message, stream=stream)
    assert error.code() is Code.INVALID_ARGUMENT
    assert reason_of(error) == "INVALID_REQUEST"
    assert set(violations_of(error)) == {
        "sampling.max_tokens",
        "selection.alpha",
        "selection.algorithm",
        "cache_control",
    }
    assert service.generator.num_opened == 0


async def test_log_probabilities_of_one_request_are_bounded(service: World) -> None:
    """Guards against gigabytes of them; N is at most 8 where it is left open."""
    sampling = {"max_tokens": 4000, "logprobs": True, "top_logprobs": 20}
    error = await service.refusal(small_request(sampling=sampling, selection={"n": 64}))
    assert set(violations_of(error)) == {"sampling.top_logprobs"}
    best = (await service.answer(small_request(sampling=sampling, selection={"n": 0}))).candidates
    assert {len(top.tokens) for top in best[0].top_logprobs} == {8}  # the toy's vocabulary


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (small_request(model="../../x"), "toy"),
        (small_request(selection=rewards(("nope", 1))), "toy, other, likelihood"),
        (small_request(selection=rewards(("toy", 1), ("../../x", 1))), "toy, other, likelihood"),
    ],
)
async def test_an_unknown_model_or_reward_is_not_found(
    service: World, message: pb.GenerateRequest, names: str
) -> None:
    """The message lists the available names."""
    error = await service.refusal(message)
    assert error.code() is Code.NOT_FOUND
    assert reason_of(error) == "NOT_FOUND"
    assert str(error.details()).endswith(names)
    assert service.generator.num_opened == 0


async def test_a_refusal_of_the_generator_has_the_public_field_path() -> None:
    async with world(HeldGenerator(200)) as service:
        error = await service.refusal(small_request(selection={"n": 500}))
        assert error.code() is Code.INVALID_ARGUMENT
        assert list(violations_of(error)) == ["selection.n"]
        assert reason_of(error) == "SLOTS_EXCEEDED"


@pytest.mark.parametrize(
    ("rewards", "field"),
    [((), "selection.n"), ((WeightedReward("small"),), "selection.rewards[0]")],
    ids=["default", "named"],
)
@pytest.mark.parametrize(
    "size", [{"n": 5}, {"n": 0}, {"n": 2, "branching": Branching(width=5, keep=1)}]
)
async def test_n_above_the_batch_limit_of_a_reward_is_refused_before_the_run(
    size: dict[str, Any], rewards: tuple[WeightedReward, ...], field: str
) -> None:
    """With n = 0 the toy has eight. Guards against a failure after the first round, with a path of
    the internal port."""

    class SmallRewards:
        def open(self, name: str, prompt: Prompt) -> Any:
            raise AssertionError("must not be called")

        async def describe(self) -> list[RewardDescription]:
            return [RewardDescription("small", "f", "accepts few", max_batch=4)]

    orchestrator = Orchestrator(
        ToyGenerator(), SmallRewards(), new_cache(""), Admission(Limits(1, 0))
    )
    request = GenerationRequest(Prompt(text="hello"), selection=Selection(**size, rewards=rewards))
    with pytest.raises(InvalidRequest) as raised:
        await orchestrator.generate(request, print, tenant="", share=Share())
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_the_time_to_the_deadline_passes() -> None:
    """Guards against a run that takes the time in the queue for its own."""
    rewards: Any = SimpleNamespace(describe=print)
    planner = Planner(ToyGenerator(), rewards, secret=Secret())
    selection = Selection(rewards=(WeightedReward("likelihood"),))
    request = GenerationRequest(Prompt(text="hello"), selection=selection)
    plan = await planner.plan(request, "", Share(), (), 5.0)
    assert 0 < plan.left_s < 5


async def test_an_adapter_is_named_as_the_model(cached_service: World) -> None:
    """Guards against an adapter's answer for the model, in the generator and from the cache."""
    generator = cached_service.generator
    generator.adapters = ("support",)
    for model in ("support", "toy", "", "support"):
        await cached_service.answer(small_request(model=model))
    assert generator.opened_adapters == ["support", ""]


async def test_branching_needs_a_generator_that_forks(cached_service: World) -> None:
    """Guards against INTERNAL from a generator of an older version, which ignores forks."""
    branching = {"n": 6, "branching": pb.Branching(width=4, keep=1)}
    generation = await cached_service.answer(small_request(selection=branching))
    assert sum(len(trace.forks) for trace in generation.rounds) > 0
    cached_service.generator.can_fork = False
    error = await cached_service.refusal(small_request(selection=branching | {"n": 5}))
    assert [*violations_of(error)] == ["selection.branching"]


async def test_whole_answers_are_best_of_n(cached_service: World) -> None:
    """Guards against a trace of rejections that a generator without early rejection cannot make,
    and an answer that is stored under a plan that was not carried out."""
    cached_service.generator.whole_answers = True
    generation = await cached_service.answer(small_request(selection={"n": 6}))
    assert [trace.num_rejected for trace in generation.rounds] == [0]
    record = await cached_service.stub.GetRecord(
        pb.GetRecordRequest(request_id=generation.request_id)
    )
    assert record.record.selection.algorithm == pb.ALGORITHM_BEST_OF_N
    best_of_n = {"n": 6, "algorithm": pb.ALGORITHM_BEST_OF_N}
    assert (await cached_service.answer(small_request(selection=best_of_n))).cached
    described = await cached_service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert described.generator.whole_answers
