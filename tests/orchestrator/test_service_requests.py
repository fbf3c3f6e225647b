"""The public port: invalid requests and messages."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from orchestrator.cache import Secret
from orchestrator.edge.admission import Admission, Limits
from orchestrator.edge.planning import Defaults, Plan, Planner
from orchestrator.edge.service import Orchestrator
from specrej import contracts as c
from specrej.contracts import wire
from specrej.contracts.errors import InvalidRequest
from specrej.security import Share
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.caching import new_cache
from tests.serving import failure_of, reason_of, until, violations_of
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


async def test_an_output_is_compiled_before_its_request_holds_a_permit() -> None:
    """Guards other tenants' permits against outputs whose compilation takes seconds."""
    output: Any = {"structured_output": {"json_object": {}}}
    async with world(max_running=1) as service:
        service.shut("check")
        message = small_request(sampling=output)
        compiling = [asyncio.create_task(service.refusal(message)) for _ in range(2)]
        await until(lambda: service.num_held("check") == 1)  # equal requests are one
        assert (await service.answer(small_request(), tenant="other")).text
        assert service.admission.running == 0
        opened = service.generator.num_opened
        service.generator.gates["check"].open()
        for refusal in compiling:
            assert "sampling.structured_output" in violations_of(await refusal)
        assert service.generator.num_opened == opened


@pytest.mark.parametrize(("most", "turns"), [(99, ""), (0, "user"), (0, "system")])
async def test_a_prompt_that_cannot_fit_holds_no_permit(
    service: World, most: int, turns: str
) -> None:
    """Guards against a second of tokenizing per request: it is refused by its bytes, or is read
    before it holds a permit where only the tokenizer knows."""
    service.generator.max_prompt_bytes = most
    long = "é" * 50 if most else "é" * 9000
    prompt: Any = {"text": long}
    if turns:
        service.shut("check")
        roles = ["user"] if turns == "user" else ["system", "user"]
        prompt = {"messages": [{"role": role, "content": long} for role in roles]}
    running = asyncio.create_task(service.answer(pb.GenerateRequest(prompt=prompt)))
    if turns:
        await until(lambda: service.num_held("check") == 1)
        assert service.admission.running == service.generator.num_opened == 0
        service.generator.gates["check"].open()
        assert (await running).text
    else:
        error = await failure_of(running)
        assert reason_of(error) == "CONTEXT_EXCEEDED"
        assert "has 100 bytes" in violations_of(error)["prompt"]
        assert service.generator.num_opened == 0


async def test_log_probabilities_of_one_request_are_bounded(service: World) -> None:
    """Guards against gigabytes of them; N is at most 8 where it is left open."""
    sampling: dict[str, Any] = {"max_tokens": 4000, "logprobs": True}
    error = await service.refusal(small_request(sampling=sampling, selection={"n": 1024}))
    number = "1,024 candidates of 4,000 tokens have 4,096,000 log-probabilities"
    assert number in violations_of(error)["sampling.logprobs"]
    sampling["top_logprobs"] = 20
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
    [((), "selection.n"), ((c.WeightedReward("small"),), "selection.rewards[0]")],
    ids=["default", "named"],
)
@pytest.mark.parametrize(
    "size", [{"n": 5}, {"n": 0}, {"n": 2, "branching": c.Branching(width=5, keep=1)}]
)
async def test_n_above_the_batch_limit_of_a_reward_is_refused_before_the_run(
    size: dict[str, Any], rewards: tuple[c.WeightedReward, ...], field: str
) -> None:
    """With n = 0 the toy has eight. Guards against a failure after the first round, with a path of
    the internal port."""

    class SmallRewards:
        def open(self, name: str, prompt: c.Prompt, data: str = "") -> Any:
            raise AssertionError("must not be called")

        async def describe(self) -> list[c.RewardDescription]:
            return [c.RewardDescription("small", "f", "accepts few", max_batch=4)]

    orchestrator = Orchestrator(
        ToyGenerator(), SmallRewards(), new_cache(""), Admission(Limits(1, 0))
    )
    request = c.GenerationRequest(
        c.Prompt(text="hello"), selection=c.Selection(**size, rewards=rewards)
    )
    with pytest.raises(InvalidRequest) as raised:
        await orchestrator.generate(request, print, tenant="", share=Share())
    assert [violation.field for violation in raised.value.violations] == [field]


@pytest.mark.parametrize(
    ("selection", "sampling", "expected"),
    [
        ({}, {}, (16, 2048)),
        ({}, {"temperature": 0.0}, (1, 2048)),
        ({"return_candidates": 20}, {"min_tokens": 3000}, (20, 3000)),
        ({"min_answers": 17}, {}, (17, 2048)),
        ({"branching": pb.Branching(width=24)}, {}, (24, 2048)),
        ({"branching": pb.Branching(width=2000)}, {"min_tokens": 9000}, (1024, 4096)),
        ({"n": 0}, {"max_tokens": 5000}, (0, 5000)),
        ({"n": 3, "return_candidates": 20}, {"max_tokens": 7}, (3, 7)),
    ],
)
async def test_what_a_request_leaves_open_is_filled_in(
    selection: dict[str, Any], sampling: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Guards against as many candidates as memory holds for whoever names no n, a default that
    makes greedy requests or those of 20 choices invalid, and an explicit number that is changed."""
    message = pb.GenerateRequest(
        selection=pb.Selection(**selection), sampling=common_pb2.Sampling(**sampling)
    )
    request, generator = wire.request_from_message(message, []), await ToyGenerator().describe()
    filled = Defaults().filled(request, generator)
    assert (filled.selection.n, filled.sampling.max_tokens) == expected
    assert Defaults(n=0).filled(request, generator).selection.n == (
        expected[0] if "n" in selection or sampling.get("temperature") == 0 else 0
    )


async def test_without_max_tokens_answers_have_the_rest_of_the_context(service: World) -> None:
    """Guards against answers cut off at a default, and a long prompt refused for the sake of it."""
    words = common_pb2.Prompt(text="word " * 4090)
    request = small_request(prompt=words, sampling={"ignore_eos": True, "logprobs": True})
    request.sampling.ClearField("max_tokens")
    reply = await service.answer(request)
    assert (reply.candidates[0].num_tokens, reply.rounds[-1].decision_token) == (6, 6)


async def test_the_time_to_the_deadline_passes() -> None:
    """Guards against a run that takes the time in the queue for its own."""
    rewards: Any = SimpleNamespace(describe=print)
    planner = Planner(ToyGenerator(), rewards, secret=Secret())
    selection = c.Selection(rewards=(c.WeightedReward("likelihood"),))
    request = c.GenerationRequest(c.Prompt(text="hello"), selection=selection)
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
    cached_service.generator.form = c.CandidateForm.WHOLE_ANSWERS
    generation = await cached_service.answer(small_request(selection={"n": 6}))
    assert [trace.num_rejected for trace in generation.rounds] == [0]
    record = await cached_service.stub.GetRecord(
        pb.GetRecordRequest(request_id=generation.request_id)
    )
    assert record.record.selection.algorithm == pb.ALGORITHM_BEST_OF_N
    best_of_n = {"n": 6, "algorithm": pb.ALGORITHM_BEST_OF_N}
    assert (await cached_service.answer(small_request(selection=best_of_n))).cached
    described = await cached_service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert described.generator.form == common_pb2.CANDIDATE_FORM_WHOLE_ANSWERS


async def test_answers_of_a_generator_that_ignores_seeds_are_not_cached(
    cached_service: World,
) -> None:
    """Unless they are greedy: guards against one draw that is returned for ever."""
    cached_service.generator.ignores_seeds = True
    for n, temperature, is_cached in ((4, 1.0, False), (1, 0.0, True)):
        made = small_request(selection={"n": n}, sampling={"temperature": temperature})
        await cached_service.answer(made)
        assert (await cached_service.answer(made)).cached == is_cached


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("structured", [False, True])
async def test_complete_answers_are_preferred_where_only_they_conform(
    given: bool | None, structured: bool
) -> None:
    """Guards against the beginning of a JSON object that wins by its reward."""
    sampling = common_pb2.Sampling(
        structured_output=common_pb2.StructuredOutput(json_object=common_pb2.JsonObject())
        if structured
        else None
    )
    selection = pb.Selection(prefer_complete=given)
    message = pb.GenerateRequest(selection=selection, sampling=sampling)
    request, generator = wire.request_from_message(message, []), await ToyGenerator().describe()
    expected = structured if given is None else given
    assert Defaults().filled(request, generator).selection.prefer_complete is expected


CALL = c.Tool("ping")
PNG = c.Image(b"png")


async def planned(
    prompt: c.Prompt, *, takes_images: bool = True, tool_format: str = "hermes", **parts: Any
) -> tuple[Plan, list[c.Prompt]]:
    """A plan with the rewards "sees" and "reads", and the prompts that they get."""
    opened: list[c.Prompt] = []

    class Described(ToyGenerator):
        async def describe(self) -> c.GeneratorDescription:
            described = await super().describe()
            return replace(described, tool_format=tool_format, takes_images=takes_images)

    class TwoRewards:
        def open(self, name: str, prompt: c.Prompt, data: str = "") -> Any:
            opened.append(prompt)
            return nullcontext()

        async def describe(self) -> list[c.RewardDescription]:
            sees = c.RewardDescription("sees", "f", "", takes_images=True)
            return [sees, c.RewardDescription("reads", "f", "")]

    selection: dict[str, Any] = {"rewards": (c.WeightedReward("sees"), c.WeightedReward("reads"))}
    selection |= parts.pop("selection", {})
    request = c.GenerationRequest(prompt, selection=c.Selection(**selection), **parts)
    planner = Planner(Described(), TwoRewards(), secret=Secret())
    plan = await planner.plan(request, "", Share(), (), 5.0)
    for scorer in plan.scorers:
        async with scorer(plan.request.prompt):
            pass
    return plan, opened


async def test_what_tools_images_and_reasoning_exclude_is_refused() -> None:
    """Guards against tools that no model sees, and calls that a stop text cuts."""
    shown = c.Message("user", parts=(c.TextPart("a"), PNG, c.TextPart("b")))
    prompt = c.Prompt(messages=(shown, c.Message("assistant", "x"), shown), tools=(CALL,))
    sampling = c.Sampling(stop=("x",), stop_token_ids=(1,), ignore_eos=True)
    options: dict[str, Any] = {"takes_images": False, "tool_format": ""}
    with pytest.raises(InvalidRequest) as refused:
        await planned(prompt, sampling=sampling, **options)
    assert {violation.field for violation in refused.value.violations} == {
        "prompt.tools",
        *(f"sampling.{name}" for name in ("stop", "stop_token_ids", "ignore_eos")),
        *(f"prompt.messages[{number}].parts" for number in (0, 2)),
    }
    output = c.Sampling(structured_output=c.JsonSchema("{}"))
    with pytest.raises(InvalidRequest, match=r"sampling.structured_output: must be absent with to"):
        await planned(prompt, sampling=output)
    plan, _ = await planned(prompt)
    assert plan.must_check  # its grammar is compiled, and its images are decoded


async def test_rewards_that_read_texts_get_no_images() -> None:
    """Guards against refusals of prompts, and megabytes of which a reward has no use."""
    turns = (
        c.Message("user", parts=(c.TextPart("a"), PNG, c.TextPart("b"))),
        c.Message("assistant", "x"),
    )
    prompt = c.Prompt(messages=(*turns, c.Message("user", parts=(PNG,))))
    _, (reads, sees) = await planned(prompt)
    assert sees == prompt
    texts = c.Message("user", "ab"), turns[1], c.Message("user", "(image)")
    assert reads == c.Prompt(messages=texts)
    tools = replace(c.Prompt.from_user("a"), tools=(CALL,))
    request = c.GenerationRequest(tools, absent=("prefer_complete",))
    described = await ToyGenerator().describe()
    assert Defaults().filled(request, described).selection.prefer_complete


@pytest.mark.parametrize(
    ("growth", "set_by_operator", "first"),
    [(0.0, None, 16), (1.02, None, 64), (1.5, None, 16), (4.4, None, 16), (1.02, c.Schedule(), 16)],
)
async def test_the_default_schedule_is_the_generators(
    growth: float, set_by_operator: c.Schedule | None, first: int
) -> None:
    """Guards against early cuts where they save no time, and a setting that is overruled."""
    generator = replace(await ToyGenerator().describe(), step_growth=growth)
    defaults = Defaults(set_by_operator)
    assert defaults.schedule_for(generator) == c.Schedule(first=first)
    request = c.GenerationRequest(c.Prompt.from_user("?"), absent=("schedule",))
    assert defaults.filled(request, generator).selection.schedule.first == first
    named = replace(request, absent=())
    assert defaults.filled(named, generator).selection.schedule == c.Schedule()
