"""Shadows run after the answer: nobody is to notice them, and they are who they would have been.

Every test that uses `whole()` ends with the invariant: nothing runs, waits, flies or owns a slot.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel
from orchestrator.shadow import Kind, Notes, ended_in_run
from orchestrator.shadowing import Shadows, Watched, _ended, _GivenUp
from specrej import wire
from specrej.contracts import (
    Degradation,
    Event,
    Finished,
    Generation,
    GenerationRequest,
    Prompt,
    Sampling,
    Schedule,
    Scorer,
    Selection,
    WeightedReward,
)
from specrej.v1 import common_pb2
from specrej.v1 import orchestrator_pb2 as pb
from tests.orchestrator.services import (
    BOUND_S,
    HeldGenerator,
    Whole,
    timeless,
    timeless_answer,
    whole,
)
from tests.orchestrator.test_run import SCHEDULES, LetterScorer
from tests.serving import until

PROMPT = Prompt.from_user("four words of prompt")
KIND = Kind("geometric 16x2", "toy")


def watching(share: float = 1.0, **options: Any) -> Shadows:
    return Shadows(share, rng=random.Random(0), **options)


def ask(seed: int, **selection: Any) -> pb.GenerateRequest:
    """Of sixteen candidates, most of which get beyond the first decision token."""
    return pb.GenerateRequest(
        prompt=common_pb2.Prompt(text="four words of prompt"),
        sampling=common_pb2.Sampling(max_tokens=60, seed=seed),
        selection=pb.Selection(**{"n": 16, "return_candidates": 16} | selection),
        cache_control=pb.CACHE_CONTROL_BYPASS,
    )


async def answer(service: Whole, seed: int, **selection: Any) -> object:
    reply = await service.stub.Generate(ask(seed, **selection), timeout=BOUND_S)
    return timeless_answer(wire.generation_from_wire(reply))


async def settled(shadows: Shadows) -> None:
    await until(lambda: not shadows.num_running)


def request(seed: int, n: int, schedule: Schedule, alpha: float) -> GenerationRequest:
    selection = Selection(n, alpha, schedule, rewards=(WeightedReward("letters"),))
    return GenerationRequest(PROMPT, Sampling(max_tokens=60, seed=seed), selection)


# Nobody notices


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 24),
    alpha=st.sampled_from([0.1, 0.5, 0.9]),
    schedule=SCHEDULES,
    capacity=st.sampled_from([300, 900, 100_000]),
)
async def test_the_events_of_a_run_are_the_same_with_and_without_notes(
    seed: int, n: int, alpha: float, schedule: Schedule, capacity: int
) -> None:
    """To the last token, round and slot, from ample room to hardly enough."""
    wanted = request(seed, min(n, capacity // 64), schedule, alpha)
    plain, noted = [
        await _timeless_events(wanted, ToyGenerator(capacity), LetterScorer("e"), notes)
        for notes in (None, Notes(random.Random(seed)))
    ]
    assert plain == noted


async def _timeless_events(
    wanted: GenerationRequest, generator: ToyGenerator, scorer: Scorer, notes: Notes | None
) -> list[Event]:
    return [timeless(event) async for event in run(wanted, generator, scorer, notes=notes)]


@pytest.mark.parametrize(
    "schedule",
    [pb.Schedule(), pb.Schedule(tokens=pb.TokensSchedule(decision_tokens=[4, 9, 30]))],
    ids=["geometric", "tokens"],
)
async def test_answers_are_the_same_with_and_without_shadows(schedule: pb.Schedule) -> None:
    """Over the wire, one after the other and ten at once, while others' shadows run."""
    shadows = watching()
    async with whole() as plain, whole(shadows=shadows) as shadowed:
        expected = [await answer(plain, seed, schedule=schedule) for seed in range(10)]
        for seed in range(10):
            assert await answer(shadowed, seed, schedule=schedule) == expected[seed]
        calls = (answer(shadowed, seed, schedule=schedule) for seed in range(10))
        assert await asyncio.gather(*calls) == expected
        await settled(shadows)
        assert shadowed.generator.num_opened > 20, "no shadow has run"


async def test_answers_are_the_same_where_full_slots_end_rounds() -> None:
    """A request's own shadows take no slots from it: they come after it."""
    shadows, memory = watching(), pb.Schedule(memory=pb.MemorySchedule())
    async with (
        whole(HeldGenerator(400)) as plain,
        whole(HeldGenerator(400), shadows=shadows) as shadowed,
    ):
        for seed in range(10):
            expected = await answer(plain, seed, schedule=memory)
            assert await answer(shadowed, seed, schedule=memory) == expected
            await settled(shadows)
        assert shadowed.generator.num_opened > 10, "no shadow has run"
        assert dict(shadows.statistics.correlations(Kind("memory", "toy")))


async def test_neither_an_answer_nor_the_next_request_waits_for_shadows() -> None:
    """Though one request runs at a time: its turn is given back with its answer."""
    async with whole(shadows=watching(), max_running=1) as service:
        await answered_and_held(service, "prune")
        assert service.admission.running == 0
        await answer(service, 2, algorithm=pb.ALGORITHM_BEST_OF_N)
        assert service.generator.gates["prune"].held == 1
        service.generator.gates["prune"].open()


async def answered_and_held(service: Whole, gate: str) -> None:
    """A request is answered, and its shadows stand at a gate of the generator."""
    gates = service.generator.gates
    gates["close"].shut()
    asked = asyncio.ensure_future(answer(service, 1))
    await until(lambda: gates["close"].held == 1)
    gates[gate].shut()
    gates["close"].open()
    await asked
    await until(lambda: gates[gate].held == 1)


# They are who they would have been


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(2, 24),
    alpha=st.sampled_from([0.1, 0.5, 0.9]),
    schedule=SCHEDULES,
)
async def test_shadows_end_as_they_do_in_best_of_n(
    seed: int, n: int, alpha: float, schedule: Schedule
) -> None:
    """In what they say and what they are worth, also at the decision tokens in between."""
    watched, generation = await ran(request(seed, n, schedule, alpha))
    ended = await _ended(watched, generation.n)
    wanted = request(seed, n, schedule, 0.0)
    all_ = Notes(random.Random(0))
    async for _ in run(wanted, ToyGenerator(), LetterScorer("e"), notes=all_):
        pass
    assert len(ended) == len(watched.notes.shadows)
    partial = {decision.token: decision.values for decision in all_.decisions}
    for shadow in ended:
        assert shadow.end == all_.ends[shadow.id]
        tokens = [decision.token for decision in watched.notes.decisions]
        for token, values in zip(tokens, shadow.partial, strict=False):
            assert partial[token][shadow.id] == values
    assert {each.id for each in ended}.isdisjoint(e.id for e in ended_in_run(watched.notes))


async def ran(wanted: GenerationRequest) -> tuple[Watched, Generation]:
    """A watched request and its answer, in one process."""
    generator, panel = ToyGenerator(), Panel([LetterScorer("e")])
    watched = watching().watch(wanted, generator, panel, "")
    assert watched
    *_, last = [event async for event in run(wanted, generator, panel, notes=watched.notes)]
    assert isinstance(last, Finished)
    return watched, last.generation


async def test_what_they_say_is_put_together() -> None:
    """Over the wire: requests in, a correlation per decision token and a regret out."""
    shadows = watching()
    async with whole(shadows=shadows) as service:
        for seed in range(12):
            await answer(service, seed)
            await settled(shadows)
        known = shadows.statistics
        assert known.kinds == [KIND]
        correlations = dict(known.correlations(KIND))
        assert list(correlations) == [16, 32]
        assert 0 < correlations[16] < correlations[32] < 1
        assert 0 <= known.regret(KIND).value <= 1
        assert known.recommended_alpha(KIND) is None, "of twelve requests"


async def test_the_likelihood_has_shadows_too() -> None:
    """Though no reward service knows it."""
    shadows = watching()
    async with whole(shadows=shadows) as service:
        await answer(service, 3, rewards=[pb.WeightedReward(name="likelihood", weight=1.0)])
        await settled(shadows)
        assert [kind.reward for kind in shadows.statistics.kinds] == ["likelihood"]


# A share of the requests, within bounds


async def test_the_share_is_kept() -> None:
    watch = watching(0.25).watch
    wanted = request(0, 8, Schedule(), 0.5)
    panel = Panel([LikelihoodScorer()])
    kept = sum(watch(wanted, ToyGenerator(), panel, "") is not None for _ in range(2000))
    assert 0.2 < kept / 2000 < 0.3
    none = Shadows(0.0)
    assert not any(none.watch(wanted, ToyGenerator(), panel, "") for _ in range(100))


async def test_best_of_n_rejects_nobody_and_is_not_watched() -> None:
    shadows = watching()
    async with whole(shadows=shadows) as service:
        await answer(service, 1, algorithm=pb.ALGORITHM_BEST_OF_N)
        assert service.generator.num_opened == 1
        assert not shadows.statistics.kinds


async def test_shadows_that_need_too_many_slots_are_not_run() -> None:
    """Two of 60 tokens and a prompt of four: all or none, a part would bias what they say."""
    for max_slots, num_opened in ((4 + 2 * 60, 2), (4 + 2 * 60 - 1, 1)):
        shadows = watching(max_slots=max_slots)
        async with whole(HeldGenerator(end_every=10**9), shadows=shadows) as service:
            await answer(service, 1)
            await settled(shadows)
            assert service.generator.num_opened == num_opened
            assert bool(shadows.statistics.kinds) is (num_opened == 2)


async def test_those_of_one_request_run_at_a_time() -> None:
    """Guards against a load that grows with the share."""
    shadows, generator = watching(), HeldGenerator()
    generator.gates["extend"].shut()
    for _ in range(3):
        watched, generation = await ran(request(5, 16, Schedule(), 0.5))
        shadows.follow(replace(watched, generator=generator), generation, is_busy=False)
        await until(lambda: generator.gates["extend"].held == 1)
    assert generator.num_opened == shadows.num_running == 1
    await shadows.aclose()
    assert generator.is_idle


async def test_nothing_is_run_while_callers_wait() -> None:
    shadows, generator = watching(), HeldGenerator()
    async with whole(generator, shadows=shadows, max_running=1) as service:
        generator.gates["extend"].shut()
        first = asyncio.ensure_future(answer(service, 1))
        await until(lambda: generator.gates["extend"].held == 1)
        second = asyncio.ensure_future(answer(service, 2))
        await until(lambda: service.admission.queued == 1)
        generator.gates["extend"].open()
        await asyncio.gather(first, second)
        await settled(shadows)
        # Two requests, and shadows of the second alone.
        assert generator.num_opened == 3


async def test_an_answer_that_was_hurried_or_degraded_says_nothing() -> None:
    """What the deadline or a failure rejected is not the reward's doing."""
    shadows, generator = watching(), HeldGenerator()
    watched, generation = await ran(request(5, 16, Schedule(), 0.5))
    watched = replace(watched, generator=generator)
    for weaker in ({"hurried": True}, {"degradations": (Degradation.REWARD,)}):
        shadows.follow(watched, replace(generation, **weaker), is_busy=False)
        assert not shadows.num_running
    shadows.follow(watched, generation, is_busy=False)
    await settled(shadows)
    assert generator.num_opened == 1


async def test_shadows_that_slots_stop_are_given_up() -> None:
    """One may end, the other not: guards against a sample without one of its rounds."""
    watched, generation = await ran(request(5, 16, Schedule(), 0.5))
    assert len(watched.notes.shadows) > 1
    cramped = replace(watched, generator=HeldGenerator(4 + 60))
    with pytest.raises(_GivenUp, match="slots"):
        await _ended(cramped, generation.n)


async def test_shadows_share_prompts_with_their_own_tenant_alone() -> None:
    async with whole(shadows=watching()) as service:
        metadata = (("specrej-tenant", "ours"),)
        await service.stub.Generate(ask(1), metadata=metadata, timeout=BOUND_S)
        await until(lambda: len(service.generator.salts) == 2)
        assert len(set(service.generator.salts)) == 1


# However they end, nothing is left


async def test_a_cancelled_request_has_no_shadows() -> None:
    shadows, generator = watching(), HeldGenerator()
    async with whole(generator, shadows=shadows) as service:
        generator.gates["extend"].shut()
        asked = service.stub.Generate(ask(1), timeout=BOUND_S)
        await until(lambda: generator.gates["extend"].held == 1)
        asked.cancel()
        generator.gates["extend"].open()
        await until(lambda: service.is_idle)
        assert generator.num_opened == 1 and not shadows.num_running


@pytest.mark.parametrize("gate", ["extend", "prune"])
async def test_closing_the_orchestrator_ends_shadows_and_frees_their_slots(gate: str) -> None:
    """In the middle of a step or a cut; `whole()` checks that all is free."""
    shadows, generator = watching(), HeldGenerator()
    async with whole(generator, shadows=shadows) as service:
        await answered_and_held(service, gate)
        assert generator.toy.ledger.num_sessions == 1
        async with asyncio.timeout(BOUND_S):
            await service.orchestrator.aclose()
        assert not shadows.num_running
        await until(lambda: not generator.toy.ledger.owned)
        generator.gates[gate].open()


@pytest.mark.parametrize("backend", ["generator", "reward"])
async def test_a_backend_that_dies_under_shadows_is_nobodys_trouble(backend: str) -> None:
    """It ends them; the next request finds it back and is answered, with shadows of its own."""
    shadows, generator = watching(), HeldGenerator()
    async with whole(generator, shadows=shadows) as service:
        await answered_and_held(service, "extend")
        server = service.generator_server if backend == "generator" else service.reward_server
        await server.kill()
        generator.gates["extend"].open()
        await settled(shadows)
        assert not shadows.statistics.kinds
        await server.start()
        await until(lambda: service.generator.is_idle)
        await answer(service, 2)
        await settled(shadows)
        assert shadows.statistics.kinds == [KIND]


async def test_a_generator_that_says_something_else_is_not_believed() -> None:
    """As where a batch of another shape changes the last bits: the draw falls the other way."""

    class Forgetful(HeldGenerator):
        """Every session's candidates say something else."""

        def open(self, prompt: Prompt, n: int, sampling: Sampling, *rest: Any) -> Any:
            seed = sampling.seed + 1000 * self.num_opened
            return super().open(prompt, n, replace(sampling, seed=seed), *rest)

    shadows = watching()
    async with whole(Forgetful(), shadows=shadows) as service:
        await answer(service, 1)
        await settled(shadows)
        assert service.generator.num_opened == 2
        assert not shadows.statistics.kinds
