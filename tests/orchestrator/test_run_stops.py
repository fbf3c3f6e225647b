"""The loop with stages, stops, waves and votes, on toys."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator, ToySession
from specrej import contracts as c
from specrej.contracts.errors import Overloaded, Unavailable
from tests.orchestrator.runs import (
    FaultyGenerator,
    FaultyScorer,
    FixedScorer,
    answer,
    events_of,
    request,
)

BEST_OF_N = c.Algorithm.BEST_OF_N
# Right answers of the toy, about one in four, and what answers vote for.
RIGHT = FixedScorer(lambda made: float(made.text.count("elm") % 4 == 1))


async def answers_of(generator: ToyGenerator | None = None, **options: Any) -> c.Generation:
    """The answer of a toy, whose slots are free afterwards."""
    generator = generator or ToyGenerator()
    sampling = {"seed": options.pop("seed", 1)}
    run_options = {key: options.pop(key) for key in ("cheap", "extract") if key in options}
    scorers = options.pop("scorers", None) or [RIGHT] * len(options.get("rewards", "1"))
    generation = await answer(
        request(sampling=sampling, **options), generator, scorers, **run_options
    )
    assert generator.ledger.owned == 0
    return generation


def texts_of(generation: c.Generation) -> dict[int, str]:
    return {one.id: one.text for one in generation.candidates}


@given(st.integers(0, 40), st.integers(1, 9), st.sampled_from([0, 1, 2, 3, 8, 20]))
async def test_waves_that_end_at_the_first_right_answer(seed: int, n: int, waves: int) -> None:
    """Guards the pass rate of Best-of-N: a candidate is the same in whichever wave, and a right one
    is returned exactly if there is one among all n."""
    every = await answers_of(seed=seed, n=n, algorithm=BEST_OF_N)
    some = await answers_of(seed=seed, n=n, algorithm=BEST_OF_N, waves=waves, stop_at=1.0)
    assert (some.best.score == 1) == (every.best.score == 1)
    assert some.stopped_by in (None, c.StopReason.SCORE)
    assert texts_of(some).items() <= texts_of(every).items()
    assert some.usage.generated_tokens <= every.usage.generated_tokens
    if some.best.score < 1:
        assert (some.num_begun, texts_of(some)) == (n, texts_of(every))
    assert some.n == n
    assert some.num_begun <= n


async def test_the_rounds_of_waves_say_which_one_they_belong_to() -> None:
    generation = await answers_of(n=6, waves=2, algorithm=BEST_OF_N)
    assert [(trace.wave, trace.num_started) for trace in generation.rounds] == [
        (1, 2),
        (2, 2),
        (3, 2),
    ]


async def test_an_answer_ends_the_request_within_one_stride() -> None:
    """Guards slots that are held until the next decision token, 60 tokens away."""
    generator = ToyGenerator(end_every=40)
    right = FixedScorer(lambda made: 1.0 if made.finish else 0.0)
    generation = await answers_of(
        generator, scorers=[right], n=16, algorithm=BEST_OF_N, stop_at=1.0, max_tokens=500
    )
    (trace,) = generation.rounds
    assert generation.stopped_by is c.StopReason.SCORE
    assert (trace.is_check, trace.decision_token) == (True, 16)
    assert generation.usage.generated_tokens <= 16 * 16


@given(st.integers(0, 60), st.integers(1, 16), st.sampled_from([0, 2, 5]))
async def test_a_vote_that_cannot_be_lost_is_that_of_all_candidates(
    seed: int, n: int, waves: int
) -> None:
    """Guards the exact stop: it returns what the exhaustive vote returns."""
    options: dict[str, Any] = {"seed": seed, "n": n, "algorithm": BEST_OF_N, "waves": waves}

    def parity(text: str) -> str:
        return str(len(text.split()) % 5 > 0)  # most agree

    early = await answers_of(**options, vote=c.Vote(), extract=parity)
    options |= {"waves": 0, "vote": c.Vote(weight="reward")}  # which never ends early
    every = await answers_of(**options, extract=parity)
    votes = [one.vote for one in every.candidates if one.finish is c.FinishReason.STOP]
    if early.stopped_by:
        assert early.stopped_by is c.StopReason.VOTE
        assert votes.count(early.best.vote) > len(votes) / 2
    if early.votes:
        assert sum(share.share for share in early.votes) == pytest.approx(1)
        assert early.num_distinct == len(early.votes) <= 2


async def test_some_vote_ends_early() -> None:
    generation = await answers_of(
        n=16, algorithm=BEST_OF_N, waves=4, vote=c.Vote(), extract=lambda _: "yes"
    )
    assert generation.stopped_by is c.StopReason.VOTE
    assert generation.num_begun == 12, "9 of 16 must agree, in waves of 4"
    assert generation.votes[0].answer == generation.best.vote == "yes"


async def test_candidates_without_a_vote_are_answers_of_last_resort() -> None:
    scorer = FixedScorer(lambda made: float(len(made.text)))
    voting: dict[str, Any] = {"n": 8, "algorithm": BEST_OF_N, "vote": c.Vote(), "seed": 3}
    voting["scorers"] = [scorer]
    generation = await answers_of(**voting, extract=lambda t: "short" if len(t) < 60 else None)
    assert generation.best.vote == "short"
    assert max(one.score for one in generation.candidates) > generation.best.score
    none = await answers_of(**voting, extract=lambda _: None)
    assert (none.best.vote, none.votes, none.num_distinct) == (None, (), 0)
    assert none.best.score == max(one.score for one in none.candidates)


async def test_a_reward_of_the_end_scores_only_what_ends_without_a_veto() -> None:
    """Guards the cost of a judge, and the order of answers by what chooses them."""
    judge = FixedScorer(lambda made: -float(len(made.text)))
    asked: list[c.Candidate] = []
    judge_score = judge.score

    async def score(candidates: Any) -> Any:
        asked.extend(candidates)
        return await judge_score(candidates)

    judge.score = score  # type: ignore[method-assign]
    short = FixedScorer(lambda made: float(len(made.text) < 200))
    rewards = (
        c.WeightedReward("short", stage="cuts", veto_below=1.0),
        c.WeightedReward("judge", stage="end"),
    )
    generation = await answers_of(rewards=rewards, scorers=[short, judge], n=16, alpha=0.0, seed=3)
    assert all(one.finish and len(one.text) < 200 for one in asked)
    assert len({one.id for one in asked}) == len(asked)
    good = [one for one in generation.candidates if not one.vetoed]
    assert len(good) == len(asked) < 16
    by_length = sorted(good, key=lambda one: len(one.text))
    assert [one.score for one in good] == [-float(len(one.text)) for one in by_length]
    vetoed = [one for one in generation.candidates if one.vetoed]
    assert all(one.rewards[0] == 0 and math.isnan(one.rewards[1]) for one in vetoed)


async def test_without_a_reward_for_cuts_nothing_is_rejected() -> None:
    rewards = (c.WeightedReward("judge", stage="end"),)
    generation = await answers_of(rewards=rewards, n=8, alpha=0.5)
    assert len(generation.candidates) == 8
    assert sum(trace.num_rejected for trace in generation.rounds) == 0


async def test_a_reward_of_cuts_does_not_choose_the_answer() -> None:
    cuts = FixedScorer(lambda made: float(made.id))
    rewards = (c.WeightedReward("cuts", stage="cuts"), c.WeightedReward("end", stage="end"))
    end = FixedScorer(lambda made: -float(made.id))
    generation = await answers_of(rewards=rewards, scorers=[cuts, end], n=8, alpha=0.5, seed=3)
    ended = [one.id for one in generation.candidates]
    assert ended == sorted(ended)
    assert len(ended) < 8, "the cuts rejected some, by their own scores"
    rejected = {
        one.id for t in generation.rounds for one in t.candidates if one.fate is c.Fate.REJECTED
    }
    assert rejected and min(rejected) < max(ended)


@pytest.mark.parametrize("cheap", [{"bound"}, set()])
async def test_a_cheap_reward_vetoes_within_rounds(cheap: set[str]) -> None:
    """Guards tokens of candidates that no further text can repair."""
    bound = FixedScorer(lambda made: float(made.id % 2 == 0 or made.num_tokens < 5))
    other = FixedScorer()
    rewards = (c.WeightedReward("bound", veto_below=1.0), c.WeightedReward("other", stage="end"))
    generation = await answers_of(
        rewards=rewards, scorers=[bound, other], n=8, algorithm=BEST_OF_N, cheap=cheap
    )
    first = generation.rounds[0]
    assert first.is_check == bool(cheap)
    assert (first.decision_token == 16) == bool(cheap)
    assert generation.best.id % 2 == 0
    if cheap:
        assert all(one.id % 2 == 0 or one.num_tokens <= 16 for one in generation.candidates)


class Doubtful(ToyGenerator):
    """Odd candidates of the later waves are not confident."""

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
        assert spec.sampling.top_logprobs == 5
        async with super().open(spec) as session:
            extend = session.extend

            async def doubting(until_tokens: int, report: Any = None) -> Any:
                ended = await extend(until_tokens, report)
                candidates = [
                    replace(made, new_top_logprobs=tuple(0.0 for _ in made.new_top_logprobs))
                    if made.id >= 4 and made.id % 2
                    else made
                    for made in ended.candidates
                ]
                return replace(ended, candidates=tuple(candidates))

            session.extend = doubting  # type: ignore[method-assign]
            yield session


async def test_less_confident_candidates_of_later_waves_end() -> None:
    generator = Doubtful(end_every=200)
    generation = await answers_of(
        generator, n=8, waves=4, alpha=0.0, confidence_cut=c.ConfidenceCut(0.9, 8)
    )
    ended = {one.id for one in generation.candidates}
    assert {0, 1, 2, 3} <= ended, "the first wave is whole"
    rejected = {
        one.id
        for trace in generation.rounds
        for one in trace.candidates
        if one.fate is c.Fate.REJECTED
    }
    assert {5, 7} <= rejected
    assert not any(one.logprobs or one.token_ids for one in generation.candidates)


async def test_a_wave_that_would_be_late_does_not_begin() -> None:
    generator = FaultyGenerator(token_s=1.0, end_every=10_000)
    asking = request(n=8, max_tokens=20, waves=2, algorithm=BEST_OF_N)
    events = await events_of(asking, generator, RIGHT, time_left_s=50.0, clock=generator.clock)
    generation = events[-1].generation  # type: ignore[union-attr]
    assert (generation.num_begun, generation.hurried, generation.degraded) == (4, True, False)
    assert len(generation.candidates) == 4


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("away")])
async def test_a_wave_without_a_session_leaves_the_answers_so_far(error: Exception) -> None:
    class Full(ToyGenerator):
        @asynccontextmanager
        async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
            if spec.first_id:
                raise error
            async with super().open(spec) as session:
                yield session

    generation = await answers_of(Full(), n=8, waves=2, algorithm=BEST_OF_N)
    assert (generation.num_begun, generation.reduced) == (2, True)


async def test_a_generator_lost_in_a_later_wave_is_replaced() -> None:
    """Guards against waves that begin again after the one that was lost."""

    class Losing(FaultyGenerator):
        @asynccontextmanager
        async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
            self.breaks_at = 5 if spec.first_id and not self.num_broken else 10**9
            async with super().open(spec) as session:
                yield session

    generator = Losing(error=c.GeneratorLost)
    whole = await answers_of(n=4, waves=2, algorithm=BEST_OF_N)
    generation = await answers_of(generator, n=4, waves=2, algorithm=BEST_OF_N)
    assert generator.num_broken == 1
    assert texts_of(generation) == texts_of(whole)


async def test_a_failed_judge_falls_back_to_likelihoods_which_stop_nothing() -> None:
    rewards = (c.WeightedReward("judge", stage="end"),)
    asking = request(n=4, rewards=rewards, stop_at=-1e6, allow_degraded=True, sampling={"seed": 1})
    events = await events_of(asking, ToyGenerator(), FaultyScorer(1, Unavailable("away")))
    assert isinstance(events[-1], c.Finished)
    generation = events[-1].generation
    assert generation.degradations == (c.Degradation.REWARD,)
    assert generation.stopped_by is None
    assert len(generation.candidates) == 4
    traces = [event.trace for event in events if isinstance(event, c.RoundCompleted)]
    assert sum(trace.num_finished for trace in traces) == 4
