"""The run loop on toys: what Speculative Rejection promises, whatever the sizes."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator, ToySession
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, Panel
from specrej.contracts import (
    Admitted,
    Algorithm,
    Candidate,
    Degradation,
    Event,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    Generator,
    GeneratorDescription,
    Normalization,
    Prompt,
    Pruned,
    Round,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scorer,
    Scores,
    ScoringSession,
    Selection,
    Session,
    WeightedReward,
)
from specrej.errors import DeadlineExceeded, InternalError, RewardInvalid, Unavailable

PROMPT = Prompt.from_user("four words of prompt")
SCHEDULES = st.one_of(
    st.just(Schedule("memory")),
    st.builds(
        lambda tokens: Schedule("tokens", tokens=tuple(sorted(tokens))),
        st.sets(st.integers(1, 50), min_size=1, max_size=6),
    ),
    st.builds(Schedule, st.just("geometric"), st.just(()), st.integers(1, 20), st.floats(1.1, 4)),
)


class FixedScorer:
    """Returns what it is told, or counts its candidates' letters."""

    def __init__(self, values: Sequence[float] | None = None) -> None:
        self._values = values
        self.seen: list[int] = []

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        self.seen += [c.id for c in candidates if c.finish]
        values = self._values or [float(len(c.text)) for c in candidates]
        return Scores(tuple(values), computed_tokens=len(candidates))


class LetterScorer(FixedScorer):
    """The share of one letter: it differs between candidates, and wanders while they grow."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self._letter = letter

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return Scores(tuple(c.text.count(self._letter) / max(1, len(c.text)) for c in candidates))


async def events_of(
    request: GenerationRequest, generator: Generator, scorer: Scorer | Panel, **options: Any
) -> list[Event]:
    async with aclosing(run(request, generator, scorer, **options)) as events:
        return [event async for event in events]


async def answer(
    request: GenerationRequest, generator: Generator, scorer: Scorer | Panel, **options: Any
) -> Generation:
    last = (await events_of(request, generator, scorer, **options))[-1]
    assert isinstance(last, Finished)
    return last.generation


def request(n: int = 16, max_tokens: int = 60, **selection: object) -> GenerationRequest:
    chosen = replace(Selection(n=n, return_candidates=64), **selection)  # type: ignore[arg-type]
    return GenerationRequest(PROMPT, Sampling(max_tokens=max_tokens), chosen)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    max_tokens=st.integers(1, 60),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.99]),
    schedule=SCHEDULES,
    capacity=st.integers(70, 2000),
    end_every=st.integers(2, 80),
)
async def test_every_request_ends_with_an_answer_and_all_slots_free(
    n: int, max_tokens: int, alpha: float, schedule: Schedule, capacity: int, end_every: int
) -> None:
    """Progress, Never empty and Conservation, with capacities from ample to hardly enough."""
    generator = ToyGenerator(capacity, end_every=end_every)
    wanted = request(n, max_tokens, alpha=alpha, schedule=schedule)
    first = min(
        {"memory": schedule.first, "tokens": (*schedule.tokens, 0)[0]}.get(
            schedule.kind, schedule.first
        ),
        max_tokens,
    )
    if 4 + max(n * first, max_tokens) > capacity:
        return  # refused at admission, which is another test's matter
    events = await events_of(wanted, generator, FixedScorer())
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Finished)
    generation = events[-1].generation
    _check_accounts(generation, n)
    generator.ledger.check_integrity()
    assert generator.ledger.owned == 0
    for event in events[1:-1]:
        assert isinstance(event, RoundCompleted)
        trace = event.trace
        assert trace.num_live == len(event.survivors)
        if trace.ended_by is RoundEnd.SLOTS_FULL and trace.num_started > 1:
            assert trace.num_rejected + trace.num_finished >= 1


def _check_accounts(generation: Generation, n: int) -> None:
    """Honest accounting: every candidate has one fate, every token is counted once."""
    rounds = generation.rounds
    finished = sum(trace.num_finished for trace in rounds)
    rejected = sum(trace.num_rejected for trace in rounds)
    assert finished + rejected == n
    assert len(generation.candidates) == min(64, finished)
    assert generation.usage.generated_tokens == sum(trace.generated_tokens for trace in rounds)
    assert generation.usage.best_of_n_tokens_estimate >= generation.usage.generated_tokens
    reasons = [candidate.finish for candidate in generation.candidates]
    assert reasons == sorted(reasons, key=lambda reason: reason is FinishReason.LENGTH)
    for reason in FinishReason:
        scores = [c.score for c in generation.candidates if c.finish is reason]
        assert scores == sorted(scores, reverse=True)


async def test_survivors_are_what_they_would_be_without_cuts() -> None:
    """In place: a cut must not change what the others say."""
    everyone = await answer(
        request(algorithm=Algorithm.BEST_OF_N), ToyGenerator(), LikelihoodScorer()
    )
    survivors = await answer(request(alpha=0.5), ToyGenerator(), LikelihoodScorer())
    assert sum(trace.num_rejected for trace in survivors.rounds) > 0
    texts = {candidate.id: candidate.text for candidate in everyone.candidates}
    for candidate in survivors.candidates:
        assert candidate.text == texts[candidate.id]


async def test_best_of_n_rejects_nobody_in_one_round() -> None:
    generation = await answer(request(algorithm=Algorithm.BEST_OF_N), ToyGenerator(), FixedScorer())
    assert [trace.num_rejected for trace in generation.rounds] == [0]
    assert len(generation.candidates) == 16


async def test_speculative_rejection_makes_fewer_tokens() -> None:
    """With texts that run to their end; where most end at once there is little to save."""
    best_of_n = await answer(
        request(32, algorithm=Algorithm.BEST_OF_N), ToyGenerator(end_every=10**9), FixedScorer()
    )
    speculative = await answer(
        request(32, schedule=Schedule(first=8)), ToyGenerator(end_every=10**9), FixedScorer()
    )
    assert speculative.usage.generated_tokens < best_of_n.usage.generated_tokens / 2
    assert best_of_n.usage.best_of_n_tokens_estimate == best_of_n.usage.generated_tokens


async def test_a_finished_candidate_is_scored_once_and_never_lost() -> None:
    """It may be ranked out by live ones that look better, and still be the best answer."""

    class Fading(FixedScorer):
        """Live prefixes look splendid, their ends do not."""

        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            await super().score(candidates)
            return Scores(tuple(100.0 - c.id if c.finish is None else -c.id for c in candidates))

    scorer = Fading()
    generation = await answer(
        request(16, schedule=Schedule(first=4), alpha=0.75), ToyGenerator(end_every=9), scorer
    )
    assert len(scorer.seen) == len(set(scorer.seen))
    assert generation.best.score == max(c.score for c in generation.candidates)
    early = [trace.num_finished for trace in generation.rounds[:-1]]
    assert sum(early) > 0, "the case this test is about did not occur"


async def test_a_truncated_answer_only_where_none_is_complete() -> None:
    """Nobody ends before 5 tokens here, so all answers are truncated and say so."""
    generation = await answer(request(max_tokens=5), ToyGenerator(end_every=10**9), FixedScorer())
    assert generation.best.finish is FinishReason.LENGTH


async def test_memory_alone_ends_rounds_when_slots_are_full() -> None:
    """The paper's own trigger: with room for a quarter, the live set shrinks as texts grow."""
    wanted = request(32, 64, schedule=Schedule("memory"))
    generator = ToyGenerator(32 * 16 + 10, end_every=10**9)
    generation = await answer(wanted, generator, FixedScorer())
    full = [t for t in generation.rounds if t.ended_by is RoundEnd.SLOTS_FULL]
    assert len(full) >= 2
    assert all(trace.freed_slots > 0 for trace in full)


@pytest.mark.parametrize("values", [[math.nan] * 16, [math.inf] * 16, [1.0] * 15, [1.0] * 17])
async def test_rubbish_scores_are_refused(values: list[float]) -> None:
    """A NaN sorts anywhere: ranking by it would reject at random. Slots are free afterwards."""
    generator = ToyGenerator()
    with pytest.raises(RewardInvalid):
        await answer(request(), generator, FixedScorer(values))
    assert generator.ledger.owned == 0


async def test_a_generator_that_loses_candidates_is_found_out() -> None:
    """The loop waits until nobody is live: a candidate never heard of again would be for ever."""

    class Losing(ToyGenerator):
        @asynccontextmanager
        async def open(self, *arguments: Any) -> AsyncIterator[ToySession]:
            async with super().open(*arguments) as session:
                extend = session.extend

                async def lossy(until_tokens: int) -> Round:
                    whole = await extend(until_tokens)
                    return replace(whole, candidates=whole.candidates[1:])

                session.extend = lossy  # type: ignore[method-assign]
                yield session

    with pytest.raises(InternalError, match="lost"):
        await answer(request(), Losing(), FixedScorer())


async def test_leaving_early_frees_the_slots() -> None:
    """A client that goes away after the first round."""
    generator = ToyGenerator()
    async with aclosing(run(request(), generator, FixedScorer())) as events:
        async for event in events:
            if isinstance(event, RoundCompleted):
                break
        assert generator.ledger.owned > 0
    assert generator.ledger.owned == 0


async def test_logprobs_add_up_over_all_rounds() -> None:
    """Guards against an answer that tells of its last round's tokens only, or of a neighbour's."""
    wanted = request(schedule=Schedule(first=4))
    wanted = replace(wanted, sampling=replace(wanted.sampling, logprobs=True))
    generation = await answer(wanted, ToyGenerator(end_every=20), FixedScorer())
    assert len(generation.rounds) > 2, "the case this test is about did not occur"
    assert len({candidate.token_ids for candidate in generation.candidates}) > 1
    for candidate in generation.candidates:
        assert len(candidate.token_ids) == len(candidate.logprobs) == candidate.num_tokens
        total = candidate.mean_logprob * candidate.num_tokens
        assert sum(candidate.logprobs) == pytest.approx(total)


async def test_no_logprobs_unless_asked_for() -> None:
    """Guards against every answer carrying, and the cache storing, what nobody asked for."""
    generation = await answer(request(), ToyGenerator(), FixedScorer())
    assert not any(c.token_ids or c.logprobs for c in generation.candidates)


async def test_the_salt_reaches_the_generator() -> None:
    """Guards against prompt prefixes shared by all because the salt was dropped on the way."""
    seen = []

    class Salted(ToyGenerator):
        @asynccontextmanager
        async def open(self, *arguments: Any) -> AsyncIterator[ToySession]:
            seen.append(arguments[-1])
            async with super().open(*arguments) as session:
                yield session

    async with aclosing(run(request(), Salted(), FixedScorer(), "pepper")) as events:
        assert [event async for event in events]
    assert seen == ["pepper"]


# Several rewards, normalisation and vetoes


async def test_weighted_rewards_add_up() -> None:
    """Guards against weights on the wrong reward, and raw values that are none, or another's."""
    plain = await answer(request(alpha=0.0), ToyGenerator(), LikelihoodScorer())
    weighted = (WeightedReward("likelihood", 2.0), WeightedReward("length", -0.5))
    panel = Panel([LikelihoodScorer(), FixedScorer()])
    mixed = await answer(request(alpha=0.0, rewards=weighted), ToyGenerator(), panel)
    likelihoods = {c.id: c.score for c in plain.candidates}
    assert {c.id for c in mixed.candidates} == set(likelihoods)
    for candidate in mixed.candidates:
        assert candidate.rewards == (likelihoods[candidate.id], len(candidate.text))
        expected = 2 * likelihoods[candidate.id] - 0.5 * len(candidate.text)
        assert candidate.score == pytest.approx(expected)


async def test_a_sole_reward_has_its_weight_and_its_raw_value() -> None:
    """Guards against a weight that counts only in company: its sign turns the ranking round."""
    weighted = request(rewards=(WeightedReward("length", -2.0),))
    generation = await answer(weighted, ToyGenerator(), FixedScorer())
    for candidate in generation.candidates:
        assert candidate.rewards == (len(candidate.text),)
        assert candidate.score == -2.0 * len(candidate.text)
        assert not candidate.vetoed


async def test_the_order_of_rewards_does_not_matter() -> None:
    """Guards against equal requests with different answers: raw values alone change places."""
    parts = {"a": WeightedReward("a", 0.1), "e": WeightedReward("e", 0.3)}
    one, other = [
        await answer(
            request(rewards=tuple(parts[letter] for letter in order)),
            ToyGenerator(),
            Panel([LetterScorer(letter) for letter in order]),
        )
        for order in ("ae", "ea")
    ]
    turned = tuple(replace(c, rewards=c.rewards[::-1]) for c in other.candidates)
    assert turned == one.candidates


async def test_batch_normalisation_compares_all_that_count() -> None:
    """Guards against answers of early rounds that keep a score of other company, or that no longer
    count once they are ranked out.

    After the only cut everybody finishes: by hand it must come to the same scores.
    """
    rewards = (
        WeightedReward("a", 1.0, Normalization("batch")),
        WeightedReward("e", -0.5, Normalization("batch")),
    )
    panel = Panel([LetterScorer("a"), LetterScorer("e")])
    wanted = request(16, schedule=Schedule("tokens", tokens=(8,)), rewards=rewards)
    generation = await answer(wanted, ToyGenerator(end_every=20), panel)
    first, last = generation.rounds
    assert last.num_rejected == 0
    assert first.num_finished + first.num_live > 8, "nobody finished and was ranked out"
    columns = [[c.rewards[index] for c in generation.candidates] for index in (0, 1)]
    for candidate in generation.candidates:
        one, two = (
            (value - statistics.fmean(column)) / statistics.pstdev(column)
            for value, column in zip(candidate.rewards, columns, strict=True)
        )
        assert candidate.score == pytest.approx(one - 0.5 * two)


async def test_batch_normalisation_knows_no_unit() -> None:
    """Guards against cuts that hang on a reward's unit: millions of it give the same answers."""

    class Scaled(LetterScorer):
        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            scores = await super().score(candidates)
            return Scores(tuple(2.0**20 * value for value in scores.values))

    rewards = (
        WeightedReward("a", 1.0, Normalization("batch")),
        WeightedReward("e", 1.0, Normalization("batch")),
    )
    one, other = [
        await answer(request(rewards=rewards), ToyGenerator(), Panel([LetterScorer("a"), second]))
        for second in (LetterScorer("e"), Scaled("e"))
    ]
    assert [(c.id, c.score) for c in one.candidates] == [(c.id, c.score) for c in other.candidates]


@pytest.mark.parametrize("algorithm", list(Algorithm))
async def test_a_veto_overrules_every_score(algorithm: Algorithm) -> None:
    """Guards against a threshold that a good score outweighs, in a run with cuts and without."""

    def wanted(veto_below: float | None) -> GenerationRequest:
        reward = WeightedReward("length", -1.0, veto_below=veto_below)
        return request(algorithm=algorithm, rewards=(reward,), alpha=0.25)

    shortest = (await answer(wanted(None), ToyGenerator(), FixedScorer())).best
    threshold = shortest.rewards[0] + 1
    generation = await answer(wanted(threshold), ToyGenerator(), FixedScorer())
    assert generation.best.id != shortest.id
    assert not generation.best.vetoed
    for candidate in generation.candidates:
        assert candidate.vetoed == (candidate.rewards[0] < threshold)
    order = [candidate.vetoed for candidate in generation.candidates]
    assert order == sorted(order)
    best_score = max(candidate.score for candidate in generation.candidates if not candidate.vetoed)
    assert generation.rounds[-1].best_score == best_score


async def test_vetoed_prefixes_are_rejected_at_the_decision_token() -> None:
    """Guards against vetoes that wait for the end: alpha 0 alone would reject nobody."""
    schedule = Schedule("tokens", tokens=(10,))
    reward = WeightedReward("a", veto_below=0.06)
    wanted = request(alpha=0.0, schedule=schedule, rewards=(reward,))
    generation = await answer(wanted, ToyGenerator(end_every=10**9), LetterScorer("a"))
    first = generation.rounds[0]
    assert 0 < first.num_vetoed < first.num_started, "the case this test is about did not occur"
    assert first.num_rejected == first.num_vetoed
    assert first.freed_slots == 10 * first.num_vetoed


async def test_all_vetoed_is_still_an_answer() -> None:
    """Never empty: the best of the vetoed goes on alone, and says what it is."""
    reward = WeightedReward("length", veto_below=1e9)
    wanted = request(schedule=Schedule(first=4), rewards=(reward,))
    generation = await answer(wanted, ToyGenerator(end_every=10**9), FixedScorer())
    assert [trace.num_live for trace in generation.rounds[:-1]] == [1] * len(generation.rounds[:-1])
    assert generation.rounds[0].num_vetoed == generation.rounds[0].num_started
    assert [candidate.vetoed for candidate in generation.candidates] == [True]


async def test_a_vetoed_end_is_no_answer_while_another_may_come() -> None:
    """Guards against a veto that ends the request with the worst of answers."""

    class LateBloomer(FixedScorer):
        """Whatever is short is vetoed, complete or not."""

        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            return Scores(tuple(float(c.num_tokens > 4) for c in candidates))

    reward = WeightedReward("late", veto_below=1.0)
    wanted = request(32, schedule=Schedule("tokens", tokens=(4, 8)), rewards=(reward,))
    generation = await answer(wanted, ToyGenerator(end_every=30), LateBloomer())
    first = generation.rounds[0]
    assert first.num_finished, "the case this test is about did not occur"
    assert first.num_live == 1
    assert [candidate.vetoed for candidate in generation.candidates] == (
        [False] + [True] * first.num_finished
    )


async def test_an_answer_that_was_ranked_out_ends_what_is_vetoed() -> None:
    """Guards against a vetoed candidate that goes on although an answer without a veto is there."""

    class Souring(FixedScorer):
        """Early answers are dull, prefixes splendid at first; whatever is longer is vetoed."""

        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            return Scores(tuple(self._value(c) for c in candidates))

        def _value(self, candidate: Candidate) -> float:
            if candidate.num_tokens > 8:
                return 0.0
            return 1.0 if candidate.finish else 10.0

    reward = WeightedReward("r", veto_below=0.5)
    wanted = request(16, schedule=Schedule("tokens", tokens=(8, 12)), rewards=(reward,))
    generation = await answer(wanted, ToyGenerator(end_every=16), Souring())
    first, second = generation.rounds
    assert first.num_finished and first.num_live, "the case this test is about did not occur"
    assert second.num_live == 0
    assert second.num_vetoed == second.num_rejected > 0
    assert generation.best.rewards == (1.0,) and not generation.best.vetoed


async def test_vetoes_release_full_slots() -> None:
    """Progress: a round that counts vetoes and keeps all others would end at once, for ever."""
    reward = WeightedReward("a", veto_below=0.05)
    wanted = request(32, 64, alpha=0.0, schedule=Schedule("memory"), rewards=(reward,))
    generator = ToyGenerator(32 * 16 + 10, end_every=10**9)
    generation = await answer(wanted, generator, LetterScorer("a"))
    full = [trace for trace in generation.rounds if trace.ended_by is RoundEnd.SLOTS_FULL]
    assert any(trace.num_vetoed for trace in full), "the case this test is about did not occur"
    assert all(trace.num_rejected >= max(1, trace.num_vetoed) for trace in full)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 24),
    alpha=st.sampled_from([0.0, 0.5, 0.9]),
    schedule=SCHEDULES,
    capacity=st.sampled_from([500, 1000, 100_000]),
    end_every=st.integers(2, 80),
    rewards=st.lists(
        st.builds(
            WeightedReward,
            st.sampled_from("aeo"),
            st.sampled_from([-1.0, 0.5, 2.0]),
            st.sampled_from([Normalization(), Normalization("batch")]),
            st.none() | st.floats(0, 0.2),
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda reward: reward.name,
    ),
)
async def test_vetoes_keep_what_is_promised(
    n: int,
    alpha: float,
    schedule: Schedule,
    capacity: int,
    end_every: int,
    rewards: list[WeightedReward],
) -> None:
    """Progress, Never empty and the accounts hold, whoever is vetoed; and nobody else is."""
    generator = ToyGenerator(capacity, end_every=end_every)
    wanted = request(n, 20, alpha=alpha, schedule=schedule, rewards=tuple(rewards))
    panel = Panel([LetterScorer(reward.name) for reward in rewards])
    events = await events_of(wanted, generator, panel)
    assert isinstance(events[-1], Finished)
    generation = events[-1].generation
    assert generator.ledger.owned == 0
    merits = [(c.vetoed, c.finish is FinishReason.LENGTH, -c.score) for c in generation.candidates]
    assert merits == sorted(merits)
    for candidate in generation.candidates:
        below = zip(candidate.rewards, rewards, strict=True)
        assert candidate.vetoed == any(v < (r.veto_below or -1) for v, r in below)
    for trace in generation.rounds:
        # One vetoed candidate may go on, where nobody else is left.
        assert trace.num_rejected >= trace.num_vetoed - 1
        if trace.num_live > 1:
            assert trace.num_rejected >= trace.num_vetoed
    finished = sum(trace.num_finished for trace in generation.rounds)
    assert finished + sum(trace.num_rejected for trace in generation.rounds) == n


class SlowGenerator:
    """A toy generator whose tokens take time on a clock of its own; may break off, or hang."""

    def __init__(self, step_s: float = 0.0, breaks_at: int = 10**9, hangs_at: int = 10**9) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.breaks_at = breaks_at
        self.hangs_at = hangs_at
        self.toy = ToyGenerator()

    def clock(self) -> float:
        return self.now_s

    @asynccontextmanager
    async def open(self, *arguments: Any) -> AsyncIterator[Session]:
        async with self.toy.open(*arguments) as session:
            yield SlowSession(self, session)

    async def describe(self) -> GeneratorDescription:
        return await self.toy.describe()


class SlowSession:
    def __init__(self, generator: SlowGenerator, session: Session) -> None:
        self._generator = generator
        self._session = session
        self._at = 0
        self.n, self.prompt_tokens = session.n, session.prompt_tokens

    async def extend(self, until_tokens: int) -> Round:
        if until_tokens > self._generator.breaks_at:
            raise Unavailable("gone")
        if until_tokens > self._generator.hangs_at:
            await asyncio.Event().wait()
        ended = await self._session.extend(until_tokens)
        self._generator.now_s += (ended.num_tokens - self._at) * self._generator.step_s
        self._at = ended.num_tokens
        return ended

    async def prune(self, keep: Collection[int]) -> Pruned:
        return await self._session.prune(keep)


def lenient(**selection: object) -> GenerationRequest:
    return replace(request(**selection), allow_degraded=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("time_left_s", [4.0, 5.0, 20.0])
async def test_a_deadline_that_is_too_short_for_the_plan_still_has_a_complete_answer(
    algorithm: Algorithm, time_left_s: float
) -> None:
    """Guards the point of it: the answer is there in time, whole, and what was hurried is said."""
    asked = request(alpha=0.1, algorithm=algorithm)
    plan = await answer(asked, SlowGenerator(0.1), FixedScorer())
    generator = SlowGenerator(0.1)
    found = await answer(
        asked, generator, FixedScorer(), time_left_s=time_left_s, clock=generator.clock
    )
    assert generator.now_s <= time_left_s
    assert found.best.finish is FinishReason.STOP
    assert not found.degraded
    assert found.hurried == (time_left_s < 20)
    if not found.hurried:
        assert found.candidates == plan.candidates
    assert generator.toy.ledger.owned == 0


async def test_strides_change_no_token() -> None:
    """Guards against a deadline, however far away, that changes the answer."""
    asked = request(algorithm=Algorithm.BEST_OF_N)
    plain = await answer(asked, ToyGenerator(), LetterScorer("a"))
    timed = await answer(asked, ToyGenerator(), LetterScorer("a"), time_left_s=1e6)
    assert timed.candidates == plain.candidates
    assert timed.usage == plain.usage
    assert len(timed.rounds) == len(plain.rounds) == 1


@pytest.mark.parametrize("allow", [True, False])
async def test_out_of_time_before_any_answer_is_complete(allow: bool) -> None:
    """Guards both callers: who allows it has the best text so far, who does not is told."""
    generator = SlowGenerator(1.0)
    asked = replace(
        request(), allow_degraded=allow, sampling=Sampling(max_tokens=60, min_tokens=60)
    )
    options: dict[str, Any] = {"time_left_s": 20.0, "clock": generator.clock}
    if not allow:
        with pytest.raises(DeadlineExceeded):
            await answer(asked, generator, FixedScorer(), **options)
    else:
        found = await answer(asked, generator, FixedScorer(), **options)
        assert found.degradations == (Degradation.DEADLINE,)
        assert found.best.finish is FinishReason.LENGTH
        assert 0 < found.best.num_tokens <= 20
    assert generator.now_s <= 20
    assert generator.toy.ledger.owned == 0


async def test_a_generator_that_hangs_is_not_waited_for_beyond_the_deadline() -> None:
    """Guards the answer against a backend that has stopped, and neither fails nor goes on."""
    generator = SlowGenerator(hangs_at=16)
    found = await asyncio.wait_for(
        answer(lenient(), generator, FixedScorer(), time_left_s=0.3), timeout=10
    )
    assert found.candidates
    assert found.hurried or found.degradations == (Degradation.DEADLINE,)


class FailingScorer(FixedScorer):
    """Fails from its `first`-th batch on; 0: already when it is opened."""

    def __init__(self, first: int, error: Exception) -> None:
        super().__init__()
        self._left = first
        self._error = error

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[ScoringSession]:
        if not self._left:
            raise self._error
        yield self

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        self._left -= 1
        if not self._left:
            raise self._error
        return await super().score(candidates)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("error", [Unavailable("gone"), RewardInvalid("rubbish")])
async def test_where_a_reward_cannot_be_had_the_likelihood_stands_in(
    first: int, error: Exception
) -> None:
    """Guards the ladder: flagged, and never a ranking of values of two kinds."""
    with pytest.raises(type(error)):
        await answer(request(), ToyGenerator(), FailingScorer(first, error))
    found = await answer(lenient(), ToyGenerator(), FailingScorer(first, error))
    assert found.degradations == (Degradation.REWARD,)
    assert all(each.rewards == (each.score,) for each in found.candidates)
    assert all(each.score == pytest.approx(each.mean_logprob) for each in found.candidates)
    if first < 2:
        plain = await answer(request(), ToyGenerator(), LikelihoodScorer())
        assert found.candidates == plain.candidates


class ChangingSession(SlowSession):
    """Of two generators, one after the other."""

    async def extend(self, until_tokens: int) -> Round:
        ended = await super().extend(until_tokens)
        return replace(ended, made_by=frozenset({"old" if until_tokens <= 16 else "new"}))


class ChangingGenerator(SlowGenerator):
    @asynccontextmanager
    async def open(self, *arguments: Any) -> AsyncIterator[Session]:
        async with self.toy.open(*arguments) as session:
            yield ChangingSession(self, session)


class ChangingScorer(FixedScorer):
    """Another one from each batch to the next."""

    def __init__(self, *fingerprints: str) -> None:
        super().__init__()
        self._fingerprints = cycle(fingerprints)

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        return replace(await super().score(candidates), fingerprint=next(self._fingerprints))


async def test_an_answer_says_who_made_it() -> None:
    """Guards against the name of one version on an answer in which two had a part."""
    asked, in_strides = request(), request(algorithm=Algorithm.BEST_OF_N)
    assert (await answer(asked, ToyGenerator(), FixedScorer())).generator_fingerprint == ""
    timed = await answer(in_strides, ChangingGenerator(), FixedScorer(), time_left_s=60.0)
    assert len(timed.rounds) == 1
    found = await answer(asked, ChangingGenerator(), ChangingScorer("old", "new"))
    assert timed.generator_fingerprint == found.generator_fingerprint == "new+old"
    parts = {
        (await answer(asked, ToyGenerator(), ChangingScorer(name))).reward_fingerprint
        for name in ("old", "new")
    }
    assert found.reward_fingerprint == "+".join(sorted(parts)) and len(parts) == 2


class StallingScorer(FixedScorer):
    """Does not answer its `batch`-th batch; knows whether anybody still waits for it."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.is_waiting = False
        self._left = batch

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        self._left -= 1
        if not self._left:
            self.is_waiting = True
            try:
                await asyncio.Event().wait()
            finally:
                self.is_waiting = False
        return await super().score(candidates)


async def test_where_one_reward_fails_the_others_are_not_left_behind() -> None:
    """Guards against scoring that goes on, and sessions that it opens, after the panel is closed:
    a backend would count them as running for ever."""
    stalling = StallingScorer(1)
    waited: list[bool] = []

    class Failing(FixedScorer):
        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            waited.append(stalling.is_waiting)
            raise Unavailable("gone")

    async with Panel([stalling, Failing()]).open(PROMPT) as session:
        with pytest.raises(Unavailable):
            await session.rate([Candidate(0, "one", 1, -1.0)])
        assert waited == [True], "the case did not occur"
        assert not stalling.is_waiting


@pytest.mark.parametrize("batch", [1, 3])
async def test_a_reward_that_stalls_is_not_waited_for_beyond_the_deadline(batch: int) -> None:
    """Guards the answer against a reward that neither fails nor goes on: the likelihood ranks what
    there is, and who does not allow that is told while there is time."""
    async with asyncio.timeout(10):
        found = await answer(
            lenient(alpha=0.0), ToyGenerator(), StallingScorer(batch), time_left_s=0.5
        )
        with pytest.raises(TimeoutError):
            await answer(request(), ToyGenerator(), StallingScorer(batch), time_left_s=0.3)
    assert Degradation.REWARD in found.degradations
    if batch > 1:  # enough to have whole answers
        assert found.degradations == (Degradation.REWARD,)
        assert found.best.finish is FinishReason.STOP


async def test_where_the_generator_breaks_off_the_best_complete_answer_stands_in() -> None:
    """Guards answers that are complete already, and callers who did not allow it."""
    asked = lenient(alpha=0.0)
    whole = await answer(asked, SlowGenerator(), FixedScorer())
    at = sorted(each.num_tokens for each in whole.candidates)[len(whole.candidates) // 2]
    found = await answer(asked, SlowGenerator(breaks_at=at), FixedScorer())
    assert found.degradations == (Degradation.GENERATOR,)
    complete = [each for each in whole.candidates if each.finish is FinishReason.STOP]
    assert found.best in complete
    with pytest.raises(Unavailable):
        await answer(request(alpha=0.0), SlowGenerator(breaks_at=at), FixedScorer())
    with pytest.raises(Unavailable):  # nothing is complete: then only the error is left
        await answer(asked, SlowGenerator(breaks_at=1), FixedScorer())
