"""Fleets: which backends are known and serve; several of them are one generator or reward service.

Requests and scoring sessions survive the loss of one.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Backend, Fleet, ranked
from orchestrator.backends.generators import together
from orchestrator.backends.resolving import Resolver, Target
from orchestrator.cache import Secret
from orchestrator.edge.planning import Planner
from orchestrator.loop.scoring import LikelihoodScorer
from reward_service.kinds.toy import ToyReward
from specrej import contracts as c
from specrej.contracts.errors import NotFound, Overloaded, SpecrejError, Unavailable
from specrej.remote import RemoteGenerator
from tests.orchestrator.backends.fleets import (
    PATIENT,
    QUICK,
    ListedTargets,
    connect_generator,
    generators,
    request,
    reward_services,
    target_of,
)
from tests.orchestrator.runs import PROMPT, FaultyGenerator, answer, events_of
from tests.serving import turns, until, until_read
from tests.world import BOUND_S, HeldGenerator, HeldReward, generator_backend

SAMPLING = c.Sampling(max_tokens=32, seed=7)
OF_TWO = c.SessionSpec(PROMPT, 2, SAMPLING, 4)
SCORER = LikelihoodScorer()


async def test_backends_follow_the_resolver_and_their_health() -> None:
    async with generators(HeldGenerator(), HeldGenerator(), num_listed=1) as running:
        first, second = running.servers
        running.resolver.targets |= {target_of(second)}
        await until(lambda: running.counts == (2, 0, 0))
        await first.kill()
        await until(lambda: running.counts == (1, 0, 1))
        await first.start()
        await until(lambda: running.counts == (2, 0, 0))
        await first.kill()
        await until(lambda: running.counts == (1, 0, 1))
        running.resolver.targets -= {target_of(first)}
        await until(lambda: running.counts == (1, 0, 0))


async def test_a_lost_backend_is_connected_to_anew() -> None:
    """Guards an orchestrator whose client certificate was renewed: a channel reads it once."""
    async with generators(HeldGenerator()) as running:
        (server,), (before,) = running.servers, running.fleet.members()
        await server.kill()
        await until(lambda: running.counts == (0, 0, 1))
        num_lookups = running.resolver.num_lookups
        await until(lambda: running.resolver.num_lookups > num_lookups + 1)
        await server.start()
        await until(lambda: running.counts == (1, 0, 0))
        assert running.fleet.members() != [before]


async def test_a_backend_with_a_session_stays_although_its_name_is_gone() -> None:
    """Guards against a request cut off because its pod was taken out of the Service."""
    settings = replace(PATIENT, report_s=60)
    async with generators(HeldGenerator(), settings=settings) as running:
        async with running.client.open(OF_TWO) as session:
            running.resolver.targets = frozenset()
            running.fleet.members()[0].suspect(Unavailable("draining"))
            num_lookups = running.resolver.num_lookups
            await until(lambda: running.resolver.num_lookups > num_lookups + 1)
            assert (await session.extend(4)).num_tokens == 4
            assert sum(running.counts) == 1
        await until(lambda: sum(running.counts) == 0)


async def test_a_new_version_receives_sessions_as_soon_as_it_serves() -> None:
    """Guards a rollout against new generators that are idle until they are the majority."""
    old, new = ([HeldGenerator(end_every=end) for _ in range(2)] for end in (30, 40))
    async with generators(*old, *new, num_listed=2) as running, AsyncExitStack() as stack:
        running.resolver.targets |= {target_of(running.servers[2])}
        await until(lambda: running.counts == (2, 1, 0))
        assert (await running.client.describe()).fingerprint == "toy-30"
        for _ in range(20):  # all pass it by with a chance of 1 in 2 ** 20
            opening = running.client.open(OF_TWO)
            await stack.enter_async_context(opening)
        assert new[0].num_opened
        await running.servers[0].kill()
        running.resolver.targets |= {target_of(running.servers[3])}
        await until(lambda: running.counts == (2, 1, 1))
        assert (await running.client.describe()).fingerprint == "toy-40"


async def test_a_drain_is_noticed_at_once_and_waits_for_no_reports() -> None:
    """Guards requests that are sent to a server which ends, and a drain that takes all its time."""
    settings = replace(PATIENT, report_s=60)
    async with generators(HeldGenerator(), settings=settings) as running:
        server: Any = running.servers[0]._server
        async with running.client.open(OF_TWO) as session:
            server.set_serving(False)
            await until(lambda: running.counts == (0, 0, 1))
            assert (await session.extend(4)).num_tokens == 4
        server.set_serving(True)
        await asyncio.wait_for(server.stop(300), BOUND_S)


async def test_the_start_does_not_wait_for_removed_backends() -> None:
    """Guards against a service that never starts because an address was stale at its start."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        resolver = ListedTargets()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        resolver.targets = frozenset({Target(address, "127.0.0.1")})
        async with Fleet("generator", resolver.resolve, connect_generator, str, PATIENT) as fleet:
            await until(lambda: fleet.counts()["away"] == 1)
            heard = asyncio.ensure_future(fleet.wait_heard())
            resolver.targets = frozenset()
            await until(heard.done)


async def test_a_failed_connection_does_not_end_the_search() -> None:
    """A certificate may be absent for a moment while it is replaced."""
    failures = [OSError("no such file")]

    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteGenerator]:
        if failures:
            raise failures.pop()
        return connect_generator(target)

    async with (
        generator_backend(HeldGenerator()) as server,
        Fleet("generator", ListedTargets([server]).resolve, connect, str, PATIENT) as fleet,
    ):
        await until(lambda: fleet.counts()["serving"] == 1)


async def test_a_session_is_placed_until_a_report_includes_it() -> None:
    """Guards against two sessions at one backend because its load was measured before the first."""
    async with _backend(HeldGenerator()) as backend:
        description = await ToyGenerator().describe()

        @asynccontextmanager
        async def opening() -> AsyncIterator[None]:
            backend.take(description)
            assert backend.placed == 1
            yield

        async with backend.holding(opening()):
            assert backend.placed == 1
            backend.take(None)
            assert backend.placed == 0


async def test_another_program_at_the_address_is_unavailable() -> None:
    """Guards callers against NOT_FOUND for a request that is right, with another program's text."""

    async def absent() -> None:
        details = "unknown service at /srv/health.go:31"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), details
        )

    async with _backend(HeldGenerator()) as backend:
        call = SimpleNamespace(read=absent, cancel=lambda: None)
        backend.peer._stub = SimpleNamespace(Watch=lambda *_, **__: call)
        await backend.follow(60, 60)
        assert type(backend.failure) is Unavailable
        assert "health.go" not in str(backend.failure) and not backend.is_serving


async def test_a_backend_that_fails_a_call_or_is_closed_gets_no_sessions() -> None:
    """Guards against requests that go to a generator that has just died; a caller that still has a
    closed one in a list continues with the next one."""
    async with _backend(HeldGenerator()) as backend:
        backend.take(await ToyGenerator().describe())
        assert backend.is_serving
        with pytest.raises(Unavailable):
            async with backend.answering():
                raise Unavailable("gone")
        assert not backend.is_serving
        backend.take(None)
        assert backend.is_serving
        await backend.close()
        with pytest.raises(Unavailable):
            async with backend.holding(nullcontext()):
                pass
        assert backend.running == 0


async def test_a_backend_that_answers_sessions_is_not_lost() -> None:
    """Guards sessions that use all streams of a connection: that of reports waits behind them."""
    toy, waiting = HeldGenerator(), asyncio.Event()

    async def wait() -> None:
        async with backend.answering():
            await waiting.wait()

    async with _backend(toy) as backend:
        before = asyncio.get_running_loop().time()
        async with backend.answering():
            pass
        assert backend._answered >= before
        session = asyncio.ensure_future(wait())
        toy.gates["describe"].shut()
        watching = asyncio.ensure_future(backend.follow(0.001, 0.01))
        await turns(1)
        backend._answered += 3600  # as if it went on to answer
        done, _ = await asyncio.wait({session, watching}, timeout=0.1)
        assert not done
        backend._answered -= 3600
        with pytest.raises(Unavailable):
            await session
        await watching


@asynccontextmanager
async def _backend(generator: HeldGenerator) -> AsyncIterator[Backend[RemoteGenerator]]:
    """A backend of no fleet."""
    async with generator_backend(generator) as server:
        backend = Backend(target_of(server), connect_generator, str)
        yield backend
        await backend.close()


# The resolver: names stand for all of their addresses, and failed lookups remove none


@pytest.fixture
async def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, in place of the system's lookup."""
    by_name: dict[str, list[str]] = {}

    async def lookup(host: str, port: int, **_: Any) -> list[Any]:
        if host not in by_name:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        families = {False: socket.AF_INET, True: socket.AF_INET6}
        found = ((families[":" in address], (address, port)) for address in by_name[host])
        return [(family, socket.SOCK_STREAM, 6, "", place) for family, place in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    return by_name


async def test_a_name_has_all_its_addresses(addresses: dict[str, list[str]]) -> None:
    """A machine with an address of each kind counts once."""
    addresses |= {"two": ["10.0.0.1", "10.0.0.2"], "both": ["::1", "127.0.0.1"], "six": ["fd00::1"]}
    assert await Resolver(["two:1", "both:1", "six:1"]).resolve() == {
        Target("10.0.0.1:1", "two"),
        Target("10.0.0.2:1", "two"),
        Target("127.0.0.1:1", "both"),
        Target("[fd00::1]:1", "six"),
    }


async def test_a_failed_lookup_keeps_the_last_addresses(addresses: dict[str, list[str]]) -> None:
    """A headless Service without ready pods, or without its name server, is an unknown name."""
    resolver = Resolver(["generators:1"])
    assert await resolver.resolve() == frozenset()
    addresses["generators"] = ["10.0.0.1"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    del addresses["generators"]
    assert await resolver.resolve() == {Target("10.0.0.1:1", "generators")}
    addresses["generators"] = ["10.0.0.2"]
    assert await resolver.resolve() == {Target("10.0.0.2:1", "generators")}


async def test_an_invalid_name_does_not_end_the_lookup_of_others() -> None:
    """The system's lookup raises UnicodeError for it. Addresses are names of themselves."""
    targets = {Target("10.0.0.9:1", "10.0.0.9"), Target("[::1]:2", "[::1]")}
    assert await Resolver(["a..b:1", "10.0.0.9:1", "[::1]:2"]).resolve() == targets


# The order in which backends are tried: all of them, the less loaded first


LOADS = st.lists(st.floats(0, 10), min_size=1, max_size=6)


@given(LOADS, st.randoms())
def test_every_backend_is_tried_once_and_the_less_loaded_choice_first(
    loads: list[float], chance: random.Random
) -> None:
    order = [*ranked(range(len(loads)), loads.__getitem__, chance.random)]
    assert sorted(order) == [*range(len(loads))]
    in_order = [loads[member] for member in order]
    assert in_order[:2] == sorted(in_order[:2]) and in_order[2:] == sorted(in_order[2:])


def test_loads_of_the_others_are_computed_only_if_the_first_two_fail() -> None:
    """Guards against a choice that costs as much as there are backends."""
    loads: Counter[int] = Counter()
    order = ranked(range(1000), lambda member: loads.update([member]) or 0.0, random.random)
    assert len({*islice(order, 2)}) == len(loads) == 2
    assert len([*order]) == 998


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
async def test_whole_answers_that_failed_are_not_paid_for_again(makes_whole_answers: bool) -> None:
    """Guards against all N requests to an endpoint, sent again because one of them failed."""
    form = (c.CandidateForm.IN_PLACE, c.CandidateForm.WHOLE_ANSWERS)[makes_whole_answers]
    toys = [HeldGenerator(form=form) for _ in range(2)]
    for toy in toys:
        toy.toy = FaultyGenerator(breaks_at=0)  # its port answers, with Unavailable
    async with generators(*toys) as running:
        with pytest.raises(Unavailable):
            await answer(request(8), running.client, SCORER)
    num_opened = sorted(toy.num_opened for toy in toys)
    assert num_opened == ([0, 1] if makes_whole_answers else [1, 1])


async def test_a_session_may_begin_before_its_generator_is_described() -> None:
    """Guards against an internal error at the first cut, as while generators are restarted."""
    toy, once = HeldGenerator(), replace(PATIENT, report_s=60)
    describe, toy.describe = toy.describe, AsyncMock(side_effect=Unavailable("loading"))  # type: ignore[method-assign]
    async with generators(toy, num_listed=0, settings=once) as running:
        running.resolver.targets = frozenset(map(target_of, running.servers))
        await until(lambda: running.counts == (0, 0, 1))
        await running.fleet.wait_heard()
        toy.describe = describe  # type: ignore[method-assign]
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
    async with generators(*toys) as running, running.client.open(OF_TWO):
        await until(lambda: not any(backend.placed for backend in running.fleet.members()))
        async with running.client.open(OF_TWO):
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


async def test_a_request_that_names_a_model_goes_to_its_generators() -> None:
    """Guards a rollout of a model with a new name against answers of the other model."""
    toys = {"toy": HeldGenerator(), "new": HeldGenerator(model="new")}
    async with generators(*toys.values()) as running:
        await until(lambda: running.counts == (2, 0, 0))
        assert {*(await running.client.describe()).adapters} == {*toys}
        for number in range(4):
            for name, toy in toys.items():
                prompt, num_opened = c.Prompt.from_user(str(number)), toy.num_opened
                async with running.client.open(c.SessionSpec(prompt, 1, SAMPLING, 4, "", name)):
                    assert toy.num_opened == num_opened + 1


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
    """Guards against a charge for slots of all generators, of which it uses those of one, and where
    N is left open, for the 1,024 candidates that a session may have at most."""

    async def charged(generator: Any, n: int) -> int:
        selection = c.Selection(n, rewards=(c.WeightedReward("likelihood"),))
        asked = c.GenerationRequest(PROMPT, c.Sampling(max_tokens=64), selection)
        planner = Planner(generator, UNUSED_REWARDS, secret=Secret())
        return (await planner.plan(asked, "", 1.0, (), math.inf)).candidate_tokens

    small, large = HeldGenerator(200), HeldGenerator(300)
    async with generators(small, large) as running:
        for n in (0, 32):
            assert await charged(running.client, n) == await charged(large, n)
        # Its slots, three rounds of the eight candidates that can run, one answer, and the prompt.
        assert await charged(large, 0) == 300 + 8 * 3 + 1 + len("four words of prompt") // 4


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


CANDIDATES = (c.Candidate(0, "one", 1, -1.0), c.Candidate(1, "two", 1, -1.0))


class HeldAt(HeldReward):
    """Waits in its batch of this number, from 1; 0: in none."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def score(self, prompt: c.Prompt, candidates: Sequence[c.Candidate]) -> c.Scores:
        if self.num_batches + 1 == self.batch:
            self.gate.clear()
        return super().score(prompt, candidates)


class Refuses(HeldReward):
    """Refuses batches of these numbers, from 1, which ends the session each time."""

    def __init__(self, *batches: int, error: type[SpecrejError] = Overloaded) -> None:
        super().__init__()
        self.batches = batches
        self.error = error

    def score(self, prompt: c.Prompt, candidates: Sequence[c.Candidate]) -> c.Scores:
        if self.num_batches + 1 in self.batches:
            self.num_batches += 1
            raise self.error("not now")
        return super().score(prompt, candidates)


@pytest.mark.parametrize("batch", [1, 2, 3])
async def test_an_answer_does_not_change_if_its_reward_service_is_lost(batch: int) -> None:
    """And no batch is scored twice."""
    async with reward_services(ToyReward()) as running:
        undisturbed = await answer(request(12), ToyGenerator(), partial(running.client.open, "toy"))
    rewards = [HeldAt(batch), HeldAt(batch)]
    async with reward_services(*rewards) as running:
        scorer = partial(running.client.open, "toy")
        answering = asyncio.ensure_future(answer(request(12), ToyGenerator(), scorer))
        await until(lambda: any(reward.held for reward in rewards))
        lost, other = (0, 1) if rewards[0].held else (1, 0)
        rewards[other].batch = 0
        killing = asyncio.ensure_future(running.servers[lost].kill())
        moved = await answering
        rewards[lost].gate.set()
        await killing
    assert moved.candidates == undisturbed.candidates
    assert not moved.degraded
    assert rewards[other].num_batches == len(moved.rounds) - batch + 1


async def test_a_service_that_answers_is_not_away() -> None:
    """Guards against one reward's failure, such as that of a server of its own, that takes a
    service from all other requests."""
    reward = Refuses(*range(1, 9), error=Unavailable)
    async with reward_services(reward) as running:
        with pytest.raises(Unavailable):
            await answer(request(), ToyGenerator(), partial(running.client.open, "toy"))
        assert running.counts == (1, 0, 0)


@pytest.mark.parametrize("batches", [(2,), (2, 5)])
async def test_a_service_that_ended_the_session_is_tried_again(batches: tuple[int, ...]) -> None:
    """A session whose lease expired is no sign that its service is lost. Each failure has tries of
    its own: most of a long request's work is done at the second one."""
    reward = Refuses(*batches)
    async with reward_services(reward) as running:
        scorer = partial(running.client.open, "toy")
        many = request(12, schedule=c.Schedule(first=2, factor=1.5))
        generation = await answer(many, ToyGenerator(end_every=10**9), scorer)
    assert reward.num_batches == len(generation.rounds) + len(batches) > 6


async def test_no_session_continues_with_another_version() -> None:
    """Guards against scores of two versions in one ranking."""
    old, new = HeldReward(), HeldReward()
    new.fingerprint = "new"
    async with (
        reward_services(old, new, num_listed=1) as running,
        running.client.open("toy", PROMPT) as session,
    ):
        await session.score(CANDIDATES)
        running.resolver.targets |= {target_of(running.servers[1])}
        await until(lambda: running.counts == (1, 1, 0))
        await running.servers[0].kill()
        await until(lambda: running.counts[2] == 1)
        with pytest.raises(Unavailable):
            await session.score(CANDIDATES)
    assert new.num_batches == 0


async def test_a_session_that_moved_is_closed_at_once() -> None:
    """Guards against state that a service keeps, and a count, until the request ends."""
    rewards = [Refuses(2), Refuses(2)]
    async with reward_services(*rewards) as running:
        members = running.fleet.members()
        async with running.client.open("toy", PROMPT) as session:
            for _ in range(2):
                await session.score(CANDIDATES)
            assert all(reward.num_batches for reward in rewards), "the session has not moved"
            assert sum(backend.running for backend in members) == 1
            await until(lambda: sum(server.num_scoring for server in running.servers) == 1)
        assert sum(backend.running for backend in members) == 0


async def test_the_smallest_batch_of_all_services_counts() -> None:
    """Guards against a plan that the service of a session refuses, and one for a reward that the
    service has replaced."""
    async with reward_services(ToyReward(), ToyReward()) as running:
        servers: list[Any] = running.servers
        for server, most in zip(servers, (1024, 8), strict=True):
            server._servicer._max_batch = most
        describe = running.client.describe
        await until_read(describe, lambda found: [reward.max_batch for reward in found] == [8])


async def test_a_reward_that_some_services_have_is_found() -> None:
    """Guards a rollout that adds a reward against NOT_FOUND from services without it."""
    async with reward_services(ToyReward(), ToyReward("other")) as running:
        assert {reward.name for reward in await running.client.describe()} == {"toy", "other"}
        for name in ("toy", "other") * 4:
            async with running.client.open(name, c.Prompt(text=name)) as session:
                assert (await session.score(CANDIDATES)).values
        with pytest.raises(NotFound):
            await AsyncExitStack().enter_async_context(running.client.open("absent", PROMPT))
