"""Generator and rewards across the network: as good as local ones, and honest when they are not."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from generator_service.toy import ToyGenerator
from orchestrator import remote
from orchestrator.remote import RemoteGenerator, RemoteRewards
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel, fingerprint_of
from orchestrator.service import _Recent
from reward_service.servicer import RewardServicer
from reward_service.toy import ToyReward
from reward_service.worker import Worker
from specrej.channel import open_channel
from specrej.contracts import (
    Algorithm,
    Candidate,
    Event,
    Finished,
    GenerationRequest,
    Generator,
    Prompt,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scorer,
    Selection,
    Session,
    WeightedReward,
)
from specrej.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    OutOfOrder,
    Overloaded,
    RewardInvalid,
    SessionExpired,
    SpecrejError,
    Unavailable,
    Violation,
)
from specrej.serving import Context, answer_commands
from specrej.v1 import reward_pb2
from tests.faults.rogue import grpc_rogue
from tests.orchestrator.services import (
    BOUND_S,
    LEASE_S,
    Backend,
    HeldGenerator,
    HeldReward,
    LongWinded,
    LongWindedSession,
    RewardBackend,
    channel_to,
    dead_port,
    generator_backend,
    reward_backend,
    timeless,
)
from tests.reward_service.fakes import FixedReward
from tests.serving import serving, until

PROMPT = Prompt.from_user("four words of prompt")
REQUEST = GenerationRequest(PROMPT, Sampling(max_tokens=40), Selection(n=12))


def request(max_tokens: int = 40, **selection: Any) -> GenerationRequest:
    chosen = Selection(**{"n": 12, "return_candidates": 64, **selection})
    return GenerationRequest(PROMPT, Sampling(max_tokens=max_tokens, seed=7), chosen)


async def events_of(
    wanted: GenerationRequest, generator: Generator, scorer: Scorer | Panel
) -> list[Event]:
    async with asyncio.timeout(BOUND_S), aclosing(run(wanted, generator, scorer)) as events:
        return [event async for event in events]


class Remotes:
    """A held toy generator and the toy reward, and how to reach them."""

    def __init__(
        self,
        generator: HeldGenerator,
        reward: HeldReward,
        servers: tuple[Backend, RewardBackend],
        clients: tuple[RemoteGenerator, RemoteRewards],
    ) -> None:
        self.held = generator
        self.reward = reward
        self.generator_server, self.reward_server = servers
        self.generator, self.rewards = clients

    @property
    def scorer(self) -> Scorer:
        return self.rewards.scorer("toy")

    async def idle(self) -> None:
        await until(lambda: self.held.is_idle and self.reward_server.is_idle)
        self.held.toy.ledger.check_integrity()


@asynccontextmanager
async def remotes(generator: HeldGenerator | None = None) -> AsyncIterator[Remotes]:
    generator, reward = generator or HeldGenerator(), HeldReward()
    async with (
        generator_backend(generator) as first,
        reward_backend(reward, ToyReward("other")) as second,
        channel_to(first) as to_generator,
        channel_to(second) as to_rewards,
    ):
        clients = RemoteGenerator(to_generator), RemoteRewards(to_rewards)
        try:
            yield Remotes(generator, reward, (first, second), clients)
        finally:
            reward.gate.set()


@asynccontextmanager
async def remote_generator(generator: Any) -> AsyncIterator[RemoteGenerator]:
    """A port to whatever is given as a generator."""
    async with generator_backend(generator) as backend, channel_to(backend) as channel:
        yield RemoteGenerator(channel)


# The same as local


@pytest.mark.parametrize(
    ("capacity", "end_every", "wanted"),
    [
        (100_000, 40, request()),
        (100_000, 12, request(schedule=Schedule("tokens", tokens=(3, 9, 10)), alpha=0.75)),
        (220, 10**9, request(schedule=Schedule("memory"))),
        (100_000, 40, request(algorithm=Algorithm.BEST_OF_N)),
        (100_000, 5, request(n=0)),
        (100_000, 10**9, request(n=1, max_tokens=1)),
        (100_000, 4, replace(REQUEST, sampling=Sampling(60, min_tokens=20, logprobs=True))),
    ],
)
async def test_the_same_events_as_local(
    capacity: int, end_every: int, wanted: GenerationRequest
) -> None:
    """Guards against anything lost, rounded or reordered on the way: every field, bit by bit."""
    worker = await Worker.start(ToyReward)
    near = ToyGenerator(capacity, end_every=end_every)
    local = await events_of(wanted, near, worker)
    worker.close()
    async with remotes(HeldGenerator(capacity, end_every=end_every)) as far:
        afar = await events_of(wanted, far.generator, far.scorer)
    assert isinstance(afar[-1], Finished) and isinstance(local[-1], Finished)
    # Only over the wire does it matter who answers, and is it told.
    made = replace(
        local[-1].generation,
        generator_fingerprint=f"toy-{end_every}",
        reward_fingerprint=fingerprint_of([WeightedReward("")], [ToyReward().fingerprint]),
    )
    local[-1] = Finished(made)
    assert [timeless(event) for event in afar] == [timeless(event) for event in local]
    if wanted.selection.schedule.kind == "memory":
        ends = [e.trace.ended_by for e in afar if isinstance(e, RoundCompleted)]
        assert RoundEnd.SLOTS_FULL in ends, "the case did not occur"


async def test_weighted_remote_rewards_are_asked_side_by_side() -> None:
    """Guards against two streams mixing up their answers: the sum must be exact."""
    async with remotes() as far:
        weighted = (WeightedReward("toy", 2.0), WeightedReward("other", -0.5))
        panel = Panel([far.rewards.scorer(reward.name) for reward in weighted])
        mixed = await events_of(request(alpha=0.0, rewards=weighted), far.generator, panel)
        plain = await events_of(request(alpha=0.0), far.generator, far.scorer)
    assert isinstance(mixed[-1], Finished) and isinstance(plain[-1], Finished)
    scores = {ranked.id: ranked.score for ranked in plain[-1].generation.candidates}
    for ranked in mixed[-1].generation.candidates:
        assert ranked.score == math.fsum((2.0 * scores[ranked.id], -0.5 * scores[ranked.id]))


async def test_what_a_session_is_opened_with_arrives() -> None:
    """Guards against sessions that share prompt prefixes because their salts were dropped."""
    async with remotes() as far:
        for salt in ("", "a" * 128):
            async with far.generator.open(PROMPT, 4, Sampling(), 8, salt):
                pass
        assert far.held.salts == ["", "a" * 128]


async def test_descriptions_arrive_whole() -> None:
    """Guards against a field forgotten on one side of the wire: limits would be read as 0."""
    async with remotes() as far:
        assert await far.generator.describe() == await far.held.describe()
        names = [reward.name for reward in await far.rewards.describe()]
        assert names == ["toy", "other"]


async def test_a_large_prefix_batch_passes() -> None:
    """Guards against gRPC's default limit of 4 MiB: 1,024 candidates of 6 KiB each, both ways."""
    long_winded = LongWinded(4096)
    async with (
        remote_generator(long_winded) as generator,
        reward_backend(ToyReward()) as rewards,
        channel_to(rewards) as channel,
        generator.open(PROMPT, 1024, Sampling(), 8) as session,
        RemoteRewards(channel).scorer("toy").open(PROMPT) as judge,
    ):
        ended = await session.extend(8)
        assert sum(len(candidate.text.encode()) for candidate in ended.candidates) > 6 << 20
        local = await LongWindedSession(1024, 4096, None).extend(8)
        assert ended == replace(local, made_by=frozenset({"toy-40"}))
        scores = await judge.score(ended.candidates)
        assert (await session.prune(range(1024))).freed_slots == 1024
    assert len(scores.values) == 1024


# Sessions end


async def test_slots_are_free_when_a_session_is_left() -> None:
    """Guards against an answer that comes before its slots are free: at once, not soon."""
    async with remotes() as far:
        async with far.generator.open(PROMPT, 4, Sampling(), 8) as session:
            await session.extend(8)
            assert far.held.toy.ledger.owned > 0
        assert far.held.is_idle
        await events_of(REQUEST, far.generator, far.scorer)
        assert far.held.is_idle


async def test_slots_are_free_after_an_exception_in_the_body() -> None:
    """Guards against a stream that only a normal end closes."""
    async with remotes() as far:
        with pytest.raises(ZeroDivisionError):
            async with far.generator.open(PROMPT, 4, Sampling(), 8) as session:
                await session.extend(8)
                raise ZeroDivisionError
        await far.idle()


async def test_slots_are_free_after_a_run_is_left_early() -> None:
    """Guards against generators that wait for the garbage collector to end their streams."""
    async with remotes() as far:
        async with aclosing(run(REQUEST, far.generator, far.scorer)) as events:
            async for event in events:
                if isinstance(event, RoundCompleted):
                    break
            assert far.held.toy.ledger.owned > 0
        await far.idle()


@pytest.mark.parametrize("phase", ["open", "extend", "score", "prune", "close"])
async def test_slots_are_free_after_a_cancellation(phase: str) -> None:
    """Guards against a cancel that ends the wait, but not what was waited for."""
    async with remotes() as far:
        task = await held_in(phase, far)
        task.cancel()
        async with asyncio.timeout(BOUND_S):
            await asyncio.wait([task])
        assert task.cancelled()
        await far.idle()


async def held_in(phase: str, far: Remotes) -> asyncio.Task[list[Event]]:
    """A run that waits in that phase."""
    if phase == "score":
        far.reward.gate.clear()
    else:
        far.held.gates[phase].shut()
    task = asyncio.create_task(events_of(REQUEST, far.generator, far.scorer))
    gates = far.held.gates
    await until(lambda: bool(far.reward.held if phase == "score" else gates[phase].held))
    return task


# A backend that is not there


async def test_no_internal_address_reaches_a_caller() -> None:
    """grpc's own text of a failed connection names the backend's host and port."""
    with dead_port() as port:
        async with open_channel(f"127.0.0.1:{port}", retries=False) as channel:
            with pytest.raises(Unavailable) as raised:
                await events_of(REQUEST, RemoteGenerator(channel), LikelihoodScorer())
    assert raised.value.message == "a backend cannot be reached"


async def test_nobody_listens() -> None:
    """Guards against waiting for a connection that is refused."""
    with dead_port() as port:
        async with open_channel(f"127.0.0.1:{port}", retries=False) as channel:
            generator, rewards = RemoteGenerator(channel), RemoteRewards(channel)
            sessions = (
                generator.open(PROMPT, 4, Sampling(), 8),
                rewards.scorer("toy").open(PROMPT),
            )
            async with asyncio.timeout(BOUND_S):
                for description in (generator.describe(), rewards.describe()):
                    with pytest.raises(Unavailable):
                        await description
                for session in sessions:
                    with pytest.raises(Unavailable):
                        await AsyncExitStack().enter_async_context(session)


async def test_a_backend_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against telling a caller, who has time, that its deadline passed.

    A stopped process accepts connections and says nothing; what is known of it must stand in.
    """
    monkeypatch.setattr(remote, "_DESCRIBE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_channel(address, retries=False) as channel:
            for ask in (RemoteGenerator(channel).describe, RemoteRewards(channel).describe):
                with pytest.raises(Unavailable):
                    await ask()
            recent = _Recent(RemoteGenerator(channel).describe, max_age_s=0)
            known = await ToyGenerator().describe()
            recent._value = known
            assert await recent.get() is known


@pytest.mark.parametrize("phase", ["open", "extend", "prune"])
async def test_a_generator_that_dies_while_it_is_asked(phase: str) -> None:
    """Guards against hanging on a dead stream, and against any other word for it."""
    async with remotes() as far:
        task = await held_in(phase, far)
        await far.generator_server.kill()
        with pytest.raises(Unavailable):
            await task
        await far.idle()


async def test_rewards_that_die_while_they_are_asked() -> None:
    """Guards against a session that outlives the request whose reward has gone."""
    async with remotes() as far:
        task = await held_in("score", far)
        await far.reward_server.kill()
        with pytest.raises(Unavailable):
            await task
        await far.idle()


@pytest.mark.parametrize("turns", range(0, 24, 2))
async def test_a_generator_that_dies_between_two_commands(turns: int) -> None:
    """Guards against INTERNAL for a stream that breaks inside a write: grpc calls it so.

    The death reaches the client some turns of the loop later, anywhere in the commands that
    follow; without the case in `_CommandStream` about one kill in seven told of a bug.
    """
    outcomes = [await _killed_after(turns) for _ in range(4)]
    assert outcomes == [Unavailable] * 4


async def _killed_after(turns: int) -> type[BaseException] | None:
    async with remotes(HeldGenerator(end_every=10**9)) as far:
        try:
            async with far.generator.open(PROMPT, 4, Sampling(), 8) as session:
                killing = asyncio.create_task(far.generator_server.kill())
                for _ in range(turns):
                    await asyncio.sleep(0)
                for until_tokens in range(1, 100):
                    await session.extend(until_tokens)
        except SpecrejError as error:
            return type(error)
        finally:
            await killing
    return None


async def test_a_generator_that_dies_after_the_last_round() -> None:
    """Guards against losing an answer that is complete, only because goodbye went unheard."""
    async with remotes() as far:
        task = await held_in("close", far)
        await far.generator_server.kill()
        events = await task
        assert isinstance(events[-1], Finished)
        await far.idle()


async def test_a_backend_that_is_back_is_found() -> None:
    """Guards against a channel that never tries again."""
    async with remotes() as far:
        await far.generator_server.kill()
        await far.generator_server.start()
        async with asyncio.timeout(BOUND_S):
            while not await _answers(far):  # noqa: ASYNC110  # nobody announces it
                await asyncio.sleep(0)


async def _answers(far: Remotes) -> bool:
    try:
        return isinstance((await events_of(REQUEST, far.generator, far.scorer))[-1], Finished)
    except Unavailable:
        return False


# What a backend says


class Refusing(HeldGenerator):
    """Refuses every session."""

    def __init__(self, error: SpecrejError) -> None:
        super().__init__()
        self._error = error

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        n: int,
        sampling: Sampling,
        first_round_tokens: int,
        cache_salt: str = "",
        first_candidate: int = 0,
    ) -> AsyncIterator[Session]:
        raise self._error
        yield


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest(
            [Violation("n", "needs 9 slots"), Violation("sampling.max_tokens", "too many")],
            reason="SLOTS_EXCEEDED",
            metadata={"needed": "9", "capacity": "8"},
        ),
        NotFound("no such thing", metadata={"there": "is another"}),
        Overloaded("64 wait already", retry_after_s=2.5, metadata={"waiting": "64"}),
        Unavailable("loading", retry_after_s=4),
        InternalError("the step failed"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_come_through_whole(error: SpecrejError) -> None:
    """Guards against a caller being told less than the backend said."""
    async with remote_generator(Refusing(error)) as generator:
        with pytest.raises(type(error)) as raised:
            await AsyncExitStack().enter_async_context(generator.open(PROMPT, 4, Sampling(), 8))
    told = raised.value
    assert (told.message, told.reason) == (error.message, error.reason)
    assert (told.retry_after_s, told.metadata) == (error.retry_after_s, error.metadata)
    assert getattr(told, "violations", ()) == getattr(error, "violations", ())


@pytest.mark.parametrize(
    "error",
    [Cancelled("by me"), DeadlineExceeded("mine"), SessionExpired("lease"), OutOfOrder("not now")],
)
async def test_a_backends_own_troubles_are_not_the_callers(error: SpecrejError) -> None:
    """Guards against CANCELLED for a caller who did not cancel, or FAILED_PRECONDITION for one who
    has no session: neither would ever be retried."""
    async with remote_generator(Refusing(error)) as generator:
        with pytest.raises(Unavailable):
            await AsyncExitStack().enter_async_context(generator.open(PROMPT, 4, Sampling(), 8))


@pytest.mark.parametrize("what", ["wrong_ids", "no_scores", "stale"])
async def test_an_answer_to_something_else_is_no_answer(what: str) -> None:
    """Guards against candidates ranked by the scores of another batch."""
    two = [Candidate(0, "one", 1, -1.0), Candidate(1, "two", 1, -1.0)]
    async with (
        grpc_rogue(only=what) as port,
        open_channel(f"127.0.0.1:{port}", retries=False) as channel,
        RemoteRewards(channel).scorer("toy").open(PROMPT) as session,
    ):
        with pytest.raises(InternalError, match="something else"):
            await session.score(two)


async def test_the_generators_own_checks_are_heard() -> None:
    """Guards against limits that the orchestrator alone knows; every violation, with its path."""
    async with remotes() as far:
        bad = Sampling(max_tokens=0, top_p=2.0)
        with pytest.raises(InvalidRequest) as raised:
            await AsyncExitStack().enter_async_context(far.generator.open(PROMPT, 5000, bad, 8))
    fields = [violation.field for violation in raised.value.violations]
    assert fields == ["open.n", "open.sampling.max_tokens", "open.sampling.top_p"]


async def test_an_unknown_reward() -> None:
    async with remotes() as far:
        with pytest.raises(NotFound, match="toy, other"):
            await AsyncExitStack().enter_async_context(far.rewards.scorer("nope").open(PROMPT))


class RogueRewards(RewardServicer):
    """Answers every batch with the same values, unchecked."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(max_batch=1024, lease_s=LEASE_S)
        self._values = values

    async def ScoreSession(  # type: ignore[override] # noqa: N802
        self, _requests: Any, context: Context
    ) -> None:
        await answer_commands(context, self._answer, reward_pb2.ScoreSessionResponse, LEASE_S)

    async def _answer(
        self, request: reward_pb2.ScoreSessionRequest
    ) -> reward_pb2.ScoreSessionResponse:
        if request.HasField("open"):
            return reward_pb2.ScoreSessionResponse(opened=reward_pb2.ScoringOpened())
        scores = reward_pb2.BatchScores(scores=self._values)
        return reward_pb2.ScoreSessionResponse(scores=scores)


RUBBISH = [[], [0.5] * 11, [0.5] * 13, [0.5] * 11 + [math.nan], [math.inf] * 12, [-math.inf] * 12]


@pytest.mark.parametrize("values", RUBBISH)
async def test_a_reward_service_that_answers_rubbish(values: list[float]) -> None:
    """Guards against ranking by what is no ranking; and the session must not outlive it."""
    async with remotes() as far, serving(RogueRewards(values).service()) as channel:
        rogue = RemoteRewards(channel).scorer("rogue")
        with pytest.raises(RewardInvalid):
            await events_of(REQUEST, far.generator, rogue)
        await far.idle()


async def test_rubbish_in_a_weighted_sum() -> None:
    """Guards against a sum that hides one part's rubbish, as 0 times NaN might."""
    async with remotes() as far, serving(RogueRewards([math.nan] * 12).service()) as channel:
        rogue = RemoteRewards(channel).scorer("rogue")
        wanted = request(rewards=(WeightedReward("likelihood"), WeightedReward("rogue")))
        with pytest.raises(RewardInvalid):
            await events_of(wanted, far.generator, Panel([LikelihoodScorer(), rogue]))
        await far.idle()


@pytest.mark.parametrize("values", [[0.5] * 11, [math.nan] * 12])
async def test_rubbish_that_the_reward_service_finds_itself(values: list[float]) -> None:
    """Guards against the one named kind of INTERNAL losing its name on the wire."""
    async with (
        remotes() as far,
        reward_backend(FixedReward(values)) as backend,
        channel_to(backend) as channel,
    ):
        with pytest.raises(RewardInvalid) as raised:
            await events_of(REQUEST, far.generator, RemoteRewards(channel).scorer("fixed"))
        assert raised.value.reason == "REWARD_INVALID"
        await far.idle()
