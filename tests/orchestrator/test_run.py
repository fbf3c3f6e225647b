"""The run loop on toys: what Speculative Rejection promises, whatever the sizes."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator, ToySession
from orchestrator.run import run
from orchestrator.scoring import LikelihoodScorer, WeightedScorer
from specrej.contracts import (
    Admitted,
    Algorithm,
    Candidate,
    Event,
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    Prompt,
    Round,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scorer,
    Scores,
    ScoringSession,
    Selection,
)
from specrej.errors import InternalError, RewardInvalid

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


async def events_of(
    request: GenerationRequest, generator: ToyGenerator, scorer: Scorer
) -> list[Event]:
    async with aclosing(run(request, generator, scorer)) as events:
        return [event async for event in events]


async def answer(request: GenerationRequest, generator: ToyGenerator, scorer: Scorer) -> Generation:
    last = (await events_of(request, generator, scorer))[-1]
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


async def test_weighted_rewards_add_up() -> None:
    plain = await answer(request(alpha=0.0), ToyGenerator(), LikelihoodScorer())
    parts: list[tuple[Scorer, float]] = [(LikelihoodScorer(), 2.0), (FixedScorer(), -0.5)]
    mixed = await answer(request(alpha=0.0), ToyGenerator(), WeightedScorer(parts))
    likelihoods = {c.id: c.score for c in plain.candidates}
    for candidate in mixed.candidates:
        expected = 2 * likelihoods[candidate.id] - 0.5 * len(candidate.text)
        assert candidate.score == pytest.approx(expected)
