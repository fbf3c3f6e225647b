"""The run loop on toys: weighted rewards, normalisation and vetoes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from random import Random

import pytest

from generator_service.toy import ToyGenerator
from specrej.contracts import (
    Branching,
    Candidate,
    Fate,
    FinishReason,
    Normalization,
    Schedule,
    Scores,
    WeightedReward,
)
from tests.orchestrator.runs import FixedScorer, LetterScorer, answer, request


async def test_batch_normalisation_covers_all_candidates_that_count() -> None:
    """Guards against scores of finished candidates that stay normalised over an earlier batch.

    All candidates finish after the only cut, so the scores can be computed here."""
    rewards = (
        WeightedReward("a", 1.0, Normalization("batch")),
        WeightedReward("e", -0.5, Normalization("batch")),
    )
    generation = await answer(
        request(16, schedule=Schedule("tokens", tokens=(8,)), rewards=rewards),
        ToyGenerator(end_every=20),
        [LetterScorer("a"), LetterScorer("e")],
    )
    first, last = generation.rounds
    assert last.num_rejected == 0
    assert first.num_finished + first.num_live > 8, "no finished candidate was ranked out"
    columns = [[c.rewards[index] for c in generation.candidates] for index in (0, 1)]
    for candidate in generation.candidates:
        one, two = (
            (value - statistics.fmean(column)) / statistics.pstdev(column)
            for value, column in zip(candidate.rewards, columns, strict=True)
        )
        assert candidate.score == pytest.approx(one - 0.5 * two)


class ComparingScorer(FixedScorer):
    """Returns which share of a batch each candidate is better than, as `pairwise` does; qualities
    are fixed by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.qualities = Random(seed).sample(range(1000), 1000)

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        own = [self.qualities[candidate.id] for candidate in candidates]
        others = max(1, len(own) - 1)
        shares = [sum(other < one for other in own) / others for one in own]
        return Scores(tuple(shares) if len(own) > 1 else (0.5,), compare=True)


@pytest.mark.parametrize("branching", [None, Branching(8, 4)])
async def test_answers_of_earlier_rounds_are_compared_with_those_of_later_ones(
    branching: Branching | None,
) -> None:
    """Guards against scores of different batches in one ranking: the last candidate, which is
    better than all, would have 0.5, and an early answer of a weak batch more."""
    for seed in range(12):
        scorer = ComparingScorer(seed)
        schedule = Schedule(first=6, factor=1.5)
        asked = request(16, branching=branching, schedule=schedule, prefer_complete=True)
        generation = await answer(asked, ToyGenerator(end_every=12), scorer)
        finished = [c for c in generation.candidates if c.finish is FinishReason.STOP]
        assert len(finished) > 1 and generation.relative_scores
        assert generation.best.id == max({c.id for c in finished}, key=scorer.qualities.__getitem__)


async def test_vetoed_prefixes_are_rejected_at_the_decision_token() -> None:
    """Guards against vetoes that have no effect before the end: alpha is 0."""
    reward = WeightedReward("a", veto_below=0.06)
    vetoing = request(alpha=0.0, schedule=Schedule("tokens", tokens=(10,)), rewards=(reward,))
    generation = await answer(vetoing, ToyGenerator(end_every=10**9), LetterScorer("a"))
    first = generation.rounds[0]
    assert 0 < first.num_vetoed < first.num_started, "the case did not occur"
    assert first.num_rejected == first.num_vetoed
    assert first.freed_slots == 10 * first.num_vetoed
    low = {candidate.id for candidate in first.candidates if candidate.score < 0.06}
    assert {c.id for c in first.candidates if c.fate is Fate.VETOED} == low


async def test_vetoed_candidates_stop_once_there_is_an_answer() -> None:
    """The answer was ranked out, but no reward vetoes it."""

    def value(candidate: Candidate) -> float:
        """Low for early answers, high for early prefixes; longer ones are vetoed."""
        if candidate.num_tokens > 8:
            return 0.0
        return 1.0 if candidate.finish else 10.0

    reward = WeightedReward("r", veto_below=0.5)
    vetoing = request(16, schedule=Schedule("tokens", tokens=(8, 12)), rewards=(reward,))
    generation = await answer(vetoing, ToyGenerator(end_every=16), FixedScorer(value))
    first, second = generation.rounds
    assert first.num_finished and first.num_live, "the case did not occur"
    assert second.num_live == 0
    assert second.num_vetoed == second.num_rejected > 0
    assert generation.best.rewards == (1.0,) and not generation.best.vetoed
