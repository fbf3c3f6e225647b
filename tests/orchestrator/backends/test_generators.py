"""Many generators as one: sessions find a place, survive the loss of one, and may be in parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.split import SplitSession, sizes
from orchestrator.scoring import LikelihoodScorer
from specrej.contracts import (
    Candidate,
    Degradation,
    Generation,
    GenerationRequest,
    GeneratorDescription,
    Prompt,
    Pruned,
    Round,
    RoundEnd,
    Sampling,
    Schedule,
    Session,
    SlotGauge,
)
from specrej.errors import InvalidRequest, Overloaded, Unavailable
from tests.orchestrator.backends.fleets import (
    ONCE,
    PROMPT,
    QUICK,
    Known,
    answered,
    backends,
    generators,
    request,
)
from tests.orchestrator.services import (
    Backend,
    HeldGenerator,
    MuteGenerator,
    generator_backend,
)
from tests.serving import until

SAMPLING = Sampling(max_tokens=32, seed=7)
SCORER = LikelihoodScorer()


def of_both(first: HeldGenerator, second: HeldGenerator) -> list[HeldGenerator]:
    """The one that has a session first."""
    return [first, second] if first.toy.ledger.num_sessions else [second, first]


def said(generation: Generation) -> list[object]:
    """All that the loss of a generator must not change."""
    rounds = [
        (each.decision_token, each.num_live, each.num_finished, each.candidates, each.alpha)
        for each in generation.rounds
    ]
    return [generation.candidates, rounds, generation.usage.best_of_n_tokens_estimate]


@pytest.mark.parametrize("verb", ["extend", "prune"])
@pytest.mark.parametrize("rounds_before", [0, 1, 2])
async def test_a_request_survives_the_loss_of_its_generator(verb: str, rounds_before: int) -> None:
    """The same answer, token for token, and every token that was made is counted."""
    asked = request(12, Schedule(first=4))
    alone = await answered(asked, ToyGenerator(), SCORER)
    one, two = HeldGenerator(), HeldGenerator()
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        running = asyncio.ensure_future(answered(asked, FleetGenerator(fleet), SCORER))
        await until(lambda: bool(one.toy.ledger.num_sessions or two.toy.ledger.num_sessions))
        ill, well = of_both(one, two)
        gate = ill.gates[verb]
        for _ in range(rounds_before):
            gate.shut()
            await until(lambda: gate.held == 1)
            gate.open()
            await until(lambda: gate.held == 0)
        gate.shut()
        await until(lambda: gate.held == 1)
        await servers[[one, two].index(ill)].kill()
        moved = await running
        assert said(moved) == said(alone)
        assert moved.usage.generated_tokens >= alone.usage.generated_tokens
        assert sum(each.generated_tokens for each in moved.rounds) == moved.usage.generated_tokens
        assert not moved.degraded
        assert well.is_idle


async def test_a_silent_generator_is_given_up() -> None:
    """Guards against requests that wait for a stopped process until their deadline."""
    asked = request(6)
    alone = await answered(asked, ToyGenerator(), SCORER)
    one, two = MuteGenerator(), MuteGenerator()
    async with backends(one, two) as servers, generators(Known(servers), QUICK) as fleet:
        one.gates["extend"].shut()
        two.gates["extend"].shut()
        running = asyncio.ensure_future(answered(asked, FleetGenerator(fleet), SCORER))
        await until(lambda: bool(one.gates["extend"].held or two.gates["extend"].held))
        ill, well = of_both(one, two)
        assert isinstance(ill, MuteGenerator)
        well.gates["extend"].open()
        ill.hearing.shut()
        assert said(await running) == said(alone)
        assert fleet.counts() == {"serving": 1, "other_version": 0, "away": 1}
        ill.hearing.open()
        ill.gates["extend"].open()
        await until(lambda: fleet.counts()["serving"] == 2 and one.is_idle and two.is_idle)


async def test_nowhere_to_go() -> None:
    """One generator: its loss is told at once, with what a client retries by."""
    one = HeldGenerator()
    async with backends(one) as servers, generators(Known(servers)) as fleet:
        one.gates["extend"].shut()
        running = asyncio.ensure_future(answered(request(), FleetGenerator(fleet), SCORER))
        await until(lambda: one.gates["extend"].held == 1)
        await servers[0].kill()
        with pytest.raises(Unavailable):
            await running


@pytest.mark.parametrize("is_full", [False, True], ids=["too small", "full"])
async def test_nowhere_with_room_to_go(is_full: bool) -> None:
    """Guards against a bad request, or too many of them, made of a generator that was lost."""
    slots = (100_000, 1000 if is_full else 100)
    large, other = (HeldGenerator(each, end_every=10**6) for each in slots)
    asked = request(20, Schedule(first=32))
    async with AsyncExitStack() as stack:
        if is_full:
            held = await stack.enter_async_context(other.toy.open(PROMPT, 25, SAMPLING, 32))
            await held.extend(31)
        servers = await stack.enter_async_context(backends(large, other))
        fleet = await stack.enter_async_context(generators(Known(servers), QUICK))
        large.gates["extend"].shut()
        running = asyncio.ensure_future(answered(asked, FleetGenerator(fleet), SCORER))
        await until(lambda: large.gates["extend"].held == 1)
        await servers[0].kill()
        with pytest.raises(Unavailable, match="no other has the room"):
            await running


async def test_nobody_left_is_an_empty_round() -> None:
    """Guards against a generator that is said to be lost, where a veto has left nobody."""
    one, two = _Few(), _Few()
    async with (
        backends(one, two) as servers,
        generators(Known(servers)) as fleet,
        FleetGenerator(fleet).open(PROMPT, 12, SAMPLING, 4) as session,
    ):
        await session.extend(4)
        await session.prune([])
        ended = await session.extend(8)
    assert (ended.candidates, ended.ended_by, ended.num_tokens) == ((), RoundEnd.ALL_FINISHED, 4)


async def test_whoever_has_room_comes_before_the_less_busy() -> None:
    """Guards against waiting behind one large session where three small ones leave the room."""
    full, roomy = (HeldGenerator(1000, end_every=10**6) for _ in range(2))
    async with AsyncExitStack() as stack:
        held = await stack.enter_async_context(full.toy.open(PROMPT, 30, SAMPLING, 32))
        await held.extend(31)
        for _ in range(3):
            await stack.enter_async_context(roomy.toy.open(PROMPT, 1, SAMPLING, 4))
        servers = await stack.enter_async_context(backends(full, roomy))
        fleet = await stack.enter_async_context(generators(Known(servers)))
        async with FleetGenerator(fleet).open(PROMPT, 4, SAMPLING, 32):
            assert (full.num_opened, roomy.num_opened) == (0, 1)


async def test_a_session_moves_once() -> None:
    """Guards against a prompt that kills whoever reads it and is then handed to all of them."""
    all_three = [HeldGenerator() for _ in range(3)]
    async with backends(*all_three) as servers, generators(Known(servers)) as fleet:
        for each in all_three:
            each.gates["extend"].shut()
        running = asyncio.ensure_future(answered(request(), FleetGenerator(fleet), SCORER))
        for _ in range(2):
            await until(lambda: any(each.gates["extend"].held for each in all_three))
            ill = next(i for i, each in enumerate(all_three) if each.gates["extend"].held)
            await servers[ill].kill()
            await until(lambda ill=ill: all_three[ill].is_idle)  # type: ignore[misc]
        with pytest.raises(Unavailable):
            await running


async def test_whoever_has_room_is_taken() -> None:
    one, two = HeldGenerator(200), HeldGenerator(200)
    async with (
        backends(one, two) as servers,
        generators(Known(servers)) as fleet,
        AsyncExitStack() as stack,
    ):
        generator = FleetGenerator(fleet)
        for _ in range(2):  # the toy refuses what it has no room for
            await stack.enter_async_context(generator.open(PROMPT, 4, SAMPLING, 32))
        assert [each.toy.ledger.num_sessions for each in (one, two)] == [1, 1]
        with pytest.raises(Overloaded):
            await stack.enter_async_context(generator.open(PROMPT, 4, SAMPLING, 32))


async def test_together_they_have_more_room() -> None:
    one, two = HeldGenerator(200), HeldGenerator(300)
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        described = await FleetGenerator(fleet).describe()
        single = await one.describe()
        assert described.slots.capacity == 500
        assert described.max_candidates == 2 * single.max_candidates
        assert described.context_tokens == single.context_tokens


async def test_too_many_for_one_are_split() -> None:
    """Two generators of half the slots make what one with all of them would have made."""
    asked = request(24, Schedule("tokens", (16,)))
    alone = await answered(asked, ToyGenerator(4 + 24 * 24), SCORER)
    one, two = HeldGenerator(4 + 12 * 24), HeldGenerator(4 + 12 * 24)
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        split = await answered(asked, FleetGenerator(fleet), SCORER)
        assert split.n == 24
        assert said(split) == said(alone)
        assert split.usage.generated_tokens == alone.usage.generated_tokens
        assert split.generator_fingerprint == "toy-40"
        await until(lambda: one.is_idle and two.is_idle)
        # The whole was refused by one of them before it came in two parts.
        assert one.num_opened + two.num_opened == 3


async def test_a_limit_of_candidates_is_no_limit_of_a_request() -> None:
    one, two = _Few(), _Few()
    asked = request(12)
    alone = await answered(asked, ToyGenerator(), SCORER)
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        assert said(await answered(asked, FleetGenerator(fleet), SCORER)) == said(alone)
        with pytest.raises(InvalidRequest) as caught:
            await answered(request(17), FleetGenerator(fleet), SCORER)
    assert caught.value.metadata == {"candidates": "16"}


async def test_with_the_one_that_is_away_there_might_be_room() -> None:
    """Guards against a bad request, which nobody retries, made of one that came at a bad moment."""
    one, two = HeldGenerator(100), HeldGenerator(100)
    async with backends(one, two) as servers, generators(Known(servers), QUICK) as fleet:
        await servers[1].kill()
        await until(lambda: fleet.counts()["away"] == 1)
        with pytest.raises(Unavailable):
            await answered(request(5, Schedule(first=32)), FleetGenerator(fleet), SCORER)


async def test_more_than_all_of_them_hold() -> None:
    one, two = HeldGenerator(100), HeldGenerator(100)
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        with pytest.raises(InvalidRequest) as caught:
            await answered(request(24, Schedule(first=32)), FleetGenerator(fleet), SCORER)
    assert caught.value.reason == "SLOTS_EXCEEDED"
    assert caught.value.metadata == {"candidates": str(2 * (96 // 32))}


@pytest.mark.parametrize("verb", ["extend", "prune"])
async def test_a_part_is_lost(verb: str) -> None:
    """The others finish, flagged, where the caller allows it."""
    asked = request(24, Schedule("tokens", (16,)), allow_degraded=True)
    generation = await _with_a_part_lost(asked, verb)
    assert generation.degradations == (Degradation.CANDIDATES,)
    assert generation.n == 24
    assert sum(each.num_lost for each in generation.rounds) > 0
    for each in generation.rounds:
        counted = each.num_finished + each.num_rejected + each.num_lost + each.num_live
        assert counted == each.num_started
    with pytest.raises(Unavailable):
        await _with_a_part_lost(replace(asked, allow_degraded=False), verb)


async def _with_a_part_lost(asked: GenerationRequest, verb: str) -> Generation:
    one, two = HeldGenerator(4 + 12 * 16), HeldGenerator(4 + 12 * 16)
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        one.gates[verb].shut()
        running = asyncio.ensure_future(answered(asked, FleetGenerator(fleet), SCORER))
        await until(lambda: one.gates[verb].held == 1)
        await servers[0].kill()
        try:
            return await running
        finally:
            await until(lambda: two.is_idle)


async def test_all_who_went_on_are_lost() -> None:
    """Guards against a request that fails as if by a bug when those who are left have nobody."""
    here, there = _Part(range(4)), _Part(range(4, 8))
    session = SplitSession([(0, here), (4, there)])  # type: ignore[list-item]
    await session.extend(4)
    there.is_lost = True
    assert (await session.prune({4, 5})).freed_slots == 16
    with pytest.raises(Unavailable):
        await session.extend(8)


async def test_with_all_that_are_away_there_might_be_room() -> None:
    """Of three that it takes, one is away: that is no bad request either."""
    three = [HeldGenerator(100) for _ in range(3)]
    async with backends(*three) as servers, generators(Known(servers), ONCE) as fleet:
        await servers[2].kill()
        await fleet.refreshed()
        with pytest.raises(Unavailable):
            await answered(request(8, Schedule(first=32)), FleetGenerator(fleet), SCORER)
        # Not even all of them have the room for these.
        with pytest.raises(InvalidRequest):
            await answered(request(10, Schedule(first=32)), FleetGenerator(fleet), SCORER)


@pytest.mark.parametrize("num_slow", [1, 2])
async def test_whoever_was_only_slow_is_asked_again(num_slow: int) -> None:
    """Guards against requests refused because somebody did not answer for a moment."""
    one, two = HeldGenerator(100), HeldGenerator(100)
    async with backends(one, two) as servers, generators(Known(servers), ONCE) as fleet:
        for slow in fleet.members()[:num_slow]:
            slow.suspect(Unavailable("a backend does not answer"))
        asked = request(6, Schedule(first=32))
        assert (await answered(asked, FleetGenerator(fleet), SCORER)).n == 6


@pytest.mark.parametrize("small_first", [False, True])
async def test_parts_that_have_not_the_room_are_given_up_before_others_are_asked_for(
    small_first: bool,
) -> None:
    """Guards against slots that a request waits for while it holds them itself."""
    small, large = _Few(4 + 3 * 32), _Few(4 + 8 * 32)
    behind = (small, large) if small_first else (large, small)
    asked = request(10, Schedule("tokens", (32,)))
    async with _in_order(*behind) as servers, generators(Known(servers)) as fleet:
        assert (await answered(asked, FleetGenerator(fleet), SCORER)).n == 10
        await until(lambda: small.is_idle and large.is_idle)


async def test_a_part_finds_another_place_before_it_begins() -> None:
    """Guards against requests that fail without a token, although others have the room."""
    failed: list[int] = []
    three = [_RefusesAPart(4 + 12 * 16, failed) for _ in range(3)]
    asked = request(24, Schedule("tokens", (16,)))
    async with backends(*three) as servers, generators(Known(servers), ONCE) as fleet:
        assert (await answered(asked, FleetGenerator(fleet), SCORER)).n == 24
        assert failed
        await until(lambda: all(each.is_idle for each in three))


@pytest.mark.parametrize(("small_slots", "n"), [(30, 6), (4 + 3 * 32, 12), (4 + 3 * 32, 9)])
async def test_a_small_one_does_not_speak_for_a_large_one(small_slots: int, n: int) -> None:
    """Whoever of two is asked first, and says what of its own room."""
    small, large = HeldGenerator(small_slots), HeldGenerator(4 + 9 * 32)
    asked = request(n, Schedule("tokens", (32,)))
    async with backends(small, large) as servers, generators(Known(servers)) as fleet:
        for number in range(6):  # all meet at the same first one with a chance of 1 in 32
            prompt = Prompt.from_user(f"{number} of four words")
            each = replace(asked, prompt=prompt)
            assert (await answered(each, FleetGenerator(fleet), SCORER)).n == n
            await until(lambda: small.is_idle and large.is_idle)


async def test_a_busy_large_one_is_no_bad_request() -> None:
    """Guards against a request that nobody retries, since a small one refused it meanwhile."""
    small, large = HeldGenerator(4 + 3 * 32), HeldGenerator(4 + 9 * 32)
    async with backends(small, large) as servers, generators(Known(servers)) as fleet:
        generator = FleetGenerator(fleet)
        async with generator.open(PROMPT, 9, SAMPLING, 32):
            for number in range(4):
                with pytest.raises(Overloaded):
                    async with generator.open(Prompt.from_user(f"{number} a b c"), 9, SAMPLING, 32):
                        pass


async def test_an_idle_generator_gets_what_a_busy_one_has_read_before() -> None:
    """Guards against replicas that have nothing to do, for all prompts begin in the same way."""
    one, two = HeldGenerator(), HeldGenerator()
    async with backends(one, two) as servers, generators(Known(servers)) as fleet:
        generator = FleetGenerator(fleet)
        async with generator.open(PROMPT, 2, SAMPLING, 4):
            await until(lambda: not any(each.placed for each in fleet.members()))
            async with generator.open(PROMPT, 2, SAMPLING, 4):
                assert one.toy.ledger.num_sessions == two.toy.ledger.num_sessions == 1


@given(
    st.integers(1, 500),
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 200), min_size=1, max_size=6),
)
def test_sizes_add_up_and_fit(n: int, room: dict[str, int]) -> None:
    if sum(room.values()) < n:
        with pytest.raises(InvalidRequest):
            sizes(n, room)
        return
    shares = sizes(n, room)
    assert sum(shares.values()) == n
    assert all(0 < share <= room[place] for place, share in shares.items())
    # Few places: without the last one that was taken there would not have been the room.
    taken = [place for place in room if place in shares]
    assert sum(room[place] for place in taken[:-1]) < n


class _Few(HeldGenerator):
    """Takes eight candidates at most."""

    async def describe(self) -> GeneratorDescription:
        return replace(await super().describe(), max_candidates=8)


class _RefusesAPart(HeldGenerator):
    """Of several of them, the first that is asked for a part is not there."""

    def __init__(self, capacity_slots: int, failed: list[int]) -> None:
        super().__init__(capacity_slots)
        self.failed = failed

    @asynccontextmanager
    async def open(self, *opening: Any, **more: Any) -> AsyncIterator[Session]:
        n = opening[1]
        if n < 24 and not self.failed:
            self.failed.append(n)
            raise Unavailable("it drains")
        async with super().open(*opening, **more) as session:
            yield session


@asynccontextmanager
async def _in_order(*behind: HeldGenerator) -> AsyncIterator[list[Backend]]:
    """Servers whose addresses have the order of those behind them."""
    async with AsyncExitStack() as stack:
        servers: list[Backend] = []
        for generator in behind:
            while True:
                server = await stack.enter_async_context(generator_backend(generator))
                if not servers or str(servers[-1].port) < str(server.port):
                    break
            servers.append(server)
        yield servers


class _Part:
    """A session of a part, of four slots a candidate; can be lost."""

    prompt_tokens = 4

    def __init__(self, ids: range) -> None:
        self.n = len(ids)
        self.live = list(ids)
        self.is_lost = False

    async def extend(self, until_tokens: int) -> Round:
        candidates = tuple(Candidate(number, "", until_tokens, -1.0) for number in self.live)
        return Round(candidates, RoundEnd.DECISION_TOKEN, until_tokens, SlotGauge(100, 0, 0))

    async def prune(self, keep: Collection[int]) -> Pruned:
        if self.is_lost:
            raise Unavailable("it is lost")
        before, self.live = len(self.live), [each for each in self.live if each in keep]
        return Pruned(4 * (before - len(self.live)), SlotGauge(100, 0, 0))
