"""Shadows run after the answer, change no request, and have the texts of a run without cuts.

Every test that uses `world()` ends with the invariant: nothing runs, waits or owns a slot.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.loop.run import run
from orchestrator.observe.shadows import Kind, Shadows, WatchedRun
from specrej.contracts import (
    Algorithm,
    Degradation,
    Finished,
    Generation,
    GenerationRequest,
    Sampling,
    Schedule,
    Selection,
    WeightedReward,
)
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator import calls
from tests.orchestrator.runs import PROMPT, SCHEDULES, LetterScorer
from tests.serving import until
from tests.world import (
    BOUND_S,
    Backend,
    HeldGenerator,
    World,
    generation,
    rewards,
    small_request,
    timeless,
    world,
)

KIND = Kind("geometric 16x2", "toy")


def watching(share: float = 1.0, **options: Any) -> Shadows:
    return Shadows(share, rng=random.Random(0), **options)


@pytest.fixture
async def service() -> AsyncIterator[World]:
    """A service that watches every request."""
    async with world(shadows=watching()) as service:
        yield service


def message(seed: int, **selection: Any) -> pb.GenerateRequest:
    """Of sixteen candidates, most of which grow past the first decision token."""
    return small_request(
        sampling={"max_tokens": 60, "seed": seed},
        selection={"n": 16, "return_candidates": 16} | selection,
        cache_control=pb.CACHE_CONTROL_BYPASS,
    )


async def answer(service: World, seed: int, **selection: Any) -> object:
    """The answer to a request, without times and its id."""
    return generation(await calls.answer(service, message(seed, **selection)))


async def ended(service: World) -> dict[Kind, int]:
    """The number of observed requests of every kind, once no shadow runs."""
    shadows = service.orchestrator._shadows
    await until(lambda: not shadows.tasks.num_running)
    return {kind: len(known.latest) for kind, known in shadows.statistics.items()}


async def answered_and_held(service: World, gate: str) -> None:
    """Answer a request, and hold its shadows at a gate of the generator."""
    gates = service.generator.gates
    call = await gates["close"].hold(service.answer(1))
    gates[gate].shut()
    gates["close"].open()
    await call
    await until(lambda: gates[gate].held == 1)


def request(seed: int, n: int, schedule: Schedule, alpha: float) -> GenerationRequest:
    selection = Selection(n, alpha, schedule, rewards=(WeightedReward("letters"),))
    return GenerationRequest(PROMPT, Sampling(max_tokens=60, seed=seed), selection)


SIXTEEN = request(5, 16, Schedule(), 0.5)


async def run_watched(request: GenerationRequest) -> tuple[WatchedRun, Generation]:
    """A watched request and its answer, in one process."""
    generator, scorers = ToyGenerator(), [LetterScorer("e")]
    watched = watching().watch(request, generator, scorers, "")
    assert watched
    *_, last = [event async for event in run(request, generator, scorers, on_round=watched.take)]
    assert isinstance(last, Finished)
    return watched, last.generation


# No request changes


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 24),
    alpha=st.sampled_from([0.1, 0.5, 0.9]),
    schedule=SCHEDULES,
    capacity=st.sampled_from([300, 900, 100_000]),
)
async def test_recording_changes_no_event_of_a_run(
    seed: int, n: int, alpha: float, schedule: Schedule, capacity: int
) -> None:
    """To the last token, round and slot, from ample room to hardly enough."""
    watched_request = request(seed, min(n, capacity // 64), schedule, alpha)
    watched = watching().watch(watched_request, ToyGenerator(), [], "")
    assert watched
    plain, recorded = [
        [
            timeless(event)
            async for event in run(
                watched_request, ToyGenerator(capacity), [LetterScorer("e")], on_round=on_round
            )
        ]
        for on_round in (None, watched.take)
    ]
    assert plain == recorded


async def test_neither_an_answer_nor_the_next_request_waits_for_shadows() -> None:
    """With one request at a time: the answer returns its permit."""
    async with world(shadows=watching(), max_running=1) as service:
        await answered_and_held(service, "prune")
        assert service.admission.running == 0
        await service.answer(2, algorithm=pb.ALGORITHM_BEST_OF_N)
        assert service.generator.gates["prune"].held == 1
        service.generator.gates["prune"].open()


# Their texts and scores


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 24),
    alpha=st.sampled_from([0.1, 0.5, 0.9]),
    schedule=SCHEDULES,
)
async def test_shadows_end_as_in_best_of_n(
    seed: int, n: int, alpha: float, schedule: Schedule
) -> None:
    """In text and scores, also at the decision tokens in between."""
    watched, answer = await run_watched(request(seed, n, schedule, alpha))
    assert watched.shadows.keys().isdisjoint(watched.ends)
    assert await watched.run_shadows(answer.n) == ""
    best_of_n, _ = await run_watched(request(seed, n, schedule, 0.0))
    decision_tokens = [token for token, _ in best_of_n.decisions]
    for number in watched.shadows:
        assert watched.ends[number] == best_of_n.ends[number]
        for (token, _), values in zip(watched.decisions, watched.partial[number], strict=False):
            assert best_of_n.partial[number][decision_tokens.index(token)] == values


async def test_shadows_of_several_requests_give_estimates(service: World) -> None:
    """Over the wire: requests in, a correlation per decision token and a regret out."""
    for seed in range(12):
        await service.answer(seed)
        assert await ended(service) == {KIND: seed + 1}
    known = service.orchestrator._shadows.statistics[KIND]
    correlations = known.correlations()
    assert list(correlations) == [16, 32]
    assert 0 < correlations[16] < correlations[32] < 1
    assert 0 <= known.regrets()[0][0] <= 1
    assert known.recommended_alpha() is None, "of twelve requests"


async def test_a_request_ranked_by_likelihood_has_shadows(service: World) -> None:
    """Although the likelihood is not one of the reward service's rewards."""
    await service.answer(3, **rewards(("likelihood", 1.0)))
    assert await ended(service) == {KIND._replace(reward="likelihood"): 1}


async def test_an_answer_without_rewards_has_no_shadows(service: World) -> None:
    """Guards against load while a reward is away, and estimates of another ranking."""
    await service.reward_server.kill()
    wanted = message(3)
    wanted.allow_degraded = True
    assert (await calls.answer(service, wanted)).degraded
    assert not any((await ended(service)).values())


# A share of the requests, within bounds


def test_a_share_of_the_requests_is_watched() -> None:
    """Best-of-N, which rejects no candidate, is never watched."""
    plain = request(0, 8, Schedule(), 0.5)
    best_of_n = replace(plain, selection=replace(plain.selection, algorithm=Algorithm.BEST_OF_N))
    for share, wanted, low, high in (
        (0.25, plain, 400, 600),
        (0.0, plain, 0, 0),
        (1.0, best_of_n, 0, 0),
    ):
        shadows = watching(share)
        runs = [shadows.watch(wanted, ToyGenerator(), [], "") for _ in range(2000)]
        assert low <= len([run for run in runs if run]) <= high


async def test_which_answers_get_shadows() -> None:
    """Guards against a load that grows with the share, and biased estimates.

    The candidates of a weaker answer were rejected by the deadline or a failure. Without room for
    the shadows of all rounds, none runs.
    """
    generator = HeldGenerator()
    generator.gates["extend"].shut()
    watched, answer = await run_watched(SIXTEEN)
    watched = replace(watched, generator=generator)
    num_slots = answer.usage.prompt_tokens + 60 * len(watched.shadows)
    tight, shadows = watching(max_slots=num_slots - 1), watching(max_slots=num_slots)
    tight.follow(watched, answer, is_busy=False)
    shadows.follow(watched, answer, is_busy=True)
    shadows.follow(watched, replace(answer, hurried=True), is_busy=False)
    shadows.follow(watched, replace(answer, degradations=(Degradation.REWARD,)), is_busy=False)
    assert shadows.tasks.num_running == tight.tasks.num_running == 0
    for _ in range(3):
        shadows.follow(watched, answer, is_busy=False)
        await until(lambda: generator.gates["extend"].held == 1)
    assert generator.num_opened == shadows.tasks.num_running == 1
    await shadows.tasks.aclose()
    assert generator.is_idle


async def test_no_shadow_starts_while_requests_wait() -> None:
    async with world(shadows=watching(), max_running=1) as service:
        gate = service.generator.gates["extend"]
        first = await gate.hold(service.answer(1))
        second = asyncio.ensure_future(service.answer(2))
        await until(lambda: service.admission.queued == 1)
        gate.open()
        await asyncio.gather(first, second)
        await ended(service)
        # Two requests, and shadows of the second alone.
        assert service.generator.num_opened == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # One shadow may end, the other not.
        ({"generator": HeldGenerator(4 + 60)}, "slots"),
        # Other texts occur where a batch of another shape changes the last bits of a logit.
        ({"request": request(6, 16, Schedule(), 0.5)}, "changed"),
    ],
)
async def test_shadows_that_stop_or_differ_give_up(change: dict[str, Any], reason: str) -> None:
    """Guards against a sample without one of its rounds, or of another request."""
    runs = [await run_watched(SIXTEEN) for _ in range(2)]
    one, other = (replace(watched, **change) for watched, _ in runs)
    assert len(one.shadows) > 1
    assert await one.run_shadows(16) == reason
    shadows = watching()
    assert shadows.watch(other.request, other.generator, [], "")
    await shadows.learn_from(other, 16)
    assert not shadows.statistics[Kind.of(other.request)].latest


async def test_shadows_share_prompt_prefixes_within_their_tenant(service: World) -> None:
    await calls.answer(service, message(1), tenant="acme")
    await until(lambda: len(service.generator.salts) == 2)
    assert len(set(service.generator.salts)) == 1


# Failures


async def test_a_cancelled_request_has_no_shadows(service: World) -> None:
    call = await service.held(message(1))
    call.cancel()
    service.generator.gates["extend"].open()
    await until(lambda: service.is_idle)
    assert service.generator.num_opened == 1


@pytest.mark.parametrize("gate", ["extend", "prune"])
async def test_closing_the_orchestrator_ends_shadows_and_frees_their_slots(
    service: World, gate: str
) -> None:
    """In the middle of a step or a cut; `world()` checks that all is free."""
    await answered_and_held(service, gate)
    assert service.generator.toy.ledger.num_sessions == 1
    async with asyncio.timeout(BOUND_S):
        await service.orchestrator.aclose()
    assert not service.orchestrator._shadows.tasks.num_running
    await until(lambda: not service.generator.toy.ledger.owned)
    service.generator.gates[gate].open()


@pytest.mark.parametrize("backend", ["generator_server", "reward_server"])
async def test_a_lost_backend_ends_shadows_only(service: World, backend: str) -> None:
    """The next request is answered after its return, and has shadows of its own."""
    server: Backend = getattr(service, backend)
    await answered_and_held(service, "extend")
    await server.kill()
    service.generator.gates["extend"].open()
    assert await ended(service) == {KIND: 0}
    await server.start()
    await until(lambda: service.generator.is_idle)
    await calls.answer_when_available(service, message(2))
    assert await ended(service) == {KIND: 1}
