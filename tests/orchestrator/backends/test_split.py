"""Requests too large for one generator: parts at several generators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.backends.split import SplitSession, shares_of
from orchestrator.loop.progress import WithinRounds
from specrej.contracts import (
    Branching,
    Candidate,
    Degradation,
    FinishReason,
    Generation,
    GenerationRequest,
    Round,
    RoundEnd,
    Sampling,
    Schedule,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import InternalError, InvalidRequest, Unavailable
from tests.orchestrator.backends.fleets import ONCE, generators, request
from tests.orchestrator.backends.test_generators import SAMPLING, SCORER, content
from tests.orchestrator.runs import NEVER, PROMPT, FaultyGenerator, FixedScorer, answer
from tests.orchestrator.services import HeldGenerator
from tests.serving import until

IN_ONE_ROUND = Schedule(first=32)


async def test_parts_give_the_answer_of_one_generator() -> None:
    """Two generators of half the slots each generate what one with all of them would."""
    large = request(24, Schedule("tokens", tokens=(16,)))
    undivided = await answer(large, ToyGenerator(4 + 24 * 24), SCORER)
    toys = [HeldGenerator(4 + 12 * 24), HeldGenerator(4 + 12 * 24)]
    async with generators(*toys) as running:
        divided = await answer(large, running.client, SCORER)
        assert divided.n == 24
        assert content(divided) == content(undivided)
        assert divided.usage.generated_tokens == undivided.usage.generated_tokens
        assert divided.generator_fingerprint == "toy-40"
        await until(lambda: all(toy.is_idle for toy in toys))
        # One of them refused the whole before it came in two parts.
        assert sum(toy.num_opened for toy in toys) == 3


async def test_a_part_that_sends_candidates_of_another_is_an_error() -> None:
    """Guards against an answer with a text that another generator made up."""

    class Foreign:
        n, prompt_tokens = 2, 3

        async def extend(self, until_tokens: int) -> Round:
            candidate = Candidate(0, "", 1, 0.0, FinishReason.STOP)
            return Round((candidate,), RoundEnd.ALL_FINISHED, 1, SlotGauge(1, 0, 0))

    async with ToyGenerator().open(SessionSpec(PROMPT, 2, Sampling(), 4)) as toy:
        session = SplitSession(cast(Any, [(0, toy), (2, Foreign())]))
        with pytest.raises(InternalError, match="1 candidates of others"):
            await session.extend(4)


@pytest.mark.parametrize("branching", [None, Branching(6, 2)], ids=["plain", "branching"])
async def test_the_candidate_limits_of_all_generators_add_up(branching: Branching | None) -> None:
    """Forks are where their parents are, with the ids and tokens of one generator."""
    of_twelve = request(12, branching=branching)
    undivided = await answer(of_twelve, ToyGenerator(), SCORER)
    assert bool(undivided.rounds[0].forks) == bool(branching)
    toys = [HeldGenerator(max_candidates=8) for _ in range(2)]
    async with generators(*toys) as running:
        assert content(await answer(of_twelve, running.client, SCORER)) == content(undivided)
        with pytest.raises(InvalidRequest) as raised:
            await answer(request(17), running.client, SCORER)
    assert raised.value.metadata == {"candidates": "16"}


async def test_a_part_needs_no_more_answers_than_it_has_candidates() -> None:
    """Guards a valid request against the refusal of a part."""
    twelve = request(12, min_answers=10)
    async with generators(*(HeldGenerator(max_candidates=8) for _ in range(2))) as running:
        generation = await answer(twelve, running.client, SCORER)
    assert sum(c.finish is not None for c in generation.candidates) >= 10


async def test_a_request_beyond_all_slots_is_invalid() -> None:
    async with generators(HeldGenerator(100), HeldGenerator(100)) as running:
        with pytest.raises(InvalidRequest) as raised:
            await answer(request(24, IN_ONE_ROUND), running.client, SCORER)
    assert raised.value.reason == "SLOTS_EXCEEDED"
    assert raised.value.metadata == {"candidates": str(2 * (96 // 32))}


async def test_a_request_that_needs_an_absent_generator_is_unavailable() -> None:
    """Guards against INVALID_ARGUMENT, which a client does not retry."""
    toys = [HeldGenerator(100) for _ in range(3)]
    async with generators(*toys, settings=ONCE) as running:
        await running.servers[2].kill()
        running.fleet.members()[2].suspect(Unavailable("away"))
        with pytest.raises(Unavailable):
            await answer(request(8, IN_ONE_ROUND), running.client, SCORER)
        with pytest.raises(InvalidRequest):  # too large for all three
            await answer(request(10, IN_ONE_ROUND), running.client, SCORER)


@pytest.mark.parametrize("num_slow", [1, 2])
async def test_generators_that_were_slow_are_polled_again(num_slow: int) -> None:
    """Guards against requests refused because of one late description."""
    async with generators(HeldGenerator(100), HeldGenerator(100), settings=ONCE) as running:
        for backend in running.fleet.members()[:num_slow]:
            backend.suspect(Unavailable("no answer"))
        assert (await answer(request(6, IN_ONE_ROUND), running.client, SCORER)).n == 6


@pytest.mark.parametrize("is_small_first", [False, True])
async def test_parts_without_room_are_closed_before_others_are_opened(is_small_first: bool) -> None:
    """Guards against a request that waits for slots which it holds itself."""
    toys = [HeldGenerator(max_candidates=8) for _ in range(2)]
    async with generators(*toys) as running:
        # Parts are opened in the order of addresses.
        capacities = [4 + 3 * 32, 4 + 8 * 32][:: 1 if is_small_first else -1]
        pairs = zip(running.servers, toys, strict=True)
        by_port = sorted(pairs, key=lambda pair: str(pair[0].port))
        for (_, toy), capacity in zip(by_port, capacities, strict=True):
            toy.toy = ToyGenerator(capacity)
        described = running.fleet.descriptions
        await until(lambda: [one.slots.capacity for one in described()] == capacities)
        assert (
            await answer(request(10, Schedule("tokens", tokens=(32,))), running.client, SCORER)
        ).n == 10
        await until(lambda: all(toy.is_idle for toy in toys))


async def test_a_part_that_cannot_be_opened_goes_elsewhere() -> None:
    """Guards against requests that fail before their first token although others have room."""
    failures = [Unavailable("draining")]

    class FailingOnce(HeldGenerator):
        """Together with the others of its kind, refuses one part."""

        def open(self, spec: SessionSpec) -> Any:
            if spec.n < 24 and failures:
                raise failures.pop()
            return super().open(spec)

    toys = [FailingOnce(4 + 12 * 16) for _ in range(3)]
    async with generators(*toys, settings=ONCE) as running:
        assert (
            await answer(request(24, Schedule("tokens", tokens=(16,))), running.client, SCORER)
        ).n == 24
        assert not failures
        await until(lambda: all(toy.is_idle for toy in toys))


@pytest.mark.parametrize("verb", ["extend", "prune"])
async def test_the_candidates_of_a_lost_part_are_lost(verb: str) -> None:
    """The others finish and the answer is flagged, if the caller allows it."""
    large = request(24, Schedule("tokens", tokens=(16,)), allow_degraded=True)
    generation = await _answer_without_a_part(large, verb)
    assert generation.degradations == (Degradation.CANDIDATES,)
    assert generation.n == 24
    assert sum(trace.num_lost for trace in generation.rounds) > 0
    for trace in generation.rounds:
        num_ended = trace.num_finished + trace.num_rejected + trace.num_lost
        assert num_ended + trace.num_live == trace.num_started
    with pytest.raises(Unavailable):
        await _answer_without_a_part(replace(large, allow_degraded=False), verb)


async def _answer_without_a_part(large: GenerationRequest, verb: str) -> Generation:
    """The answer of a request that loses one of two parts in a call of `verb`."""
    lost, remaining = HeldGenerator(4 + 12 * 16), HeldGenerator(4 + 12 * 16)
    async with generators(lost, remaining) as running:
        answering = await lost.gates[verb].hold(answer(large, running.client, SCORER))
        await running.servers[0].kill()
        try:
            return await answering
        finally:
            await until(lambda: remaining.is_idle)


async def test_a_part_lost_between_two_strides_of_a_round_has_no_candidates() -> None:
    """Guards against lost candidates that are scored, ranked and kept in place of live ones."""
    large = request(24, Schedule("tokens", tokens=(16,)), allow_degraded=True)
    lost, remaining = HeldGenerator(4 + 12 * 16), HeldGenerator(4 + 12 * 16)
    async with generators(lost, remaining) as running:
        gate = lost.gates["extend"]
        within = WithinRounds(lambda event: None)  # strides of a few tokens
        answering = await gate.hold(answer(large, running.client, SCORER, within=within))
        await gate.let_one()
        await until(lambda: gate.held == 1)
        await running.servers[0].kill()
        first, *_ = (await answering).rounds
    assert first.num_lost > 0
    assert len(first.candidates) == first.num_started - first.num_lost
    assert first.generated_tokens > sum(made.num_tokens for made in first.candidates)


class TwoParts(ToyGenerator):
    """Opens four candidates at each of two toys; the second is lost beyond 16 tokens."""

    @asynccontextmanager
    async def open(self, spec: SessionSpec) -> AsyncIterator[Any]:
        toys = [FaultyGenerator(breaks_at=at, end_every=10**6) for at in (NEVER, 16)]
        first_spec, second_spec = (replace(spec, n=4, first_candidate_id=i) for i in (0, 4))
        async with toys[0].open(first_spec) as first, toys[1].open(second_spec) as second:
            yield SplitSession([(0, first), (4, second)])  # type: ignore[list-item]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("best_part", "first"), [(0, (6, 0, 2)), (1, (3, 4, 1))], ids=["the other", "the lost one"]
)
async def test_a_part_lost_while_it_is_scored(best_part: int, first: tuple[int, ...]) -> None:
    """Guards against lost candidates that a cut keeps in place of living ones, and against rejected
    ones that count as lost."""
    scorer = FixedScorer(lambda c: float(c.id // 4 == best_part), num_turns=50)
    of_two = request(8, Schedule("tokens", tokens=(16,)), alpha=0.75, allow_degraded=True)
    generation = await answer(of_two, TwoParts(), scorer, overlaps=True)
    rounds = [(t.num_rejected, t.num_lost, t.num_live) for t in generation.rounds]
    assert rounds == [first, (0, 0, 0)]
    assert len(generation.rounds[0].candidates) == 8 - first[1]
    assert generation.degradations == (Degradation.CANDIDATES,) * best_part
    if best_part:
        with pytest.raises(Unavailable):
            exact = replace(of_two, allow_degraded=False)
            await answer(exact, TwoParts(), scorer, overlaps=True)


async def test_a_session_that_lost_all_live_candidates_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against INTERNAL where the parts that are left have no live candidates."""

    async def lost(*_: object) -> None:
        raise Unavailable("lost")

    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                ToyGenerator(end_every=10**6).open(
                    SessionSpec(PROMPT, 4, SAMPLING, 4, "", first_candidate)
                )
            )
            for first_candidate in (0, 4)
        ]
        session = SplitSession([(0, first), (4, second)])  # type: ignore[list-item]
        await session.extend(4)
        monkeypatch.setattr(second, "prune", lost)
        assert (await session.prune({4, 5})).freed_slots == 16
        with pytest.raises(Unavailable):
            await session.extend(8)


@given(st.integers(1, 500), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_shares_add_up_and_fit_into_few_places(n: int, limits: list[int]) -> None:
    room = dict(enumerate(limits))
    if sum(limits) < n:
        with pytest.raises(InvalidRequest):
            shares_of(n, room)
        return
    shares = shares_of(n, room)
    assert sum(shares.values()) == n
    assert all(0 < share <= room[place] for place, share in shares.items())
    # Without the last chosen place there would not have been enough room.
    chosen = sorted(shares)
    assert sum(room[place] for place in chosen[:-1]) < n


async def test_a_part_with_full_slots_grows_to_the_end() -> None:
    """Guards against a part that is extended beyond max_tokens, as the other one is there."""
    full = request(11, Schedule("memory", first=16))
    full = replace(full, sampling=Sampling(max_tokens=32, min_tokens=32))
    async with generators(HeldGenerator(4 + 160), HeldGenerator(4 + 160)) as running:
        unbounded, bounded = [
            await answer(full, running.client, FixedScorer(), time_left_s=left_s)
            for left_s in (None, 60.0)
        ]
    assert unbounded.rounds[0].ended_by is RoundEnd.SLOTS_FULL, "the case did not occur"
    assert bounded.best.num_tokens == unbounded.best.num_tokens == 32


async def test_without_n_nothing_is_split() -> None:
    """Guards against parts of no candidates for a prompt that fits nowhere."""
    large = replace(request(0), sampling=Sampling(max_tokens=300))
    async with generators(HeldGenerator(100), HeldGenerator(200)) as running:
        with pytest.raises(InvalidRequest):
            await answer(large, running.client, FixedScorer())
