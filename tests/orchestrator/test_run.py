"""The run loop on toys: its invariants for all sizes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop import run_state
from orchestrator.loop.progress import WithinRounds
from orchestrator.loop.run_state import MAX_TRACED, RunState
from orchestrator.loop.schedule import first_round_tokens, schedule_of
from orchestrator.loop.scoring import LikelihoodScorer
from specrej.contracts import (
    Admitted,
    Algorithm,
    Branching,
    Candidate,
    Fate,
    Finished,
    FinishReason,
    Fork,
    Generation,
    GenerationRequest,
    Round,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Schedule,
    Scores,
    Selection,
    SlotGauge,
    WeightedReward,
)
from specrej.contracts.errors import InternalError, RewardInvalid, Unavailable
from specrej.telemetry import names
from tests.orchestrator.runs import (
    PROMPT,
    REQUESTS,
    FaultyScorer,
    FixedScorer,
    LetterScorer,
    answer,
    check_counts,
    events_of,
    request,
)


def promising(any_request: GenerationRequest, most: int) -> GenerationRequest:
    """With min_answers, as large as the request allows, at most `most`."""
    selection = any_request.selection
    keep = selection.branching.keep if selection.branching else most
    least = min(most, keep, selection.n)
    return replace(any_request, selection=replace(selection, min_answers=least))


PROMISING = st.builds(promising, REQUESTS, st.integers(1, 12))


@given(REQUESTS | PROMISING, st.integers(0, 60), st.integers(2, 80))
async def test_every_request_ends_with_an_answer_and_all_slots_free(
    any_request: GenerationRequest, room: int, end_every: int
) -> None:
    """Progress, Never empty and Conservation, for capacities from ample to hardly enough."""
    selection, max_tokens = any_request.selection, any_request.sampling.max_tokens
    first = first_round_tokens(selection.schedule, max_tokens)
    least_slots = 4 + max(selection.n * first, max_tokens)
    generator = ToyGenerator(least_slots + room, end_every=end_every)
    scorers: list[FixedScorer] = [LetterScorer(reward.name) for reward in selection.rewards]
    events = await events_of(any_request, generator, scorers or FixedScorer())
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Finished)
    generation = events[-1].generation
    check_counts(generation, selection.n)
    _check_ranking(generation, selection)
    assert generation.rounds[-1].best_score == generation.best.score
    is_full = any(trace.ended_by is RoundEnd.SLOTS_FULL for trace in generation.rounds)
    if not is_full and all(reward.veto_below is None for reward in selection.rewards):
        _check_promise(generation, selection.min_answers)
    generator.ledger.check_integrity()
    assert generator.ledger.owned == 0
    for event in events[1:-1]:
        assert isinstance(event, RoundCompleted)
        assert event.trace.num_live == len(event.survivors)
        _check_fates(event, generation)


def _check_fates(completed: RoundCompleted, generation: Generation) -> None:
    """Guards against fates before the cut, of other candidates, and vetoes traced as low ranks."""
    trace = completed.trace
    ids = {fate: {c.id for c in trace.candidates if c.fate is fate} for fate in Fate}
    assert ids[Fate.KEPT] | {fork.id for fork in trace.forks} == set(completed.survivors)
    assert len(ids[Fate.FINISHED]) == trace.num_finished
    if len(generation.candidates) < 64:  # otherwise not all are returned
        assert ids[Fate.FINISHED] <= {candidate.id for candidate in generation.candidates}
    num_vetoed = len(ids[Fate.VETOED])
    assert len(ids[Fate.REJECTED]) + num_vetoed == trace.num_rejected
    # If no other is left, one vetoed candidate continues alone.
    assert trace.num_vetoed - num_vetoed in ((0, 1) if len(ids[Fate.KEPT]) == 1 else (0,))


def _check_promise(generation: Generation, least: int) -> None:
    """After every cut, at least `least` candidates, forks aside, are live or complete."""
    num_finished = 0
    for trace in generation.rounds:
        num_finished += trace.num_finished
        assert trace.num_live - len(trace.forks) + num_finished >= least
    assert len(generation.candidates) >= least


def _check_ranking(generation: Generation, selection: Selection) -> None:
    """The order is complete, truncated (if complete ones are preferred), vetoed. Only a value below
    its bound vetoes a candidate."""
    last = FinishReason.LENGTH if selection.prefer_complete else None
    ranks = [(c.vetoed, c.finish is last, -c.score) for c in generation.candidates]
    assert ranks == sorted(ranks)
    rewards = selection.rewards
    for candidate in generation.candidates:
        raw = zip(candidate.rewards, rewards, strict=bool(rewards))
        assert candidate.vetoed == any(value < (reward.veto_below or -1) for value, reward in raw)


async def test_speculative_rejection_generates_fewer_tokens_than_best_of_n() -> None:
    """For texts that reach max_tokens; where most end at once there is little to save."""
    best_of_n, speculative = [
        await answer(request(32, **selection), ToyGenerator(end_every=10**9), FixedScorer())
        for selection in (
            {"algorithm": Algorithm.BEST_OF_N, "alpha": 0.9},
            {"schedule": Schedule(first=8)},
        )
    ]
    assert [trace.num_rejected for trace in best_of_n.rounds] == [0]
    assert len(best_of_n.candidates) == 32
    assert speculative.usage.generated_tokens < best_of_n.usage.generated_tokens / 2
    assert best_of_n.usage.best_of_n_tokens_estimate == best_of_n.usage.generated_tokens
    assert speculative.usage.best_of_n_tokens_estimate == 32 * 60
    for trace in speculative.rounds:
        scores = [traced.score for traced in trace.candidates]
        assert scores == sorted(scores, reverse=True)
    whole = request(algorithm=Algorithm.BEST_OF_N).selection
    assert first_round_tokens(schedule_of(whole), 60) == 60


async def test_the_candidates_in_an_answers_rounds_are_bounded() -> None:
    """Guards against 1,024 rounds of 1,024 candidates each: 100 MB in answer, cache and record."""
    whole = await answer(
        request(
            300, alpha=0.0, schedule=Schedule("tokens", tokens=tuple(range(1, 61))), max_tokens=60
        ),
        ToyGenerator(end_every=10**9),
        FixedScorer(),
    )
    traced = [len(trace.candidates) for trace in whole.rounds]
    assert len(traced) == 60
    assert sum(traced) == MAX_TRACED // 300 * 300
    assert [trace.num_started for trace in whole.rounds] == [300] * 60


@pytest.mark.parametrize("branching", [None, Branching(8, 3)])
async def test_only_full_slots_cost_answers(branching: Branching | None) -> None:
    """`min_answers` is a rule of the cut: where the slots suffice, as many are complete."""
    deep = request(
        16, 60, schedule=Schedule("memory", first=4), alpha=0.9, branching=branching, min_answers=3
    )
    for capacity_slots, num_answers in ((4 + 16 * 60, 16), (4 + 8 * 8, 1)):
        toy = ToyGenerator(capacity_slots, end_every=10**9)
        generation = await answer(deep, toy, FixedScorer())
        assert len(generation.candidates) == num_answers
        assert {candidate.num_tokens for candidate in generation.candidates} == {60}
    assert {trace.ended_by for trace in generation.rounds} >= {RoundEnd.SLOTS_FULL}
    planned = replace(deep.selection, schedule=Schedule(first=4))
    plenty = await answer(
        replace(deep, selection=planned), ToyGenerator(end_every=10**9), FixedScorer()
    )
    assert len(plenty.candidates) >= 3


async def test_a_finished_candidate_is_scored_once_and_can_win() -> None:
    """Live candidates may rank it out, and it can still be the best answer."""
    scorer = FixedScorer(lambda c: -c.id if c.finish else 100.0 - c.id)
    generation = await answer(
        request(16, schedule=Schedule(first=4), alpha=0.75),
        ToyGenerator(end_every=9),
        scorer,
    )
    assert len(scorer.seen) == len(set(scorer.seen))
    assert generation.best.score == max(c.score for c in generation.candidates)
    early = [trace.num_finished for trace in generation.rounds[:-1]]
    assert sum(early) > 0, "the case did not occur"


async def test_forks_fill_the_room_of_rejected_candidates() -> None:
    """The best two go on, and six forks of them in turn; each has its parent's text up to there."""
    seen: dict[int, list[str]] = {}

    class Noting(LikelihoodScorer):
        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            for candidate in candidates:
                seen.setdefault(candidate.id, []).append(candidate.text)
            return await super().score(candidates)

    branching: dict[str, Any] = {"schedule": Schedule(first=8), "branching": Branching(8, 2)}
    forked = request(16, 64, sampling={"logprobs": True}, **branching)
    generation = await answer(forked, ToyGenerator(end_every=10**9), Noting())
    first, second, *_ = generation.rounds
    best = [fate.id for fate in first.candidates if fate.fate is Fate.KEPT]
    assert len(best) == 2
    assert first.forks == tuple(Fork(16 + i, best[i % 2]) for i in range(6))
    assert [trace.num_live for trace in generation.rounds] == [8, 8, 8, 0]
    assert [trace.num_started for trace in generation.rounds] == [16, 8, 8, 8]
    for fork in first.forks:
        assert seen[fork.id][0].startswith(seen[fork.parent_id][0] + " ")
        assert seen[fork.id][0] != seen[fork.parent_id][1]
    assert second.generated_tokens == 8 * 8
    assert generation.usage.generated_tokens == 16 * 8 + 8 * (64 - 8)
    for candidate in generation.candidates:
        assert len(candidate.token_ids) == candidate.num_tokens == 64
        assert sum(candidate.logprobs) / 64 == pytest.approx(candidate.mean_logprob)


async def test_the_forks_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a million candidates of one request, and against texts of rejected ones."""
    monkeypatch.setattr(run_state, "MAX_FORKS", 100)
    every_token = Schedule("tokens", tokens=tuple(range(1, 60)))
    many = request(8, 60, schedule=every_token, branching=Branching(16, 1))
    states: list[RunState] = []
    keep = RunState.keep

    def noted(state: RunState, kept: frozenset[int]) -> None:
        states.append(state)
        keep(state, kept)

    monkeypatch.setattr(RunState, "keep", noted)
    generation = await answer(many, ToyGenerator(end_every=10**9), FixedScorer())
    assert sum(len(trace.forks) for trace in generation.rounds) == 100
    assert generation.rounds[-1].num_started == 1
    texts = [n for n, row in states[0].rows.items() if row.latest.text]
    assert texts == [candidate.id for candidate in generation.candidates]


async def test_a_taper_narrows_later_rounds() -> None:
    """Guards against a width of the round that has ended, not of the one that begins."""
    branching = request(16, 64, schedule=Schedule(first=8), branching=Branching(16, 2, 1.0))
    generation = await answer(branching, ToyGenerator(end_every=10**9), FixedScorer())
    assert [trace.num_live for trace in generation.rounds] == [16, 8, 4, 0]
    assert [trace.alpha for trace in generation.rounds] == [14 / 16, 14 / 16, 6 / 8, 0]


async def test_tokens_of_forks_and_their_most_probable_ones() -> None:
    """Guards against tokens of another candidate, step or round."""
    selection = replace(request(8, 60, schedule=Schedule(first=8)).selection)
    reporting = GenerationRequest(
        PROMPT,
        Sampling(60, logprobs=True, top_logprobs=3),
        replace(selection, branching=Branching(8, 2)),
    )
    within = WithinRounds(emit=lambda event: None)
    generation = await answer(reporting, ToyGenerator(end_every=99), FixedScorer(), within=within)
    assert any(candidate.id >= 8 for candidate in generation.candidates), "no fork has ended"
    for candidate in generation.candidates:
        assert b"".join(candidate.tokens).decode().strip() == candidate.text
        assert len(candidate.top_logprobs) == candidate.num_tokens
        steps = zip(candidate.top_logprobs, candidate.token_ids, candidate.tokens, strict=True)
        for top, token_id, token in steps:
            assert len(top.tokens) == 3
            assert (top.tokens[0].token_id, top.tokens[0].token) == (token_id, token)
        drawn = tuple(top.tokens[0].logprob for top in candidate.top_logprobs)
        assert drawn == candidate.logprobs


@pytest.mark.parametrize(
    "values",
    [
        [math.nan] * 16,
        [math.inf] * 16,
        [-math.inf] * 16,
        [0.5] * 15 + [math.nan],
        [1.0] * 15,
        [1.0] * 17,
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["alone", "in a weighted sum"])
async def test_invalid_scores_are_refused(values: list[float], is_weighted: bool) -> None:
    """Guards against ranking by NaN, which would reject at random, and against a weighted sum
    that hides it."""
    generator = ToyGenerator()
    rewards = (WeightedReward("likelihood"), WeightedReward("invalid"))[not is_weighted :]
    scorers = (LikelihoodScorer(), FixedScorer(values))[not is_weighted :]
    with pytest.raises(RewardInvalid):
        await answer(request(rewards=rewards), generator, scorers)
    assert generator.ledger.owned == 0


async def test_candidates_without_rewards_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sum of candidates over all fates against rewards that cannot be opened."""
    counted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "specrej.telemetry.metrics.add",
        lambda name, value=1, **labels: counted.append((name, value, labels)),
    )
    with pytest.raises(Unavailable):
        await answer(request(n=6), ToyGenerator(), FaultyScorer(0, Unavailable("away")))
    assert (names.CANDIDATES, 6, {"fate": "abandoned"}) in counted


@pytest.mark.parametrize(
    ("most_tokens", "num_lost", "message"),
    [(2, 0, "ended at token 2 instead of 16"), (16, 1, "lost 1 candidates")],
)
async def test_a_round_that_is_too_short_or_lacks_a_candidate_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, most_tokens: int, num_lost: int, message: str
) -> None:
    """Guards against strides without growth, one after the other until the deadline, and against a
    wait without end for the missing candidate."""
    extend = ToySession.extend

    async def faulty(session: ToySession, until_tokens: int, _: Any) -> Round:
        ended = await extend(session, min(until_tokens, most_tokens))
        return replace(ended, candidates=ended.candidates[num_lost:])

    monkeypatch.setattr(ToySession, "extend", faulty)
    with pytest.raises(InternalError, match=message):
        await answer(request(), ToyGenerator(), FixedScorer())


async def test_no_message_of_a_generator_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long rounds of many candidates, whose message would be refused after its tokens were
    generated; the answer is that of one message."""
    whole = await answer(request(8), ToyGenerator(), FixedScorer())
    extend, grown = ToySession.extend, list[int]()

    async def noted(session: ToySession, until_tokens: int, _: Any) -> Round:
        before = session._num_tokens
        ended = await extend(session, until_tokens)
        grown.append(len(ended.candidates) * (ended.num_tokens - before))
        return ended

    monkeypatch.setattr(ToySession, "extend", noted)
    monkeypatch.setattr("orchestrator.loop.run._STRIDE_TOKENS", 24)
    parts = await answer(request(8), ToyGenerator(), FixedScorer())
    assert parts.candidates == whole.candidates
    assert 8 < max(grown) <= 24


@pytest.mark.parametrize(
    ("ended_by", "num_tokens", "message"),
    [
        (RoundEnd.DECISION_TOKEN, None, "max_tokens"),
        (RoundEnd.DECISION_TOKEN, 3, "max_tokens"),
        (RoundEnd.ALL_FINISHED, 3, "with live candidates"),
        (RoundEnd.SLOTS_FULL, 3, "no slot"),
    ],
)
async def test_a_generator_without_progress_is_an_internal_error(
    ended_by: RoundEnd, num_tokens: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against thousands of rounds per second: a live candidate at max_tokens or after the
    end of all, one without new tokens, and one whose slots are always full."""

    async def still(session: ToySession, until_tokens: int, _: Any) -> Round:
        live = (Candidate(0, "a", num_tokens or until_tokens, -1.0),)
        reached = until_tokens if ended_by is RoundEnd.DECISION_TOKEN else 3
        return Round(live, ended_by, reached, SlotGauge(10, 10, 10))

    monkeypatch.setattr(ToySession, "extend", still)
    async with asyncio.timeout(20):
        with pytest.raises(InternalError, match=message):
            await answer(request(1), ToyGenerator(), FixedScorer())
