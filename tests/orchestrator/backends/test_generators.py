"""Several generators as one: sessions find a place, and requests survive the loss of one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from orchestrator.backends.generators import together
from orchestrator.cache import Secret
from orchestrator.edge.planning import Planner
from orchestrator.loop.scoring import LikelihoodScorer
from specrej import contracts as c
from specrej.contracts.errors import Overloaded, Unavailable
from specrej.security import Share
from tests.orchestrator.backends.fleets import PATIENT, QUICK, generators, request, target_of
from tests.orchestrator.runs import PROMPT, FaultyGenerator, answer, events_of
from tests.serving import until
from tests.world import BOUND_S, HeldGenerator

SAMPLING = c.Sampling(max_tokens=32, seed=7)
SCORER = LikelihoodScorer()
UNUSED_REWARDS: Any = SimpleNamespace(describe=None)  # of a request by likelihood


def content(generation: c.Generation) -> list[object]:
    """All that the loss of a generator must not change."""
    rounds = [
        (trace.decision_token, trace.num_live, trace.num_finished, trace.candidates, trace.forks)
        for trace in generation.rounds
    ]
    return [generation.candidates, rounds, generation.usage]


def holder(toys: Sequence[HeldGenerator]) -> int:
    """The index of the one that has a session."""
    (index,) = [index for index, toy in enumerate(toys) if toy.toy.ledger.num_sessions]
    return index


@pytest.mark.parametrize(
    ("verb", "rounds_before", "branching"),
    [
        ("extend", 0, None),
        ("extend", 2, c.Branching(8, 2)),
        ("prune", 0, c.Branching(8, 2)),
        ("prune", 2, None),
    ],
)
async def test_an_answer_does_not_change_if_its_generator_is_lost(
    verb: str, rounds_before: int, branching: c.Branching | None
) -> None:
    """Token for token, forks included; the events begin again."""
    of_twelve = request(12, branching=branching)
    undisturbed = await answer(of_twelve, ToyGenerator(), SCORER)
    assert bool(undisturbed.rounds[0].forks) == bool(branching)
    toys = [HeldGenerator(), HeldGenerator()]
    for toy in toys:
        toy.gates[verb].shut()
    async with generators(*toys) as running:
        answering = asyncio.ensure_future(events_of(of_twelve, running.client, SCORER))
        await until(lambda: any(toy.toy.ledger.num_sessions for toy in toys))
        lost = holder(toys)
        gate = toys[lost].gates[verb]
        toys[1 - lost].gates[verb].open()
        for _ in range(rounds_before):
            await gate.let_one()
        await until(lambda: gate.held == 1)
        await running.servers[lost].kill()
        *events, finished = await answering
        assert toys[1 - lost].is_idle
    assert isinstance(finished, c.Finished)
    assert content(finished.generation) == content(undisturbed)
    assert not finished.generation.degraded
    assert finished.generation.generator_fingerprint == "toy-40"
    first, again = [at for at, event in enumerate(events) if isinstance(event, c.Admitted)]
    assert (first, events[again]) == (0, events[0])
    rounds = [event.trace for event in events[again + 1 :] if isinstance(event, c.RoundCompleted)]
    assert tuple(rounds) == finished.generation.rounds


@pytest.mark.parametrize("makes_whole_answers", [False, True])
async def test_whole_answers_that_failed_are_not_paid_for_again(
    makes_whole_answers: bool,
) -> None:
    """Guards against all N requests to an endpoint, sent again because one of them failed."""
    toys = [HeldGenerator() for _ in range(2)]
    for toy in toys:
        toy.toy = FaultyGenerator(breaks_at=0)  # its port answers, with Unavailable
        if makes_whole_answers:
            toy.form = c.CandidateForm.WHOLE_ANSWERS
    async with generators(*toys) as running:
        with pytest.raises(Unavailable):
            await answer(request(8), running.client, SCORER)
    num_opened = sorted(toy.num_opened for toy in toys)
    assert num_opened == ([0, 1] if makes_whole_answers else [1, 1])


class LateGenerator(HeldGenerator):
    """A toy that is not ready at its first report."""

    is_ready = False

    async def describe(self) -> c.GeneratorDescription:
        if not self.is_ready:
            raise Unavailable("the model is loading")
        return await super().describe()


async def test_a_session_may_begin_before_its_generator_is_described() -> None:
    """Guards against an internal error at the first cut, as while generators are restarted."""
    toy, once = LateGenerator(), replace(PATIENT, report_s=60)
    async with generators(toy, num_listed=0, settings=once) as running:
        running.resolver.targets = frozenset(map(target_of, running.servers))
        await until(lambda: running.counts == (0, 0, 1))
        await running.fleet.wait_heard()
        toy.is_ready = True
        spec = c.SessionSpec(PROMPT, 4, replace(SAMPLING, ignore_eos=True), 8)
        async with running.client.open(spec) as session:
            await session.extend(8)
            assert (await session.prune([0, 1], {4: 0})).refused == ()
            assert {made.id for made in (await session.extend(16)).candidates} == {0, 1, 4}


async def test_a_silent_generator_is_lost() -> None:
    """Guards against requests that wait for a stopped process until their deadline."""
    undisturbed = await answer(request(6), ToyGenerator(), SCORER)
    toys = [HeldGenerator(), HeldGenerator()]
    async with generators(*toys, settings=QUICK) as running:
        for toy in toys:
            toy.gates["extend"].shut()
        answering = asyncio.ensure_future(answer(request(6), running.client, SCORER))
        await until(lambda: any(toy.gates["extend"].held for toy in toys))
        silent = toys.pop(holder(toys))
        toys[0].gates["extend"].open()
        silent.gates["describe"].shut()
        answered = await asyncio.wait_for(answering, BOUND_S)
        assert content(answered) == content(undisturbed)
        await until(lambda: running.counts == (1, 0, 1))
        silent.gates["describe"].open()
        silent.gates["extend"].open()
        await until(lambda: running.counts == (2, 0, 0) and silent.is_idle and toys[0].is_idle)


@pytest.mark.parametrize("n", [4, 0])
async def test_a_generator_with_room_precedes_one_with_fewer_sessions(n: int) -> None:
    """Guards against waiting behind one large session while three small ones leave room, and
    against fewer candidates where their number is left open."""
    full, roomy = (HeldGenerator(1000, end_every=10**6) for _ in range(2))
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(
            full.toy.open(c.SessionSpec(PROMPT, 30, SAMPLING, 32))
        )
        await large.extend(31)
        for _ in range(3):
            await stack.enter_async_context(roomy.toy.open(c.SessionSpec(PROMPT, 1, SAMPLING, 4)))
        running = await stack.enter_async_context(generators(full, roomy))
        async with running.client.open(c.SessionSpec(PROMPT, n, SAMPLING, 32)):
            assert (full.num_opened, roomy.num_opened) == (0, 1)


async def test_an_idle_generator_precedes_a_busy_one_with_the_same_prompt() -> None:
    """Guards against idle replicas because all prompts begin in the same way."""
    toys = [HeldGenerator(200), HeldGenerator(200)]
    async with (
        generators(*toys) as running,
        running.client.open(c.SessionSpec(PROMPT, 2, SAMPLING, 4)),
    ):
        await until(lambda: not any(backend.placed for backend in running.fleet.members()))
        async with running.client.open(c.SessionSpec(PROMPT, 2, SAMPLING, 4)):
            assert [toy.toy.ledger.num_sessions for toy in toys] == [1, 1]
            with pytest.raises(Overloaded):  # one alone would have the room
                async with running.client.open(c.SessionSpec(PROMPT, 6, SAMPLING, 32)):
                    pass


async def test_the_description_adds_the_capacities() -> None:
    """Guards against a request that the generator of the smaller context refuses."""
    described = [
        replace(await ToyGenerator(slots).describe(), context_tokens=tokens, vocabulary=slots)
        for slots, tokens in ((200, 8000), (300, 4000))
    ]
    description = together(described)
    assert description.vocabulary == 200
    assert (description.slots.capacity, description.session_slots) == (500, 300)
    assert description.max_candidates == described[0].max_candidates
    assert description.context_tokens == 4000
    formats = [replace(one, tool_format="json") for one in described]
    assert together(formats).tool_format == "json"
    none = replace(described[1], tool_format="")
    assert together([formats[0], none]).tool_format == ""


class NamedGenerator(HeldGenerator):
    """A toy under another model's name."""

    async def describe(self) -> c.GeneratorDescription:
        return replace(await super().describe(), model="new")


async def test_a_request_that_names_a_model_goes_to_its_generators() -> None:
    """Guards a rollout of a model with a new name against answers of the other model."""
    toys = {"toy": HeldGenerator(), "new": NamedGenerator()}
    async with generators(*toys.values()) as running:
        await until(lambda: running.counts == (2, 0, 0))
        assert {*(await running.client.describe()).adapters} == {*toys}
        for number in range(4):
            for name, toy in toys.items():
                prompt, num_opened = c.Prompt.from_user(str(number)), toy.num_opened
                async with running.client.open(c.SessionSpec(prompt, 1, SAMPLING, 4, "", name)):
                    assert toy.num_opened == num_opened + 1
        assert not any(toys["toy"].opened_adapters)


async def test_a_request_starts_again_at_a_generator_of_the_same_version() -> None:
    """Guards against UNAVAILABLE after a text was sent: that of another version differs."""
    toys = [HeldGenerator(end_every=end) for end in (40, 30, 30, 30, 40)]
    for toy in toys:
        toy.gates["extend"].shut()
    async with generators(*toys, num_listed=1) as running:
        answering = asyncio.ensure_future(answer(request(), running.client, SCORER))
        await until(lambda: toys[0].gates["extend"].held == 1)
        running.resolver.targets = frozenset(map(target_of, running.servers))
        await until(lambda: sum(running.counts[:2]) == len(toys))
        for toy in toys[1:]:
            toy.gates["extend"].open()
        await running.servers[0].kill()
        assert (await answering).generator_fingerprint == "toy-40"


async def test_a_request_is_charged_for_one_generator() -> None:
    """Guards against a charge for slots of all generators, of which it uses those of one."""

    async def charged(generator: Any, n: int) -> int:
        selection = c.Selection(n, rewards=(c.WeightedReward("likelihood"),))
        asked = c.GenerationRequest(PROMPT, c.Sampling(max_tokens=64), selection)
        planner = Planner(generator, UNUSED_REWARDS, secret=Secret())
        return (await planner.plan(asked, "", Share(), (), math.inf)).candidate_tokens

    small, large = HeldGenerator(200), HeldGenerator(300)
    async with generators(small, large) as running:
        for n in (0, 32):
            assert await charged(running.client, n) == await charged(large, n)


@pytest.mark.parametrize(
    ("small", "n", "max_opened"),
    [
        (HeldGenerator(max_candidates=8), 9, 1),  # refused before it opens
        (HeldGenerator(30), 6, 2),
        (HeldGenerator(4 + 3 * 32), 9, 2),
    ],
)
async def test_a_refusal_of_a_small_generator_does_not_decide_for_a_large_one(
    small: HeldGenerator, n: int, max_opened: int
) -> None:
    """In either order of the two, and with either refusal."""
    large = HeldGenerator(4 + 9 * 32)
    async with generators(small, large) as running:
        for number in range(6):  # all meet at the same first one with a chance of 1 in 32
            prompt = c.Prompt.from_user(f"{number} of four words")
            other_prompt = replace(request(n, c.Schedule("tokens", tokens=(32,))), prompt=prompt)
            small.num_opened = large.num_opened = 0
            assert (await answer(other_prompt, running.client, SCORER)).n == n
            assert small.num_opened + large.num_opened <= max_opened
            await until(lambda: small.is_idle and large.is_idle)


async def test_a_busy_large_generator_is_overloaded_although_a_small_one_refuses() -> None:
    """Guards against INVALID_ARGUMENT, which a client does not retry."""
    async with (
        generators(HeldGenerator(4 + 3 * 32), HeldGenerator(4 + 9 * 32)) as running,
        running.client.open(c.SessionSpec(PROMPT, 9, SAMPLING, 32)),
    ):
        for number in range(4):
            prompt = c.Prompt.from_user(f"{number} a b c")
            with pytest.raises(Overloaded):
                async with running.client.open(c.SessionSpec(prompt, 9, SAMPLING, 32)):
                    pass
