"""The public port: requests, answers, rewards and descriptions.

Every test that uses `world()` waits at its end until nothing runs, waits or owns a slot.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from generator_service import toy
from generator_service.toy import ToyGenerator
from orchestrator.background import converted
from orchestrator.cache import Secret
from orchestrator.edge.planning import Defaults, Plan, Planner
from specrej import contracts as c
from specrej.contracts import wire
from specrej.contracts.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from specrej.security import Caller, set_caller
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator import caching
from tests.serving import failure_of, reason_of, turns, until, violations_of
from tests.world import (
    ALL,
    BOUND_S,
    Code,
    HeldGenerator,
    World,
    generation,
    rewards,
    small_request,
    world,
)


async def test_a_stream_has_all_events_and_ends_with_the_unary_answer(service: World) -> None:
    message = small_request(
        cache_control=pb.CACHE_CONTROL_BYPASS, selection={"return_candidates": 5}
    )
    reply = await service.answer(message)
    received = await service.events(message)
    kinds = [event.WhichOneof("event") for event in received]
    num_rounds = len(reply.rounds)
    assert num_rounds >= 2, "the case did not occur"
    assert kinds == ["admitted", *["round_completed"] * num_rounds, "finished"]
    admitted, finished = received[0].admitted, received[-1].finished
    assert generation(finished) == generation(reply)
    assert (admitted.n, admitted.prompt_tokens) == (reply.n, reply.usage.prompt_tokens) == (12, 4)
    assert admitted.request_id == finished.request_id != reply.request_id
    assert re.fullmatch("[0-9a-f]{32}", reply.request_id)
    rounds = [event.round_completed for event in received[1:-1]]
    assert [event.round for event in rounds] == list(finished.rounds)
    for event in rounds:
        assert len(event.survivors) == event.round.num_live
        assert event.best_text
    for before, after in pairwise(rounds):
        assert set(after.survivors) < set(before.survivors)


async def test_streamed_text_is_in_no_round(service: World) -> None:
    """Guards against a whole text with each round, besides its parts."""
    message = small_request(cache_control=pb.CACHE_CONTROL_BYPASS, selection={"n": 1})
    reply = await service.answer(message)
    request = pb.GenerateStreamRequest(request=message, text_deltas=True)
    events = [event async for event in service.stub.GenerateStream(request, timeout=BOUND_S)]
    assert "".join(event.text_delta.text for event in events) == reply.text
    assert not any(event.round_completed.best_text for event in events[:-1])
    assert events[-1].finished.text == reply.text


async def test_describe_returns_the_current_load_and_limits(cached_service: World) -> None:
    service = cached_service
    running = await service.held(small_request())
    described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert list(described.rewards) == ["toy", "other", "likelihood"]
    assert described.cache_available
    assert (described.running, described.queued) == (1, 0)
    assert (described.generator.model, described.generator.max_candidates) == ("toy", 1024)
    assert described.generator.sessions == 1
    assert described.generator.slots.owned == service.generator.toy.ledger.owned > 0
    assert described.default_schedule.first == described.default_n == 16
    assert described.default_max_tokens == 2048
    service.generator.gates["extend"].open()
    await running


async def test_a_run_knows_its_deadline(service: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against cuts that no deadline shapes."""
    generate, left_s = service.orchestrator.generate, list[float]()

    async def noted(*arguments: Any, **options: Any) -> None:
        left_s.append(options["time_left_s"])
        await generate(*arguments, **options)

    monkeypatch.setattr(service.orchestrator, "generate", noted)
    for stream in (False, True):
        await service.answer(small_request(), stream=stream)
    assert all(0 < time_s <= BOUND_S + 1 for time_s in left_s) and len(left_s) == 2


# Besides answers: texts of candidates on request


async def texts_of(
    service: World, request: pb.GenerateStreamRequest
) -> list[list[tuple[int, int]]]:
    """Of each round, its candidates with the number of words of their texts."""
    call = service.stub.GenerateStream(request, timeout=BOUND_S)
    rounds = [event.round_completed async for event in call if event.HasField("round_completed")]
    return [[(t.candidate_id, len(t.text.split())) for t in ended.texts] for ended in rounds]


async def test_rounds_have_the_texts_of_their_candidates_on_request(service: World) -> None:
    """Guards against texts of survivors only, and texts that were not requested."""
    reply = await service.answer(small_request())
    request = pb.GenerateStreamRequest(request=small_request(seed=7), texts=True)
    request.request.cache_control = pb.CACHE_CONTROL_BYPASS
    traced = [[(t.candidate_id, t.num_tokens) for t in trace.candidates] for trace in reply.rounds]
    assert await texts_of(service, request) == traced
    request.texts = False
    assert await texts_of(service, request) == [[] for _ in traced]


async def test_the_texts_of_a_round_are_bounded(
    service: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a round whose texts are too long for a message; between services, more than
    grpc's default of 4 MiB may be."""
    monkeypatch.setattr(toy, "_WORDS", ["é" * 100_000] * 8)
    of_one_word = small_request(sampling={"max_tokens": 1}, selection={"n": 32})
    request = pb.GenerateStreamRequest(request=of_one_word, texts=True)
    (texts,) = await texts_of(service, request)
    assert len(texts) == 2


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
async def test_a_prompt_too_long_holds_no_permit(service: World, most: int, turns: str) -> None:
    """Guards against a second of tokenizing per request: it is refused by its bytes, or is read
    before it holds a permit where only the tokenizer knows."""
    service.generator.described["max_prompt_bytes"] = most
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
    ("options", "names"),
    [
        ({"model": "../../x"}, "toy"),
        ({"selection": rewards(("nope", 1))}, "toy, other, likelihood"),
        ({"selection": rewards(("toy", 1), ("../../x", 1))}, "toy, other, likelihood"),
    ],
)
async def test_an_unknown_model_or_reward_is_not_found(
    service: World, options: dict[str, Any], names: str
) -> None:
    """The message lists the available names."""
    error = await service.refusal(small_request(**options))
    assert (error.code(), reason_of(error)) == (Code.NOT_FOUND, "NOT_FOUND")
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
    [((), "selection.n"), ((c.WeightedReward("sees"),), "selection.rewards[0]")],
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
    selection = {**size, "rewards": rewards}
    with pytest.raises(InvalidRequest) as raised:
        await planned(c.Prompt(text="hello"), max_batch=4, selection=selection)
    assert [violation.field for violation in raised.value.violations] == [field]


async def filled(
    request: c.GenerationRequest | pb.GenerateRequest, defaults: Defaults | None = None, **toy: Any
) -> c.GenerationRequest:
    """A request with defaults, at a toy whose description is changed by `toy`."""
    if isinstance(request, pb.GenerateRequest):
        request = wire.request_from_message(request, [])
    generator = replace(await ToyGenerator().describe(), **toy)
    return (defaults or Defaults()).filled(request, generator)


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
    made = await filled(message)
    assert (made.selection.n, made.sampling.max_tokens) == expected
    keeps_n = "n" in selection or sampling.get("temperature") == 0
    assert (await filled(message, Defaults(n=0))).selection.n == (expected[0] if keeps_n else 0)


async def test_without_max_tokens_answers_have_the_rest_of_the_context(service: World) -> None:
    """Guards against answers cut off at a default, and a long prompt refused for the sake of it."""
    words = common_pb2.Prompt(text="word " * 4090)
    request = small_request(prompt=words, sampling={"ignore_eos": True, "logprobs": True})
    request.sampling.ClearField("max_tokens")
    reply = await service.answer(request)
    assert (reply.candidates[0].num_tokens, reply.rounds[-1].decision_token) == (6, 6)


async def test_one_of_several_models_is_named(cached_service: World) -> None:
    """Guards against another model's answer, from a generator and from the cache."""
    generator = cached_service.generator
    generator.described["adapters"] = ("other", "toy")  # as of two generators
    for model in ("toy", "", "toy"):
        await cached_service.answer(small_request(model=model))
    assert [spec.adapter for spec in generator.specs] == ["toy", ""]


async def test_branching_needs_a_generator_that_forks(cached_service: World) -> None:
    """Guards against INTERNAL from a generator of an older version, which ignores forks."""
    branching = {"n": 6, "branching": pb.Branching(width=4, keep=1)}
    generation = await cached_service.answer(small_request(selection=branching))
    assert sum(len(trace.forks) for trace in generation.rounds) > 0
    cached_service.generator.described["can_fork"] = False
    error = await cached_service.refusal(small_request(selection=branching | {"n": 5}))
    assert [*violations_of(error)] == ["selection.branching"]


async def test_whole_answers_are_best_of_n(cached_service: World) -> None:
    """Guards against a trace of rejections that a generator without early rejection cannot make,
    and an answer that is stored under a plan that was not carried out."""
    cached_service.generator.described["form"] = c.CandidateForm.WHOLE_ANSWERS
    generation = await cached_service.answer(small_request(selection={"n": 6}))
    assert [trace.num_rejected for trace in generation.rounds] == [0]
    best_of_n = {"n": 6, "algorithm": pb.ALGORITHM_BEST_OF_N}
    assert (await cached_service.answer(small_request(selection=best_of_n))).cached
    described = await cached_service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert described.generator.form == common_pb2.CANDIDATE_FORM_WHOLE_ANSWERS


async def test_answers_that_ignore_seeds_are_not_cached(cached_service: World) -> None:
    """Unless they are greedy: guards against one draw that is returned for ever."""
    cached_service.generator.described["ignores_seeds"] = True
    for n, temperature, is_cached in ((4, 1.0, False), (1, 0.0, True)):
        made = small_request(selection={"n": n}, sampling={"temperature": temperature})
        await cached_service.answer(made)
        assert (await cached_service.answer(made)).cached == is_cached


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("kind", ["text", "structured", "tools"])
async def test_complete_answers_win_where_only_they_conform(given: bool | None, kind: str) -> None:
    """Guards against the beginning of a JSON object that wins by its reward."""
    output, call = (
        common_pb2.StructuredOutput(json_object=common_pb2.JsonObject()),
        common_pb2.Tool(name="ping"),
    )
    message = pb.GenerateRequest(
        prompt=common_pb2.Prompt(tools=[call] if kind == "tools" else ()),
        sampling=common_pb2.Sampling(structured_output=output if kind == "structured" else None),
        selection=pb.Selection(prefer_complete=given),
    )
    expected = kind != "text" if given is None else given
    assert (await filled(message)).selection.prefer_complete is expected


CALL = c.Tool("ping")
PNG = c.Image(b"png")


async def planned(
    prompt: c.Prompt,
    *,
    takes_images: bool = True,
    tool_format: str = "hermes",
    max_batch: int = 1024,
    **parts: Any,
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
            reads = c.RewardDescription("reads", "f", "", max_batch=max_batch)
            return [replace(reads, name="sees", takes_images=True), reads]

    selection: dict[str, Any] = {"rewards": (c.WeightedReward("sees"), c.WeightedReward("reads"))}
    selection |= parts.pop("selection", {})
    request = c.GenerationRequest(prompt, selection=c.Selection(**selection), **parts)
    planner = Planner(Described(), TwoRewards(), secret=Secret())
    plan = await planner.plan(request, "", 1.0, (), 5.0)
    assert 0 < plan.left_s < 5, "the time in the queue is no part of the run's"
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


@pytest.mark.parametrize(
    ("is_flat", "set_by_operator", "first"),
    [(False, None, 16), (True, None, 64), (True, c.Schedule(), 16)],
)
async def test_the_default_schedule_is_the_generators(
    is_flat: bool, set_by_operator: c.Schedule | None, first: int
) -> None:
    """Guards against early cuts where they save no time, and a setting that is overruled."""
    for absent, schedule in ((("schedule",), c.Schedule(first=first)), ((), c.Schedule())):
        request = c.GenerationRequest(c.Prompt.from_user("?"), absent=absent)
        made = await filled(request, Defaults(set_by_operator), flat_steps=is_flat)
        assert made.selection.schedule == schedule


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
async def test_a_reward_without_description_is_replaced_if_allowed(kind: type[Exception]) -> None:
    """Guards against INTERNAL where a foreign program answers on the reward service's port."""
    described = AsyncMock(return_value=[c.RewardDescription("toy", "f", "a toy")])
    served: Any = SimpleNamespace(describe=described, open=print)
    known, unknown = (Planner(ToyGenerator(), served, secret=Secret()) for _ in range(2))
    asked = c.GenerationRequest(c.Prompt.from_user("hi"), allow_degraded=True)
    arguments = (asked, "", 1.0, (), math.inf)
    await known.plan(*arguments)
    described.side_effect = kind("failed")
    assert not (await known.plan(*arguments)).has_no_rewards
    assert (await unknown.plan(*arguments)).has_no_rewards


MIXED = (
    c.WeightedReward("toy", 3.0),
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


async def test_no_tenant_takes_all_threads() -> None:
    """Guards against a tenant whose large answers delay those of all others."""
    gate, began = threading.Event(), list[str]()

    def work(tenant: str) -> str:
        began.append(tenant)
        assert tenant != "greedy" or gate.wait(BOUND_S)
        return tenant

    async def call(tenant: str) -> str:
        set_caller(Caller(tenant))
        return await converted(lambda _: work(tenant), b"x" * 8192)

    greedy = [asyncio.create_task(call("greedy")) for _ in range(20)]
    await until(lambda: bool(began))
    assert await asyncio.create_task(call("other")) == "other"
    greedy[0].cancel()
    await turns()
    assert began == ["greedy", "other"], "a cancelled call holds its thread"
    gate.set()
    done = await asyncio.gather(*greedy, return_exceptions=True)
    assert done[1:] == ["greedy"] * 19


_TRACED = c.CandidateTrace(1, 0.5, c.Fate.KEPT)
_SMALL, _LARGE = (
    replace(
        caching.generation(),
        rounds=(replace(caching.generation().rounds[0], candidates=(_TRACED,) * count),),
    )
    for count in (10, 5000)
)
_TOKENS = replace(_SMALL, candidates=(replace(_SMALL.best, token_ids=(7,) * 5000),))
_TEXT = replace(_SMALL, candidates=(replace(_SMALL.best, text="x" * 100_000),))


@pytest.mark.parametrize(
    ("value", "in_thread"),
    [
        (c.Finished(_SMALL), False),
        (c.Finished(_LARGE), True),
        (_LARGE, True),
        (c.Finished(_TOKENS), True),
        (c.Finished(_TEXT), True),
        (c.RoundCompleted(_SMALL.rounds[0], (), "", (c.CandidateText(1, "x" * 100_000),)), True),
        (c.RoundCompleted(_LARGE.rounds[0], (), ""), True),
        (b"x" * 4096, False),
        (b"x" * 8192, True),
    ],
)
async def test_large_values_are_converted_in_threads(value: object, in_thread: bool) -> None:
    """Guards against a reply whose conversion delays health checks and all other calls."""
    thread = await converted(lambda _: threading.get_ident(), value)
    assert (thread != threading.get_ident()) == in_thread
