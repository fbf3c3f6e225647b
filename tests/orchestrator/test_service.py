"""The public port, with toys behind real generator and reward ports and a real Valkey.

Every test that uses `whole()` ends with the invariant: nothing runs, waits, flies or owns a slot.
"""

from __future__ import annotations

import asyncio
import math
import re
import statistics
from collections.abc import AsyncIterator, Awaitable
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.admission import Admission, Limits
from orchestrator.cache import Cache, Hit
from orchestrator.composition import Composite
from orchestrator.service import Orchestrator
from reward_service.toy import ToyReward
from specrej import wire
from specrej.contracts import (
    FinishReason,
    Generation,
    GenerationRequest,
    Normalization,
    Prompt,
    RewardDescription,
    Schedule,
    Scorer,
    Selection,
    WeightedReward,
)
from specrej.errors import InvalidRequest
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import (
    BOUND_S,
    HeldGenerator,
    LongWinded,
    Whole,
    dead_port,
    retry_info_s,
    timeless_answer,
    trailer,
    whole,
)
from tests.orchestrator.tcp import hang, scripted
from tests.serving import failure_of, reason_of, until, violations_of

Code = grpc.StatusCode
SERVICE = "specrej.v1.OrchestratorService"
INT32_MAX = 2**31 - 1
NAN, INF = math.nan, math.inf
PROMPT = common_pb2.Prompt(text="four words of prompt")


def ask(
    *,
    prompt: common_pb2.Prompt = PROMPT,
    sampling: dict[str, Any] | None = None,
    selection: dict[str, Any] | None = None,
    **changes: Any,
) -> pb.GenerateRequest:
    """A small request with some fields changed."""
    return pb.GenerateRequest(
        prompt=prompt,
        sampling=common_pb2.Sampling(**{"max_tokens": 40, "seed": 7} | (sampling or {})),
        selection=pb.Selection(**{"n": 12} | (selection or {})),
        **changes,
    )


def seeded(seed: int) -> pb.GenerateRequest:
    return ask(sampling={"seed": seed})


async def answer(
    service: Whole, message: pb.GenerateRequest, *, stream: bool = False, tenant: str = ""
) -> pb.GenerateResponse:
    """The answer to a request, by either method."""
    if stream:
        return (await events(service, message))[-1].finished
    metadata = (("specrej-tenant", tenant),) if tenant else ()
    reply: pb.GenerateResponse = await service.stub.Generate(
        message, metadata=metadata, timeout=BOUND_S
    )
    return reply


async def events(service: Whole, message: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
    call = service.stub.GenerateStream(pb.GenerateStreamRequest(request=message), timeout=BOUND_S)
    return [event async for event in call]


async def refusal(
    service: Whole, message: pb.GenerateRequest, *, stream: bool = False
) -> grpc.aio.AioRpcError:
    return await failure_of(answer(service, message, stream=stream))


def generation(reply: pb.GenerateResponse) -> Generation:
    """An answer without durations and its id."""
    return timeless_answer(wire.generation_from_wire(reply))


@pytest.fixture
async def service() -> AsyncIterator[Whole]:
    async with whole() as everything:
        yield everything


@pytest.fixture
async def cached_service(redis_url: str) -> AsyncIterator[Whole]:
    """With a generator of this test's own fingerprint, so that tests share no entries."""
    generator = HeldGenerator(end_every=next(_ENDS))
    async with whole(generator, redis_url=redis_url) as everything:
        yield everything


_ENDS = iter(range(30, 10**6))


# Answers


async def test_the_stream_tells_the_same_as_the_unary_call(service: Whole) -> None:
    """Guards against two methods that drift apart: order of events, and every field of them."""
    message = ask(cache_control=pb.CACHE_CONTROL_BYPASS, selection={"return_candidates": 5})
    reply = await answer(service, message)
    told = await events(service, message)
    kinds = [event.WhichOneof("event") for event in told]
    num_rounds = len(reply.rounds)
    assert num_rounds >= 2, "the case did not occur"
    assert kinds == ["admitted", *["round_completed"] * num_rounds, "finished"]
    admitted, finished = told[0].admitted, told[-1].finished
    assert generation(finished) == generation(reply)
    assert (admitted.n, admitted.prompt_tokens) == (reply.n, reply.usage.prompt_tokens) == (12, 4)
    assert admitted.request_id == finished.request_id != reply.request_id
    rounds = [event.round_completed for event in told[1:-1]]
    assert [completed.round for completed in rounds] == list(finished.rounds)
    for completed in rounds:
        assert len(completed.survivors) == completed.round.num_live
        assert completed.best_text
    for before, after in pairwise(rounds):
        assert set(after.survivors) < set(before.survivors)


async def test_the_answer_is_consistent(service: Whole) -> None:
    """Guards against an answer that is not its first candidate, and accounts that are wrong."""
    reply = await answer(service, ask(selection={"return_candidates": 5}))
    best = reply.candidates[0]
    assert (reply.text, reply.score, reply.finish_reason) == (
        best.text,
        best.score,
        best.finish_reason,
    )
    scores = [ranked.score for ranked in reply.candidates]
    assert scores == sorted(scores, reverse=True)
    assert reply.usage.answer_tokens == best.num_tokens == len(reply.text.split())
    assert reply.usage.generated_tokens == sum(done.generated_tokens for done in reply.rounds)
    assert reply.usage.reward_tokens > 0
    assert reply.fingerprints.generator == "toy-40"
    assert not reply.cached and not reply.degraded


async def test_every_request_has_its_own_id(service: Whole) -> None:
    """Guards against ids that callers could choose, or that repeat."""
    ids = {(await answer(service, seeded(seed))).request_id for seed in range(5)}
    assert len(ids) == 5
    assert all(re.fullmatch(r"[0-9a-f]{32}", request_id) for request_id in ids)


async def test_defaults_are_what_the_schema_says(service: Whole) -> None:
    """Guards against an absent field meaning 0: every default spelled out gives the same answer."""
    bare = await answer(service, pb.GenerateRequest(prompt=PROMPT))
    spelled = pb.GenerateRequest(
        model="toy",
        prompt=PROMPT,
        sampling=common_pb2.Sampling(max_tokens=128, temperature=1, top_k=0, top_p=1, seed=0),
        selection=pb.Selection(
            n=0,
            alpha=0.5,
            schedule=pb.Schedule(geometric=pb.GeometricSchedule(first=16, factor=2)),
            algorithm=pb.ALGORITHM_SPECULATIVE_REJECTION,
            rewards=[pb.WeightedReward(name="toy", weight=1)],
            return_candidates=1,
        ),
        cache_control=pb.CACHE_CONTROL_USE,
    )
    assert generation(bare) == generation(await answer(service, spelled))
    assert [done.decision_token for done in bare.rounds[:2]] == [16, 32]
    assert len(bare.candidates) == 1


async def test_the_servers_schedule_is_the_default() -> None:
    """Guards against a setting nobody reads."""
    async with whole(default_schedule=Schedule("tokens", tokens=(5, 9))) as service:
        reply = await answer(service, ask())
        assert [done.decision_token for done in reply.rounds[:2]] == [5, 9]
        described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
        assert list(described.default_schedule.tokens.decision_tokens) == [5, 9]


async def test_zero_candidates_means_as_many_as_fit(service: Whole) -> None:
    """Guards against 0 taken at its word: the generator chooses, and the answer says what."""
    told = await events(service, ask(selection={"n": 0}))
    assert told[0].admitted.n == told[-1].finished.n == 8


async def test_best_of_n_rejects_nobody(service: Whole) -> None:
    """Guards against alpha having a say in Best-of-N."""
    chosen = {"algorithm": pb.ALGORITHM_BEST_OF_N, "return_candidates": 64}
    reply = await answer(service, ask(selection=chosen))
    assert [done.num_rejected for done in reply.rounds] == [0]
    assert len(reply.candidates) == 12
    same = await answer(service, ask(selection=chosen | {"alpha": 0.9}))
    assert generation(same) == generation(reply)


async def test_weighted_rewards_add_up(service: Whole) -> None:
    """Guards against weights that are dropped, or that land on the wrong reward."""
    chosen = {"algorithm": pb.ALGORITHM_BEST_OF_N, "return_candidates": 64}
    parts = (("toy", 3.0), ("likelihood", 0.25), ("other", -1.0))
    rewards = [pb.WeightedReward(name=name, weight=weight) for name, weight in parts]
    mixed = await answer(service, ask(selection=chosen | {"rewards": rewards}))
    plain = await answer(service, ask(selection=chosen))
    vowels = {ranked.candidate_id: ranked.score for ranked in plain.candidates}
    for ranked in mixed.candidates:
        toy = vowels[ranked.candidate_id]
        assert list(ranked.rewards) == [toy, ranked.mean_logprob, toy]
        assert ranked.score == math.fsum((3.0 * toy, 0.25 * ranked.mean_logprob, -toy))
    assert mixed.fingerprints.reward != plain.fingerprints.reward


async def test_likelihood_needs_no_reward_service(service: Whole) -> None:
    """Guards against asking the reward service, or waiting for it, for what needs no reward."""
    await service.reward_server.kill()
    likelihood = [pb.WeightedReward(name="likelihood")]
    reply = await answer(service, ask(selection={"rewards": likelihood}))
    assert reply.score == reply.candidates[0].mean_logprob
    assert reply.usage.reward_tokens == 0
    assert (await refusal(service, ask())).code() is Code.UNAVAILABLE


# Degradation


async def test_without_its_reward_a_request_may_be_answered_by_likelihood(
    cached_service: Whole,
) -> None:
    """Guards the ladder: only for who allows it, flagged, and never for anybody from the cache."""
    service = cached_service
    whole_answer = await answer(service, ask(sampling={"seed": 1}))
    assert not whole_answer.degraded
    await service.reward_server.kill()
    assert (await refusal(service, ask())).code() is Code.UNAVAILABLE
    reply = await answer(service, ask(allow_degraded=True))
    assert reply.degraded
    assert list(reply.degradations) == [pb.DEGRADATION_REWARD]
    assert reply.score == reply.candidates[0].mean_logprob
    description = await service.orchestrator.describe()
    counts = (description.num_answers, description.num_degraded, description.num_hurried)
    assert counts == (2, 1, 0)
    await service.reward_server.start()
    assert not (await when_back(service, ask())).cached  # what stood in was not stored
    # What is allowed has nothing to do with what is answered.
    assert (await answer(service, ask(allow_degraded=True))).cached


async def test_a_reward_service_that_was_never_there_may_be_done_without() -> None:
    """Guards the start of a stack in any order, for who allows it."""
    async with whole() as service:
        await service.reward_server.kill()
        assert (await refusal(service, ask())).code() is Code.UNAVAILABLE
        reply = await answer(service, ask(allow_degraded=True))
        assert list(reply.degradations) == [pb.DEGRADATION_REWARD]
        named = ask(selection={"rewards": [pb.WeightedReward(name="toy")]}, allow_degraded=True)
        assert list((await answer(service, named)).degradations) == [pb.DEGRADATION_REWARD]


async def test_the_time_that_is_left_is_handed_down(service: Whole) -> None:
    """Guards backends against work for callers whose orchestrator hangs; they give up after it, so
    that the status is ours."""
    await service.stub.Generate(ask(), timeout=7)
    await service.stub.Generate(ask(sampling={"seed": 8}))
    with_deadline, without = service.generator.times_left_s
    assert with_deadline is not None
    assert 6.0 < with_deadline < 8.1  # grpc rounds what it hands down, up
    assert without is None or without > 1e6


async def test_a_generator_that_does_not_go_on_costs_no_more_than_the_deadline(
    service: Whole,
) -> None:
    """Guards the client's deadline, which ends a wait that nothing else would."""
    service.generator.gates["extend"].shut()
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await service.stub.Generate(ask(), timeout=0.5)
    assert late.value.code() is Code.DEADLINE_EXCEEDED
    service.generator.gates["extend"].open()


# Composition

BATCH = pb.Normalization(batch=pb.BatchNormalization())
ALL = {"algorithm": pb.ALGORITHM_BEST_OF_N, "return_candidates": 64}
MIXED = Composite(
    "mixed",
    (
        WeightedReward("toy", 3.0, Normalization("fixed", 0.25, 0.125)),
        WeightedReward("likelihood", -0.5, Normalization("batch")),
        WeightedReward("other", 1.0, veto_below=0.0),
    ),
)


def fixed(mean: float, deviation: float) -> pb.Normalization:
    return pb.Normalization(fixed=pb.FixedNormalization(mean=mean, deviation=deviation))


async def test_a_composite_is_what_it_stands_for() -> None:
    """Guards against a composite whose weights, normalisations or vetoes are lost on the way."""
    spelled = [
        pb.WeightedReward(name="toy", weight=6, normalization=fixed(0.25, 0.125)),
        pb.WeightedReward(name="likelihood", weight=-1, normalization=BATCH),
        pb.WeightedReward(name="other", weight=2, veto_below=0.0),
    ]
    async with whole(composites=[MIXED]) as service:
        named = [pb.WeightedReward(name="mixed", weight=2)]
        one = await answer(service, ask(selection=ALL | {"rewards": named}))
        other = await answer(service, ask(selection=ALL | {"rewards": spelled}))
    assert generation(one) == generation(other)
    assert {len(ranked.rewards) for ranked in one.candidates} == {3}


async def test_a_composite_hides_a_reward_of_its_name() -> None:
    """Guards against a name that means one thing today and another once a reward is added."""
    composite = Composite("toy", (WeightedReward("other", -1.0),))
    async with whole(composites=[composite]) as service:
        reply = await answer(service, ask(selection=ALL | rewards(("toy", 1))))
        described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert all(ranked.score == -ranked.rewards[0] for ranked in reply.candidates)
    assert list(described.rewards) == ["toy", "other", "likelihood"]


@pytest.mark.parametrize("name", ["mixed", "other", "likelihood"])
async def test_the_default_reward(name: str) -> None:
    """Guards against a setting nobody reads, or that Describe does not tell."""
    async with whole(composites=[MIXED], default_reward=name) as service:
        bare = await answer(service, ask(selection=ALL))
        spelled = await answer(service, ask(selection=ALL | rewards((name, 1))))
        described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert generation(bare) == generation(spelled)
    others = [each for each in ("toy", "other", "mixed", "likelihood") if each != name]
    assert list(described.rewards) == [name, *others]


async def test_describe_tells_composites() -> None:
    """Guards against names that only the operator knows, and a default that is another's."""
    async with whole(composites=[MIXED]) as service:
        described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert list(described.rewards) == ["toy", "other", "mixed", "likelihood"]


async def test_a_changed_composite_is_another_request(redis_url: str) -> None:
    """Guards against answers from the cache that an old configuration made."""
    composites = [MIXED, Composite("mixed", MIXED.rewards[:2])]
    prints, cached = set(), []
    for composite in (*composites, MIXED):
        generator = HeldGenerator(end_every=29)  # no other test's, whose entries were shared
        async with whole(generator, redis_url=redis_url, composites=[composite]) as service:
            reply = await answer(service, ask(selection=rewards(("mixed", 1))))
            prints.add(reply.fingerprints.reward)
            cached.append(reply.cached)
    assert cached == [False, False, True]
    assert len(prints) == 2


async def test_a_veto_changes_the_winner(service: Whole) -> None:
    """Guards against a veto that is only told: the best by score must not be the answer."""
    plain = await answer(service, ask(selection=ALL | rewards(("toy", -1))))
    lowest = plain.candidates[0].rewards[0]
    vetoing = pb.WeightedReward(name="toy", weight=-1, veto_below=math.nextafter(lowest, 1))
    reply = await answer(service, ask(selection=ALL | {"rewards": [vetoing]}))
    assert reply.candidates[0].candidate_id != plain.candidates[0].candidate_id
    assert not reply.candidates[0].vetoed
    assert reply.candidates[-1].vetoed and reply.candidates[-1].rewards[0] == lowest
    assert reply.fingerprints.reward != plain.fingerprints.reward


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_all_vetoed_still_answers(service: Whole, stream: bool) -> None:
    """Guards against an empty answer, and against one that does not say that it was vetoed."""
    vetoing = pb.WeightedReward(name="toy", veto_below=2)
    chosen = {"rewards": [vetoing], "return_candidates": 64}
    reply = await answer(service, ask(selection=chosen), stream=stream)
    assert reply.text
    assert all(ranked.vetoed for ranked in reply.candidates)
    first = reply.rounds[0]
    assert first.num_vetoed == first.num_started - first.num_finished > 1
    assert [done.num_live for done in reply.rounds] == [1] * (len(reply.rounds) - 1) + [0]


async def test_batch_normalisation(service: Whole) -> None:
    """Guards against a normalisation that is dropped, or is of one round, not of all that count."""
    parts = [pb.WeightedReward(name="toy", weight=2, normalization=BATCH)]
    chosen = {"alpha": 0, "rewards": parts, "return_candidates": 64}
    reply = await answer(service, ask(selection=chosen))
    values = [ranked.rewards[0] for ranked in reply.candidates]
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    assert len(reply.rounds) > 1 and deviation > 0, "the case did not occur"
    for ranked in reply.candidates:
        assert ranked.score == pytest.approx(2 * (ranked.rewards[0] - mean) / deviation)


async def test_values_are_in_the_callers_order(cached_service: Whole) -> None:
    """Guards against an equal request that was asked in another order: its values are not ours."""
    parts = [("toy", 1.0), ("likelihood", 1.0)]
    made = await answer(cached_service, ask(selection=rewards(*parts)))
    turned = await answer(cached_service, ask(selection=rewards(*parts[::-1])))
    assert turned.cached and not made.cached
    for reply, index in ((made, 1), (turned, 0)):
        assert reply.candidates[0].rewards[index] == reply.candidates[0].mean_logprob
        assert reply.candidates[0].rewards[index - 1] > 0


async def test_an_unknown_reward_in_a_composite() -> None:
    """Guards against a fallback, and a caller who is told of a name that was never asked for."""
    broken = Composite("broken", (WeightedReward("toy"), WeightedReward("nope")))
    async with whole(composites=[broken]) as service:
        error = await refusal(service, ask(selection=rewards(("broken", 1))))
        assert error.code() is Code.NOT_FOUND
        told = "no reward nope of composite broken, there are: toy, other, broken, likelihood"
        assert error.details() == told
        assert service.generator.num_opened == 0


async def test_bad_fields_of_composites() -> None:
    """Guards against a veto that is dropped in silence, and a reward that counts twice."""
    many = Composite("many", tuple(WeightedReward(f"r{number}") for number in range(8)))
    cases: list[tuple[list[pb.WeightedReward], list[str]]] = [
        ([pb.WeightedReward(name="mixed", normalization=BATCH)], ["[0].normalization"]),
        (
            [pb.WeightedReward(name="nope"), pb.WeightedReward(name="mixed", veto_below=0)],
            ["[1].veto_below"],
        ),
        ([pb.WeightedReward(name="mixed"), pb.WeightedReward(name="other")], [""]),
        ([pb.WeightedReward(name="many"), pb.WeightedReward(name="other")], [""]),
    ]
    async with whole(composites=[MIXED, many]) as service:
        for asked, fields in cases:
            error = await refusal(service, ask(selection={"rewards": asked}))
            assert error.code() is Code.INVALID_ARGUMENT
            assert list(violations_of(error)) == [f"selection.rewards{field}" for field in fields]
        assert service.generator.num_opened == 0


@pytest.mark.parametrize(
    "text",
    [
        "null \0 byte",
        "\u05e9\u05dc\u05d5\u05dd \u202eend",
        "👩\u200d👩\u200d👧",
        "<|im_end|> </s>",
        "x" * 100_000,
    ],
)
async def test_strange_prompts_are_prompts(service: Whole, text: str) -> None:
    """Guards against text that breaks a key, a log line or a template."""
    prompt = common_pb2.Prompt(messages=[common_pb2.Message(role="user", content=text)])
    assert (await answer(service, ask(prompt=prompt))).text


async def test_describe(cached_service: Whole) -> None:
    """Guards against a description of yesterday: load is of now, limits are the generator's."""
    service = cached_service
    service.generator.gates["extend"].shut()
    running = asyncio.create_task(answer(service, ask()))
    await until(lambda: service.generator.gates["extend"].held == 1)
    described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
    assert list(described.rewards) == ["toy", "other", "likelihood"]
    assert described.cache_available
    assert (described.running, described.queued) == (1, 0)
    assert (described.generator.model, described.generator.max_candidates) == ("toy", 1024)
    assert described.generator.sessions == 1
    assert described.generator.slots.owned == service.generator.toy.ledger.owned > 0
    assert described.default_schedule.geometric.first == 16
    service.generator.gates["extend"].open()
    await running


async def test_health_and_reflection(service: Whole) -> None:
    """Guards against probes and tools that find nothing."""
    health: Any = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    call = make_stub(service.channel).ServerReflectionInfo(iter([listing]))
    listed = (await call.read()).list_services_response.service
    assert SERVICE in [found.name for found in listed]
    call.cancel()


async def test_time_is_counted_from_arrival() -> None:
    """Guards against a first round that seems quick because its wait in line was left out."""
    async with whole(max_running=1) as service:
        slow = ask(sampling={"max_tokens": 100, "ignore_eos": True}, selection={"n": 400})
        first = asyncio.create_task(answer(service, slow))
        await until(lambda: service.admission.running == 1)
        timings = (await answer(service, seeded(1))).timings
        await first
    assert timings.queue_ms > 0
    assert timings.queue_ms <= timings.first_round_ms <= timings.total_ms


# The cache


async def test_the_second_equal_request_comes_from_the_cache(cached_service: Whole) -> None:
    """Guards against paying twice; its usage and timings are those of the run that made it."""
    first = await answer(cached_service, ask())
    second = await answer(cached_service, ask())
    (third,) = await events(cached_service, ask())
    assert cached_service.generator.num_opened == 1
    assert not first.cached
    for reply in (second, third.finished):
        assert reply.cached
        assert reply.timings.extend_ms == first.timings.extend_ms
        reply.cached = False
        assert generation(reply) == generation(first)
    assert len({first.request_id, second.request_id, third.finished.request_id}) == 3


async def test_what_is_the_same_request(cached_service: Whole) -> None:
    """Guards against a key that hangs on order, spelling or the method that was called."""
    parts = [("toy", 2.0), ("likelihood", 1.0)]
    rewards = [pb.WeightedReward(name=name, weight=weight) for name, weight in parts]
    await answer(cached_service, ask(selection={"rewards": rewards}))
    rewards.reverse()
    rewards[0].ClearField("weight")
    assert (await answer(cached_service, ask(selection={"rewards": rewards}))).cached
    assert (await answer(cached_service, ask(selection={"rewards": rewards}), stream=True)).cached


@pytest.mark.parametrize(
    "other",
    [
        seeded(8),
        ask(sampling={"max_tokens": 41}),
        ask(sampling={"stop": ["x"]}),
        ask(sampling={"min_tokens": 1}),
        ask(sampling={"logprobs": True}),
        ask(selection={"n": 13}),
        ask(selection={"alpha": 0.25}),
        ask(selection={"return_candidates": 2}),
        ask(selection={"rewards": [pb.WeightedReward(name="other")]}),
        ask(selection={"rewards": [pb.WeightedReward(name="toy", normalization=BATCH)]}),
        ask(selection={"rewards": [pb.WeightedReward(name="toy", normalization=fixed(0, 1))]}),
        ask(selection={"rewards": [pb.WeightedReward(name="toy", veto_below=0)]}),
        ask(selection={"schedule": pb.Schedule(memory=pb.MemorySchedule())}),
        ask(prompt=common_pb2.Prompt(text="four words of prompt ")),
    ],
)
async def test_what_is_another_request(cached_service: Whole, other: pb.GenerateRequest) -> None:
    """Guards against an answer to somebody else's question."""
    await answer(cached_service, ask())
    assert not (await answer(cached_service, other)).cached


async def test_composed_and_decomposed_text_are_two_prompts(cached_service: Whole) -> None:
    """Guards against a key that normalises: the model sees two different texts."""
    for text in ("caf\u00e9", "cafe\u0301"):
        assert not (await answer(cached_service, ask(prompt=common_pb2.Prompt(text=text)))).cached


async def test_tenants_share_nothing(cached_service: Whole) -> None:
    """Guards against one tenant reading, or riding along with, another's answers."""
    assert not (await answer(cached_service, ask(), tenant="a")).cached
    assert not (await answer(cached_service, ask(), tenant="b")).cached
    assert (await answer(cached_service, ask(), tenant="a")).cached
    gate = cached_service.generator.gates["extend"]
    gate.shut()
    both = [asyncio.create_task(answer(cached_service, seeded(9), tenant=name)) for name in "ab"]
    await until(lambda: gate.held == 2)
    gate.open()
    assert not any(reply.cached for reply in await asyncio.gather(*both))


async def test_tenants_have_salts_of_their_own(service: Whole) -> None:
    """Guards against prompt prefixes shared across tenants, whose timing tells what others ask."""
    tenants = ("", "acme", "acme", "Acme", "umbrella")
    for tenant in tenants:
        await answer(service, ask(cache_control=pb.CACHE_CONTROL_BYPASS), tenant=tenant)
    salts = service.generator.salts
    assert salts[1] == salts[2]
    assert len(set(salts)) == len(set(tenants))


async def test_a_salt_is_not_the_tenants_name(service: Whole) -> None:
    """Guards against a customer's name in the generator's memory, traces or logs."""
    tenants = ("acme", "0123456789abcdef" * 2, "a" * 400)  # one has a digest's own looks
    for tenant in tenants:
        await answer(service, ask(), tenant=tenant)
    for tenant, salt in zip(tenants, service.generator.salts, strict=True):
        assert re.fullmatch("[0-9a-f]{32}", salt)
        assert tenant not in salt and salt not in tenant


async def test_tokens_and_logprobs_come_from_the_cache_too(cached_service: Whole) -> None:
    """Guards against a cached answer that lacks what its request asked for."""
    message = ask(sampling={"logprobs": True}, selection={"return_candidates": 3})
    made, cached = [await answer(cached_service, message) for _ in range(2)]
    assert cached.cached
    assert list(cached.candidates) == list(made.candidates)
    assert all(len(c.logprobs) == len(c.token_ids) == c.num_tokens for c in cached.candidates)
    assert not (await answer(cached_service, ask())).candidates[0].logprobs


async def test_nothing_ends_before_min_tokens(service: Whole) -> None:
    """Guards against a min_tokens that is taken and dropped on its way to the generator."""
    message = ask(selection={"return_candidates": 64, "algorithm": pb.ALGORITHM_BEST_OF_N})
    assert min(c.num_tokens for c in (await answer(service, message)).candidates) < 30
    message.sampling.min_tokens = 30
    assert min(c.num_tokens for c in (await answer(service, message)).candidates) >= 30


async def test_bypass_neither_reads_nor_writes(cached_service: Whole) -> None:
    bypass = ask(cache_control=pb.CACHE_CONTROL_BYPASS)
    assert not (await answer(cached_service, bypass)).cached
    assert not (await answer(cached_service, ask())).cached
    assert not (await answer(cached_service, bypass)).cached
    assert cached_service.generator.num_opened == 3
    counts = cached_service.cache.counts
    assert (counts.stored, counts.misses, counts.hits) == (1, 1, 0)


async def test_refresh_writes_and_does_not_read(cached_service: Whole) -> None:
    """Guards against a refresh that answers from the cache, or leaves the old answer in it."""
    first = await answer(cached_service, ask())
    fresh = await answer(cached_service, ask(cache_control=pb.CACHE_CONTROL_REFRESH))
    assert not fresh.cached
    stored = await answer(cached_service, ask())
    assert stored.cached
    assert stored.timings.extend_ms == fresh.timings.extend_ms != first.timings.extend_ms


async def test_a_failed_run_is_not_cached(cached_service: Whole) -> None:
    """Guards against remembering a failure, or half an answer."""
    service = cached_service
    service.reward.gate.clear()
    call = asyncio.create_task(answer(service, ask()))
    await until(lambda: service.reward.held == 1)
    await service.reward_server.kill()
    assert (await failure_of(call)).code() is Code.UNAVAILABLE
    assert service.cache.counts.stored == 0
    service.reward.gate.set()
    await service.reward_server.start()
    assert not (await when_back(service, ask())).cached
    assert (await answer(service, ask())).cached


async def when_back(service: Whole, message: pb.GenerateRequest) -> pb.GenerateResponse:
    """The answer once the backends are found again."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await answer(service, message)
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.UNAVAILABLE


@pytest.mark.parametrize("how", ["nobody listens", "hangs"])
async def test_a_broken_redis_is_never_seen(how: str) -> None:
    """Guards against an answer that depends on its cache."""
    with dead_port() as port:
        async with scripted(hang) as (hanging, _):
            url = hanging if how == "hangs" else f"redis://127.0.0.1:{port}"
            async with whole(redis_url=url) as service:
                for _ in range(2):
                    assert not (await answer(service, ask())).cached
                described = await service.stub.Describe(pb.OrchestratorServiceDescribeRequest())
                assert not described.cache_available


# Single flight


async def in_flight(
    service: Whole, count: int, message: pb.GenerateRequest | None = None
) -> list[asyncio.Task[pb.GenerateResponse]]:
    """Equal requests: the first leads and is held in its first round, the others wait for it."""
    gate, flights = service.generator.gates["extend"], service.orchestrator._flights
    gate.shut()
    tasks: list[asyncio.Task[pb.GenerateResponse]] = []
    for number in range(count):
        tasks.append(asyncio.create_task(answer(service, message or ask(), stream=number % 2 == 1)))
        if number == 0:
            await until(lambda: gate.held == 1)
    await until(lambda: flights.num_waiting == count - 1)
    return tasks


async def test_a_caller_that_looked_too_early_looks_again(cached_service: Whole) -> None:
    """Its look came back as a miss only after the leader had stored the answer and landed: the
    caller then found no flight to join, and made the answer a second time."""
    service = cached_service
    get = service.cache.get
    looks: list[Hit | None] = []

    async def slow_once(key: str) -> Hit | None:
        found = await get(key)
        looks.append(found)
        if len(looks) == 1:
            await answer(service, ask())  # leads, stores and lands meanwhile
        return found

    service.cache.get = slow_once  # type: ignore[method-assign]
    assert (await answer(service, ask())).cached
    assert service.generator.num_opened == 1


async def test_equal_requests_are_one_generation(cached_service: Whole) -> None:
    """Guards against a stampede: 100 callers, by both methods, one session."""
    tasks = await in_flight(cached_service, 100)
    cached_service.generator.gates["extend"].open()
    replies = await asyncio.gather(*tasks)
    assert cached_service.generator.num_opened == 1
    assert [reply.cached for reply in replies] == [False] + [True] * 99
    assert len({reply.text for reply in replies}) == 1
    assert len({reply.request_id for reply in replies}) == 100


async def test_a_cancelled_leader_hands_over(cached_service: Whole) -> None:
    """Guards against 9 callers failing because one client hung up."""
    leader, *waiters = await in_flight(cached_service, 10)
    leader.cancel()
    await until(lambda: cached_service.generator.num_opened == 2)
    cached_service.generator.gates["extend"].open()
    replies = await asyncio.gather(*waiters)
    assert cached_service.generator.num_opened == 2
    assert sorted(reply.cached for reply in replies) == [False] + [True] * 8
    expected = await answer(cached_service, ask(cache_control=pb.CACHE_CONTROL_BYPASS))
    assert {reply.text for reply in replies} == {expected.text}


async def test_waiters_that_leave_disturb_nobody(cached_service: Whole) -> None:
    leader, *waiters = await in_flight(cached_service, 10)
    for waiter in waiters[::2]:
        waiter.cancel()
    await asyncio.wait(waiters[::2])
    cached_service.generator.gates["extend"].open()
    replies = await asyncio.gather(leader, *waiters[1::2])
    assert cached_service.generator.num_opened == 1
    assert len({reply.text for reply in replies}) == 1


async def test_a_leaders_failure_is_everybodys(cached_service: Whole) -> None:
    """Guards against a dead backend being asked once per waiter, one after the other."""
    tasks = await in_flight(cached_service, 10)
    await cached_service.generator_server.kill()
    errors = [await failure_of(task) for task in tasks]
    assert {error.code() for error in errors} == {Code.UNAVAILABLE}
    assert cached_service.generator.num_opened == 1
    cached_service.generator.gates["extend"].open()


# Bad requests


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_strict_leaders_failure_is_its_own(redis_url: str, is_shared: bool) -> None:
    """Guards a caller who allows something weaker, and is owed it, against the error of an equal
    request that does not."""
    generator, url = HeldGenerator(end_every=next(_ENDS)), redis_url if is_shared else ""
    async with whole(generator, redis_url=url) as service:
        strict = await held(service, ask())
        lenient = asyncio.create_task(answer(service, ask(allow_degraded=True)))
        flights = service.orchestrator._flights
        await until(lambda: flights.num_flying + flights.num_waiting == 2)
        await service.reward_server.kill()
        generator.gates["extend"].open()
        assert (await failure_of(strict)).code() is Code.UNAVAILABLE
        assert list((await lenient).degradations) == [pb.DEGRADATION_REWARD]


@pytest.mark.parametrize("changed", ["generator", "reward"])
async def test_an_answer_is_kept_by_the_name_of_who_made_it(redis_url: str, changed: str) -> None:
    """Guards the cache against answers of a version that came while the request waited."""
    old = HeldGenerator(end_every=next(_ENDS))
    async with whole(old, redis_url=redis_url, max_running=1, describe_every_s=0) as service:
        before, first = service.generator.toy, await held(service, seeded(0))
        # The second leads a flight that the third joins.
        waiting = [asyncio.create_task(answer(service, ask())) for _ in range(2)]
        await until(lambda: service.admission.queued == 1)
        await until(lambda: service.orchestrator._flights.num_waiting == 1)
        if changed == "generator":
            service.generator.toy = ToyGenerator(end_every=7)
        else:
            service.reward.fingerprint = "new"
        service.generator.gates["extend"].open()
        old_prints, new_prints = (await first).fingerprints, (await waiting[0]).fingerprints
        assert (await waiting[1]).fingerprints == new_prints, "all are told the truth"
        assert service.generator.num_opened == 2, "and none needs an answer of its own"
        assert [
            old_prints.generator != new_prints.generator,
            old_prints.reward != new_prints.reward,
        ] == [changed == "generator", changed == "reward"]
        assert service.cache.counts.stored == 1
        assert (await answer(service, ask())).fingerprints == new_prints
        service.generator.toy, service.reward.fingerprint = before, ToyReward().fingerprint
        again = await answer(service, ask())
        assert not again.cached and again.fingerprints == old_prints


def tokens(*decision_tokens: int) -> dict[str, Any]:
    return {"schedule": pb.Schedule(tokens=pb.TokensSchedule(decision_tokens=decision_tokens))}


def geometric(**fields: float) -> dict[str, Any]:
    return {"schedule": pb.Schedule(geometric=pb.GeometricSchedule(**fields))}  # type: ignore[arg-type]


def rewards(*parts: tuple[str, float]) -> dict[str, Any]:
    return {"rewards": [pb.WeightedReward(name=name, weight=weight) for name, weight in parts]}


def normalised(
    normalization: pb.Normalization, veto_below: float | None = None, weight: float = 1
) -> dict[str, Any]:
    reward = pb.WeightedReward(
        name="toy", weight=weight, normalization=normalization, veto_below=veto_below
    )
    return {"rewards": [reward]}


def turns(*messages: tuple[str, str]) -> common_pb2.Prompt:
    return common_pb2.Prompt(
        messages=[common_pb2.Message(role=role, content=content) for role, content in messages]
    )


DECISIONS = "selection.schedule.tokens.decision_tokens"
BAD: list[tuple[pb.GenerateRequest, list[str]]] = [
    (pb.GenerateRequest(), ["prompt"]),
    (ask(prompt=common_pb2.Prompt(text=" \n\t")), ["prompt.text"]),
    (ask(prompt=common_pb2.Prompt(text="x" * 1_000_001)), ["prompt"]),
    (ask(prompt=turns(("user", " "))), ["prompt.messages[0].content"]),
    (ask(prompt=turns(("robot", "x"), ("user", "x"))), ["prompt.messages[0].role"]),
    (ask(prompt=turns(("user", "x"), ("assistant", "x"))), ["prompt.messages[1].role"]),
    *((ask(selection={"n": n}), ["selection.n"]) for n in (-1, 1025, INT32_MAX, -INT32_MAX - 1)),
    *((ask(selection={"alpha": a}), ["selection.alpha"]) for a in (-0.1, 1, 1.5, NAN, INF, -INF)),
    *(
        (ask(sampling={"temperature": t}), ["sampling.temperature"])
        for t in (0, -1, 1e-9, 2.1, NAN, INF)
    ),
    (ask(sampling={"temperature": 0}, selection={"n": 0}), ["sampling.temperature"]),
    *((ask(sampling={"top_p": p}), ["sampling.top_p"]) for p in (0, -1, 2, NAN)),
    (ask(sampling={"top_k": -2}), ["sampling.top_k"]),
    *((ask(sampling={"max_tokens": m}), ["sampling.max_tokens"]) for m in (0, -1, 4097, INT32_MAX)),
    *((ask(sampling={"min_tokens": m}), ["sampling.min_tokens"]) for m in (-1, 41, INT32_MAX)),
    (ask(sampling={"seed": -1}), ["sampling.seed"]),
    (ask(sampling={"stop": ["x", ""]}), ["sampling.stop[1]"]),
    (ask(sampling={"stop": ["x" * 257]}), ["sampling.stop[0]"]),
    (ask(sampling={"stop": ["x"] * 1000}), ["sampling.stop"]),
    *(
        (ask(selection=tokens(*wrong)), [DECISIONS])
        for wrong in ((), (0, 4), (4, 4), (8, 4), (-4, 4), range(1, 1027))
    ),
    *(
        (ask(selection=geometric(first=first)), ["selection.schedule.geometric.first"])
        for first in (0, -1)
    ),
    *(
        (ask(selection=geometric(factor=factor)), ["selection.schedule.geometric.factor"])
        for factor in (1, 0, -2, 16.1, NAN, INF)
    ),
    *(
        (ask(selection={"return_candidates": count}), ["selection.return_candidates"])
        for count in (0, -1, 65)
    ),
    (ask(selection=rewards(("toy", 1), ("toy", 2))), ["selection.rewards"]),
    (ask(selection=rewards(*((str(name), 1) for name in range(9)))), ["selection.rewards"]),
    (ask(selection=rewards(("", 1))), ["selection.rewards[0].name"]),
    *(
        (ask(selection=rewards(("other", 1), ("toy", w))), ["selection.rewards[1].weight"])
        for w in (0, NAN, INF, -INF)
    ),
    *(
        (
            ask(selection=normalised(fixed(mean, 1))),
            ["selection.rewards[0].normalization.fixed.mean"],
        )
        for mean in (1.1e12, -1.1e12, NAN, INF, -INF)
    ),
    *(
        (
            ask(selection=normalised(fixed(0, deviation))),
            ["selection.rewards[0].normalization.fixed.deviation"],
        )
        for deviation in (0, -1, 1e-13, 1.1e12, NAN, INF)
    ),
    *(
        (ask(selection=normalised(BATCH, veto)), ["selection.rewards[0].veto_below"])
        for veto in (1.1e12, -1.1e12, NAN, INF, -INF)
    ),
    (ask(selection={"algorithm": 99}), ["selection.algorithm"]),
    (ask(cache_control=-1), ["cache_control"]),
]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_bad_fields(service: Whole, stream: bool) -> None:
    """Guards against a bad field that is clamped, believed, or blamed on another one."""
    for message, fields in BAD:
        error = await refusal(service, message, stream=stream)
        assert error.code() is Code.INVALID_ARGUMENT, (message, error)
        assert list(violations_of(error)) == fields, error
        assert reason_of(error) == "INVALID_REQUEST"
    assert service.generator.num_opened == 0
    assert service.reward.num_batches == 0


async def test_all_bad_fields_at_once(service: Whole) -> None:
    """Guards against callers who mend one field per call."""
    wrong_selection = {"n": -1, "alpha": 1, "return_candidates": 0, "algorithm": 7}
    error = await refusal(
        service,
        ask(
            prompt=turns(("robot", " "), ("user", "x")),
            sampling={"max_tokens": 0, "temperature": 9, "top_k": -1, "top_p": 0, "seed": -1},
            selection=wrong_selection | tokens(3, 3) | rewards(("", 0)),
            cache_control=9,
        ),
    )
    assert set(violations_of(error)) == {
        "prompt.messages[0].role",
        "prompt.messages[0].content",
        *(f"sampling.{field}" for field in ("max_tokens", "temperature", "top_k", "top_p", "seed")),
        *(f"selection.{field}" for field in ("n", "alpha", "return_candidates", "algorithm")),
        DECISIONS,
        "selection.rewards[0].name",
        "selection.rewards[0].weight",
        "cache_control",
    }
    assert service.generator.num_opened == 0


@pytest.mark.parametrize(
    "message",
    [
        ask(selection={"n": 1024}, sampling={"max_tokens": 1}),
        ask(selection={"n": 1}, sampling={"temperature": 0}),
        ask(sampling={"temperature": 0.01}),
        ask(sampling={"temperature": 2, "top_p": 1e-9, "top_k": INT32_MAX}),
        ask(sampling={"seed": 2**63 - 1, "stop": ["x" * 256] * 16}),
        ask(selection={"n": 1}, sampling={"max_tokens": 4096}),
        ask(sampling={"max_tokens": 5, "min_tokens": 5, "logprobs": True}),
        ask(selection={"alpha": 0.999999}),
        ask(selection={"alpha": 5e-324, "return_candidates": 64}),
        ask(selection=tokens(*range(1, 1025))),
        ask(selection=geometric(first=INT32_MAX, factor=16)),
        ask(selection=rewards(("toy", 1e-300), ("other", -1e6), ("likelihood", 3))),
        ask(selection=normalised(fixed(-1e12, 1e-12), -1e12, weight=-1e6)),
        ask(selection=normalised(fixed(1e12, 1e12), 1e12)),
        ask(selection=normalised(pb.Normalization(), 0)),
    ],
)
async def test_values_at_their_limits(service: Whole, message: pb.GenerateRequest) -> None:
    """Guards against limits that are off by one."""
    assert (await answer(service, message)).text


@pytest.mark.parametrize(
    ("message", "known"),
    [
        (ask(model="../../x"), "toy"),
        (ask(selection=rewards(("nope", 1))), "toy, other, likelihood"),
        (ask(selection=rewards(("toy", 1), ("../../x", 1))), "toy, other, likelihood"),
    ],
)
async def test_unknown_names(service: Whole, message: pb.GenerateRequest, known: str) -> None:
    """Guards against a fallback nobody asked for; the answer names what there is."""
    error = await refusal(service, message)
    assert error.code() is Code.NOT_FOUND
    assert reason_of(error) == "NOT_FOUND"
    assert str(error.details()).endswith(known)
    assert service.generator.num_opened == 0


async def test_candidates_that_can_never_fit() -> None:
    """Guards against a path in the generator's words: callers know no field `n`."""
    async with whole(HeldGenerator(200)) as service:
        error = await refusal(service, ask(selection={"n": 500}))
        assert error.code() is Code.INVALID_ARGUMENT
        assert list(violations_of(error)) == ["selection.n"]
        assert reason_of(error) == "SLOTS_EXCEEDED"


async def test_more_candidates_than_a_reward_takes() -> None:
    """Used to fail after the whole first round, with a path of the internal port."""

    class SmallRewards:
        def scorer(self, name: str) -> Scorer:
            raise AssertionError("must not be asked")

        async def describe(self) -> list[RewardDescription]:
            return [RewardDescription("small", "f", "takes few", max_batch=4)]

    orchestrator = Orchestrator(ToyGenerator(), SmallRewards(), Cache(""), Admission(Limits(1, 0)))
    request = GenerationRequest(Prompt(text="hello"), selection=Selection(n=5))
    with pytest.raises(InvalidRequest) as caught:
        _ = [event async for event in orchestrator.generate(request, tenant="")]
    assert [violation.field for violation in caught.value.violations] == ["selection.rewards[0]"]


async def test_weights_too_large_to_add_up(service: Whole) -> None:
    """Guards against INTERNAL for a finite weight whose product with a score is not."""
    message = ask(selection=rewards(("likelihood", 1.7e308), ("toy", -1.1e6)))
    error = await refusal(service, message)
    assert error.code() is Code.INVALID_ARGUMENT
    assert list(violations_of(error)) == [f"selection.rewards[{i}].weight" for i in (0, 1)]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Describe", "GetRecord"])
async def test_malformed_messages(service: Whole, method: str) -> None:
    """Guards against UNKNOWN with a class name: grpc's own answer to what it cannot decode."""
    error = await failure_of(raw_call(service, method, b"\xff\xff\xff"))
    assert error.code() is Code.INVALID_ARGUMENT
    assert list(violations_of(error)) == ["request"]
    assert "Decode" not in str(error.details())


async def test_a_truncated_message(service: Whole) -> None:
    """Guards against half a request being served as a whole one."""
    error = await failure_of(raw_call(service, "Generate", ask().SerializeToString()[:-1]))
    assert error.code() is Code.INVALID_ARGUMENT
    assert service.generator.num_opened == 0


async def test_unknown_fields_are_ignored(service: Whole) -> None:
    """Guards against a newer client that an older server turns away."""
    newer = ask().SerializeToString() + b"\xfa\x3f\x03new"  # field 1023, a string
    assert pb.GenerateResponse.FromString(await raw_call(service, "Generate", newer)).text


async def test_an_unknown_method(service: Whole) -> None:
    error = await failure_of(raw_call(service, "Guess", b""))
    assert error.code() is Code.UNIMPLEMENTED


async def raw_call(service: Whole, method: str, data: bytes) -> bytes:
    """The first message of an answer to bytes."""
    channel: Any = service.channel
    path = f"/{SERVICE}/{method}"
    if method == "GenerateStream":
        reply = await channel.unary_stream(path)(data, timeout=BOUND_S).read()
    else:
        reply = await channel.unary_unary(path)(data, timeout=BOUND_S)
    return bytes(reply)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_INT32 = st.sampled_from([0, 1, 2, 16, -1, 1025, INT32_MAX, -INT32_MAX - 1])
_NUMBER = st.one_of(
    st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0]), st.floats(allow_nan=True, allow_infinity=True)
)
# Not between 1 and 1.01: so small a factor takes a long time to count.
_ENUM = st.sampled_from([0, 1, 2, 3, 4, 99, -1, INT32_MAX])
_PROMPTS = st.builds(
    common_pb2.Prompt,
    text=st.one_of(st.just(""), _TEXT),
    messages=st.lists(
        st.builds(
            common_pb2.Message,
            role=st.sampled_from(["user", "user", "system", "assistant", "", "robot"]),
            content=_TEXT,
        ),
        max_size=3,
    ),
)
_SAMPLINGS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([1, 2, 40, 0, -1, 4097, INT32_MAX]),
    "temperature": _NUMBER,
    "top_k": _INT32,
    "top_p": _NUMBER,
    "stop": st.lists(_TEXT, max_size=18),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "ignore_eos": st.booleans(),
    "min_tokens": _INT32,
    "logprobs": st.booleans(),
}
_SCHEDULES = st.one_of(
    st.builds(pb.Schedule),
    st.builds(pb.Schedule, memory=st.builds(pb.MemorySchedule)),
    st.builds(
        pb.Schedule,
        tokens=st.builds(
            pb.TokensSchedule, decision_tokens=st.lists(st.integers(-2, 50), max_size=4)
        ),
    ),
    st.builds(pb.Schedule, geometric=st.builds(pb.GeometricSchedule, first=_INT32, factor=_NUMBER)),
)
_SELECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "n": _INT32,
    "alpha": _NUMBER,
    "schedule": _SCHEDULES,
    "algorithm": _ENUM,
    "rewards": st.lists(
        st.builds(
            pb.WeightedReward,
            name=st.sampled_from(["toy", "other", "likelihood", "likelihood", "", "nope"]),
            weight=_NUMBER,
            normalization=st.none()
            | st.just(BATCH)
            | st.builds(
                pb.Normalization,
                fixed=st.builds(pb.FixedNormalization, mean=_NUMBER, deviation=_NUMBER),
            ),
            veto_below=st.none() | _NUMBER,
        ),
        max_size=3,
    ),
    "return_candidates": _INT32,
}


def _few(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """At most two fields at a time, so that many requests get past the checks."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)
    return names.flatmap(lambda few: st.fixed_dictionaries({name: fields[name] for name in few}))


_MESSAGES = st.builds(
    ask,
    prompt=st.one_of(st.just(PROMPT), st.just(PROMPT), _PROMPTS),
    sampling=_few(_SAMPLINGS),
    selection=_few(_SELECTIONS),
    model=st.sampled_from(["", "", "", "toy", "../../x"]),
    cache_control=st.one_of(st.integers(0, 4), st.integers(0, 4), _ENUM),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # one service for all examples
)
@given(message=_MESSAGES, stream=st.booleans())
async def test_no_request_is_a_bug(
    service: Whole, message: pb.GenerateRequest, stream: bool
) -> None:
    """Guards against UNKNOWN and INTERNAL, whatever is asked: an answer, or the caller's fault."""
    try:
        reply = await answer(service, message, stream=stream)
        assert reply.candidates
        assert math.isfinite(reply.score)
    except grpc.aio.AioRpcError as error:
        assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND), error


# Too many, too late, gone


async def held(service: Whole, message: pb.GenerateRequest) -> asyncio.Task[pb.GenerateResponse]:
    """A request that stays in its first round until the gate opens."""
    gate = service.generator.gates["extend"]
    gate.shut()
    already = gate.held
    task = asyncio.create_task(answer(service, message))
    await until(lambda: gate.held == already + 1)
    return task


async def test_who_is_refused_when_all_places_are_taken() -> None:
    """Guards against a queue without an end: 1 runs, 1 waits, 3 are told when to come again."""
    async with whole(max_running=1, max_queued=1) as service:
        first = await held(service, seeded(0))
        second = asyncio.create_task(answer(service, seeded(1)))
        await until(lambda: service.admission.queued == 1)
        for seed in (2, 3, 4):
            error = await refusal(service, seeded(seed), stream=seed == 3)
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert reason_of(error) == "OVERLOADED"
            assert retry_info_s(error) == 2.0
            assert trailer(error, "grpc-retry-pushback-ms") == "2000"
        service.generator.gates["extend"].open()
        assert (await first).text and (await second).text
        assert service.generator.num_opened == 2


async def test_a_full_generator_is_told_to_the_caller() -> None:
    """Guards against a generator's refusal that becomes a bug on its way."""
    async with whole(HeldGenerator(300)) as service:
        first = await held(service, ask(selection={"n": 12}))
        error = await refusal(service, ask(selection={"n": 12}, sampling={"seed": 1}))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert reason_of(error) == "OVERLOADED"
        assert retry_info_s(error) == 1.0
        assert trailer(error, "grpc-retry-pushback-ms") == "1000"
        service.generator.gates["extend"].open()
        await first


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", ["open", "extend", "score", "prune"])
async def test_the_servers_deadline_while_running(phase: str, stream: bool) -> None:
    """Guards against a request without a deadline that runs for ever."""
    async with whole(default_deadline_s=0.1) as service:
        shut(service, phase)
        call: Awaitable[Any] = last_event(service) if stream else service.stub.Generate(ask())
        async with asyncio.timeout(BOUND_S):
            error = await failure_of(call)
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert reason_of(error) == "DEADLINE_EXCEEDED"
        await until(lambda: service.is_idle)


async def last_event(service: Whole) -> Any:
    return [e async for e in service.stub.GenerateStream(pb.GenerateStreamRequest(request=ask()))]


async def test_the_servers_deadline_while_queued() -> None:
    """Guards against work that is done although its deadline passed in line."""
    async with whole(max_running=1, default_deadline_s=0.1) as service:
        first = await held(service, seeded(0))  # brings a longer deadline of its own
        async with asyncio.timeout(BOUND_S):
            error = await failure_of(service.stub.Generate(seeded(1)))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert (service.admission.running, service.admission.queued) == (1, 0)
        service.generator.gates["extend"].open()
        await first
        assert service.generator.num_opened == 1


@pytest.mark.parametrize("phase", ["queue", "extend"])
async def test_the_clients_deadline(phase: str) -> None:
    """Guards against work that goes on after its caller has given up."""
    async with whole(max_running=1) as service:
        holder = await held(service, seeded(0)) if phase == "queue" else None
        shut(service, "extend")
        error = await failure_of(service.stub.Generate(seeded(1), timeout=0.1))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: service.admission.queued == 0)
        if holder:
            service.generator.gates["extend"].open()
            await holder
            assert service.generator.num_opened == 1
        await until(lambda: service.is_idle)


async def test_a_deadline_that_has_passed_already(service: Whole) -> None:
    error = await failure_of(service.stub.Generate(ask(), timeout=0))
    assert error.code() is Code.DEADLINE_EXCEEDED


def shut(service: Whole, phase: str) -> None:
    if phase == "score":
        service.reward.gate.clear()
    else:
        service.generator.gates[phase].shut()


def num_held(service: Whole, phase: str) -> int:
    if phase == "queue":
        return service.admission.queued
    return service.reward.held if phase == "score" else service.generator.gates[phase].held


async def fire(service: Whole, message: pb.GenerateRequest, stream: bool) -> Any:
    """A call under way."""
    if stream:
        return service.stub.GenerateStream(pb.GenerateStreamRequest(request=message))
    return service.stub.Generate(message)


@pytest.mark.parametrize("how", ["cancel", "channel"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", ["open", "extend", "score", "prune", "close"])
async def test_a_client_that_leaves(phase: str, stream: bool, how: str) -> None:
    """Guards against work for nobody: all is free, though the gate stays shut."""
    async with whole() as service:
        shut(service, phase)
        call = await fire(service, ask(), stream)
        await until(lambda: num_held(service, phase) == 1)
        assert service.admission.running == 1
        await leave(service, call, how)
        await until(lambda: service.is_idle)


async def leave(service: Whole, call: Any, how: str) -> None:
    if how == "channel":
        await service.channel.close()
    else:
        call.cancel()


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_a_client_that_leaves_the_line(stream: bool) -> None:
    """Guards against a place in line that the dead hold."""
    async with whole(max_running=1) as service:
        first = await held(service, seeded(0))
        call = await fire(service, seeded(1), stream)
        await until(lambda: num_held(service, "queue") == 1)
        call.cancel()
        await until(lambda: num_held(service, "queue") == 0)
        service.generator.gates["extend"].open()
        await first
        assert service.generator.num_opened == 1


async def test_a_client_that_stops_reading_and_leaves() -> None:
    """Guards against a handler stuck in its write for ever: 16 MiB are more than a stream holds."""
    generator = LongWinded(2**17, FinishReason.STOP)
    async with whole(generator) as service:
        message = ask(selection=rewards(("likelihood", 1)) | {"n": 64, "return_candidates": 64})
        call = await fire(service, message, stream=True)
        await until(lambda: generator.num_closed == 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert service.admission.running == 1, "the case did not occur"
        call.cancel()
        await until(lambda: service.is_idle)


async def test_half_of_many_leave_and_the_others_never_know() -> None:
    """Guards against a cancel that reaches a neighbour: answers are as without any."""
    async with whole(max_running=20) as service:
        expected = [generation(await answer(service, seeded(seed))) for seed in range(20)]
        tasks = [await held(service, seeded(seed)) for seed in range(20)]
        for task in tasks[::2]:
            task.cancel()
        await until(lambda: service.generator.gates["extend"].held == 10)
        service.generator.gates["extend"].open()
        replies = await asyncio.gather(*tasks[1::2])
        assert [generation(reply) for reply in replies] == expected[1::2]


# Backends that die


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(
    ("victim", "phase"),
    [("generator", "open"), ("generator", "extend"), ("generator", "prune"), ("reward", "score")],
)
async def test_a_backend_that_dies(service: Whole, victim: str, phase: str, stream: bool) -> None:
    """Guards against a hang, a wrong word for it, and a service that does not come back."""
    shut(service, phase)
    call = asyncio.create_task(answer(service, ask(), stream=stream))
    await until(lambda: num_held(service, phase) == 1)
    server = service.generator_server if victim == "generator" else service.reward_server
    await server.kill()
    error = await failure_of(call)
    assert error.code() is Code.UNAVAILABLE
    assert reason_of(error) == "UNAVAILABLE"
    assert retry_info_s(error) == 1.0
    assert trailer(error, "grpc-retry-pushback-ms") == "1000"
    await until(lambda: service.is_idle)
    assert (await refusal(service, ask())).code() is Code.UNAVAILABLE
    service.reward.gate.set()
    for gate in service.generator.gates.values():
        gate.open()
    await server.start()
    assert (await when_back(service, ask())).text


async def test_backends_that_were_never_there() -> None:
    """Guards against a bug where a service starts before those it needs."""
    async with whole() as service:
        await service.generator_server.kill()
        for call in (
            service.stub.Generate(ask()),
            service.stub.Describe(pb.OrchestratorServiceDescribeRequest()),
        ):
            error = await failure_of(call)
            assert error.code() is Code.UNAVAILABLE
            assert retry_info_s(error) == 1.0


async def test_a_generator_that_comes_back_with_another_model() -> None:
    """Guards against answers under the old model's fingerprint for ever."""
    async with whole(describe_every_s=0) as service:
        before = await answer(service, ask())
        service.generator.toy = type(service.generator.toy)(end_every=7)
        after = await answer(service, ask())
        assert before.fingerprints.generator != after.fingerprints.generator == "toy-7"
