"""The run loop on toys: its invariants for all sizes, stages, stops, waves and votes."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.engine.commands import ReportRate
from generator_service.toy import ToyGenerator, ToySession
from orchestrator.edge.extractors import extractor
from orchestrator.loop import run_state
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from orchestrator.loop.run_state import RunState
from orchestrator.loop.schedule import first_round_tokens, schedule_of
from orchestrator.loop.scoring import LikelihoodScorer
from specrej import contracts as c
from specrej.contracts.errors import InternalError, Overloaded, RewardInvalid, Unavailable
from specrej.telemetry import names
from tests.orchestrator.runs import (
    PROMPT,
    REQUESTS,
    FaultyGenerator,
    FaultyScorer,
    FixedScorer,
    LetterScorer,
    answer,
    check_counts,
    events_of,
    request,
)


def promising(any_request: c.GenerationRequest, most: int) -> c.GenerationRequest:
    """With min_answers, as large as the request allows, at most `most`."""
    selection = any_request.selection
    keep = selection.branching.keep if selection.branching else most
    least = min(most, keep, selection.n)
    return replace(any_request, selection=replace(selection, min_answers=least))


PROMISING = st.builds(promising, REQUESTS, st.integers(1, 12))


@given(REQUESTS | PROMISING, st.integers(0, 60), st.integers(2, 80))
async def test_every_request_ends_with_an_answer_and_all_slots_free(
    any_request: c.GenerationRequest, room: int, end_every: int
) -> None:
    """Progress, Never empty and Conservation, for capacities from ample to hardly enough."""
    selection, max_tokens = any_request.selection, any_request.sampling.max_tokens
    first = first_round_tokens(selection.schedule, max_tokens)
    least_slots = 4 + max(selection.n * first, max_tokens)
    generator = ToyGenerator(least_slots + room, end_every=end_every)
    scorers: list[FixedScorer] = [LetterScorer(reward.name) for reward in selection.rewards]
    events = await events_of(any_request, generator, scorers or FixedScorer())
    assert isinstance(events[0], c.Admitted) and isinstance(events[-1], c.Finished)
    generation = events[-1].generation
    check_counts(generation, selection.n)
    _check_ranking(generation, selection)
    assert generation.rounds[-1].best_score == generation.best.score
    is_full = any(trace.ended_by is c.RoundEnd.SLOTS_FULL for trace in generation.rounds)
    if not is_full and all(reward.veto_below is None for reward in selection.rewards):
        _check_promise(generation, selection.min_answers)
    generator.ledger.check_integrity()
    assert generator.ledger.owned == 0
    for event in events[1:-1]:
        assert isinstance(event, c.RoundCompleted)
        assert event.trace.num_live == len(event.survivors)
        _check_fates(event, generation)


def _check_fates(completed: c.RoundCompleted, generation: c.Generation) -> None:
    """Guards against fates before the cut, of other candidates, and vetoes traced as low ranks."""
    trace = completed.trace
    ids = {fate: {made.id for made in trace.candidates if made.fate is fate} for fate in c.Fate}
    assert ids[c.Fate.KEPT] | {fork.id for fork in trace.forks} == set(completed.survivors)
    assert len(ids[c.Fate.FINISHED]) == trace.num_finished
    if len(generation.candidates) < 64:  # otherwise not all are returned
        assert ids[c.Fate.FINISHED] <= {candidate.id for candidate in generation.candidates}
    num_vetoed = len(ids[c.Fate.VETOED])
    assert len(ids[c.Fate.REJECTED]) + num_vetoed == trace.num_rejected
    # If no other is left, one vetoed candidate continues alone.
    assert trace.num_vetoed - num_vetoed in ((0, 1) if len(ids[c.Fate.KEPT]) == 1 else (0,))


def _check_promise(generation: c.Generation, least: int) -> None:
    """After every cut, at least `least` candidates, forks aside, are live or complete."""
    num_finished = 0
    for trace in generation.rounds:
        num_finished += trace.num_finished
        assert trace.num_live - len(trace.forks) + num_finished >= least
    assert len(generation.candidates) >= least


def _check_ranking(generation: c.Generation, selection: c.Selection) -> None:
    """The order is complete, truncated (if complete ones are preferred), vetoed. Only a value below
    its bound vetoes a candidate."""
    last = c.FinishReason.LENGTH if selection.prefer_complete else None
    ranks = [(made.vetoed, made.finish is last, -made.score) for made in generation.candidates]
    assert ranks == sorted(ranks)
    rewards = selection.rewards
    for candidate in generation.candidates:
        raw = zip(candidate.rewards, rewards, strict=bool(rewards))
        assert candidate.vetoed == any(value < (reward.veto_below or -1) for value, reward in raw)


async def test_rounds_that_cost_end_one_token_behind_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only decision tokens that a request does not name one by one are moved."""
    monkeypatch.setattr(ToySession, "costly_rounds", True)
    named = c.Schedule("tokens", tokens=(16,))
    for schedule, ends in ((c.Schedule(), [29, 45, 60]), (named, [16, 60])):
        asked, generator = request(8, schedule=schedule), ToyGenerator(end_every=10**9)
        generation = await answer(asked, generator, FixedScorer())
        assert [trace.decision_token for trace in generation.rounds] == ends


async def test_speculative_rejection_generates_fewer_tokens_than_best_of_n() -> None:
    """For texts that reach max_tokens; where most end at once there is little to save."""
    best_of_n, speculative = [
        await answer(request(32, **selection), ToyGenerator(end_every=10**9), FixedScorer())
        for selection in (
            dict[str, Any](algorithm=c.Algorithm.BEST_OF_N, alpha=0.9),
            dict[str, Any](schedule=c.Schedule(first=8)),
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
    whole = request(algorithm=c.Algorithm.BEST_OF_N).selection
    assert first_round_tokens(schedule_of(whole), 60) == 60


async def test_the_candidates_in_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against 1,024 rounds of 1,024 candidates each: 100 MB in answer, cache and record."""
    monkeypatch.setattr(run_state, "MAX_TRACED", 100)
    every_token = c.Schedule("tokens", tokens=tuple(range(1, 21)))
    asked = request(8, 20, alpha=0.0, schedule=every_token)
    whole = await answer(asked, ToyGenerator(end_every=10**9), FixedScorer())
    traced = [len(trace.candidates) for trace in whole.rounds]
    assert (len(traced), sum(traced)) == (20, 100 // 8 * 8)
    assert [trace.num_started for trace in whole.rounds] == [8] * 20


async def test_a_finished_candidate_is_scored_once_and_can_win() -> None:
    """Live candidates may rank it out, and it can still be the best answer."""
    scorer = FixedScorer(lambda made: -made.id if made.finish else 100.0 - made.id)
    asked = request(16, schedule=c.Schedule(first=4), alpha=0.75)
    generation = await answer(asked, ToyGenerator(end_every=9), scorer)
    assert len(scorer.seen) == len(set(scorer.seen))
    assert generation.best.score == max(made.score for made in generation.candidates)
    early = [trace.num_finished for trace in generation.rounds[:-1]]
    assert sum(early) > 0, "the case did not occur"


async def test_forks_fill_the_room_of_rejected_candidates() -> None:
    """The best two go on, and six forks of them in turn; each has its parent's text up to there.
    Guards also against tokens of another candidate, step or round."""
    seen: dict[int, list[str]] = {}

    class Noting(LikelihoodScorer):
        async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
            for candidate in candidates:
                seen.setdefault(candidate.id, []).append(candidate.text)
            return await super().score(candidates)

    branching: dict[str, Any] = {"schedule": c.Schedule(first=8), "branching": c.Branching(8, 2)}
    forked = request(16, 64, sampling={"logprobs": True, "top_logprobs": 3}, **branching)
    within = WithinRounds(emit=lambda event: None)
    generation = await answer(forked, ToyGenerator(end_every=10**9), Noting(), within=within)
    first, second, *_ = generation.rounds
    best = [fate.id for fate in first.candidates if fate.fate is c.Fate.KEPT]
    assert len(best) == 2
    assert first.forks == tuple(c.Fork(16 + i, best[i % 2]) for i in range(6))
    assert [trace.num_live for trace in generation.rounds] == [8, 8, 8, 0]
    assert [trace.num_started for trace in generation.rounds] == [16, 8, 8, 8]
    for fork in first.forks:
        assert seen[fork.id][0].startswith(seen[fork.parent_id][0] + " ")
        assert seen[fork.id][0] != seen[fork.parent_id][1]
    assert second.generated_tokens == 8 * 8
    assert generation.usage.generated_tokens == 16 * 8 + 8 * (64 - 8)
    assert any(candidate.id >= 16 for candidate in generation.candidates)
    for candidate in generation.candidates:
        assert len(candidate.token_ids) == candidate.num_tokens == 64
        assert sum(candidate.logprobs) / 64 == pytest.approx(candidate.mean_logprob)
        assert b"".join(candidate.tokens).decode().strip() == candidate.text
        drawn = [top.tokens[0] for top in candidate.top_logprobs]
        assert [(top.token_id, top.token) for top in drawn] == [
            *zip(candidate.token_ids, candidate.tokens, strict=True)
        ]
        assert tuple(top.logprob for top in drawn) == candidate.logprobs
        assert {len(top.tokens) for top in candidate.top_logprobs} == {3}


async def test_the_forks_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a million candidates of one request, and against texts of rejected ones."""
    monkeypatch.setattr(run_state, "MAX_FORKS", 100)
    every_token = c.Schedule("tokens", tokens=tuple(range(1, 60)))
    many = request(8, 60, schedule=every_token, branching=c.Branching(16, 1))
    keeping = mock.Mock(wraps=RunState.keep)
    monkeypatch.setattr(RunState, "keep", lambda *given: keeping(*given))
    generation = await answer(many, ToyGenerator(end_every=10**9), FixedScorer())
    assert sum(len(trace.forks) for trace in generation.rounds) == 100
    assert generation.rounds[-1].num_started == 1
    texts = [n for n, row in keeping.call_args[0][0].rows.items() if row.latest.text]
    assert texts == [candidate.id for candidate in generation.candidates]


async def test_a_taper_narrows_later_rounds() -> None:
    """Guards against a width of the round that has ended, not of the one that begins."""
    branching = request(16, 64, schedule=c.Schedule(first=8), branching=c.Branching(16, 2, 1.0))
    generation = await answer(branching, ToyGenerator(end_every=10**9), FixedScorer())
    assert [trace.num_live for trace in generation.rounds] == [16, 8, 4, 0]
    assert [trace.alpha for trace in generation.rounds] == [14 / 16, 14 / 16, 6 / 8, 0]


@pytest.mark.parametrize(
    "values",
    [
        *([bad] * 16 for bad in (math.nan, math.inf, -math.inf)),
        *([0.5] * 15 + more for more in ([math.nan], [], [0.5, 0.5])),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["alone", "in a weighted sum"])
async def test_invalid_scores_are_refused(values: list[float], is_weighted: bool) -> None:
    """Guards against ranking by NaN, at random, and against a weighted sum that hides it."""
    generator = ToyGenerator()
    rewards = (c.WeightedReward("likelihood"), c.WeightedReward("invalid"))[not is_weighted :]
    scorers = (LikelihoodScorer(), FixedScorer(values))[not is_weighted :]
    with pytest.raises(RewardInvalid):
        await answer(request(rewards=rewards), generator, scorers)
    assert generator.ledger.owned == 0


@pytest.mark.parametrize(
    ("options", "scorer", "reads"),
    [
        ({}, FixedScorer([1.0]), False),
        ({}, LikelihoodScorer(), True),
        ({"allow_degraded": True}, FixedScorer([1.0]), True),
        ({"sampling": {"logprobs": True}}, FixedScorer([1.0]), True),
        ({"vote": c.Vote(weight="confidence")}, FixedScorer([1.0]), True),
        ({"confidence_cut": c.ConfidenceCut(0.5, 4), "waves": 2}, FixedScorer([1.0]), True),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
async def test_a_generator_is_told_whether_log_probabilities_are_read(
    options: dict[str, Any], scorer: Any, reads: bool
) -> None:
    """Guards rankings by likelihood against generators that leave it out, and these against work
    for nobody."""
    generator = ToyGenerator()
    generator.open = mock.Mock(wraps=generator.open)  # type: ignore[method-assign]
    with suppress(RewardInvalid):  # the scores are not as many as the candidates
        await answer(request(4, 8, **options), generator, scorer)
    assert generator.open.call_args_list[0][0][0].without_likelihood is not reads


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


def extending(
    monkeypatch: pytest.MonkeyPatch, change: Any, most: Any = lambda session: 10**9
) -> None:
    """Let toys grow to at most so many tokens, and change a round that was to end at `until`."""
    extend = ToySession.extend

    async def changed(session: ToySession, until: int, report: Any) -> c.Round:
        ended: c.Round = change(await extend(session, min(until, most(session)), report), until)
        return ended

    monkeypatch.setattr(ToySession, "extend", changed)


def live(num_tokens: int) -> tuple[c.Candidate, ...]:
    return (c.Candidate(0, "a", num_tokens, -1.0),)


STILL = {"candidates": live(3), "num_tokens": 3}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda _: {"num_tokens": 2}, "ended at token 2 instead of 16"),
        (lambda until: {"candidates": live(until)}, "max_tokens"),
        (lambda _: {"candidates": live(3)}, "max_tokens"),
        (lambda _: {"candidates": live(3), "ended_by": c.RoundEnd.ALL_FINISHED}, "with live cand"),
        (lambda _: STILL | {"ended_by": c.RoundEnd.SLOTS_FULL}, "no slot"),
    ],
)
async def test_a_round_that_is_too_short_or_wrong_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[int], dict[str, Any]], message: str
) -> None:
    """Guards against strides without growth until the deadline, and thousands of rounds per second:
    a live candidate at max_tokens or after the end of all, one without new tokens, and one whose
    slots are always full."""
    planned: dict[str, Any] = {"ended_by": c.RoundEnd.DECISION_TOKEN}
    extending(monkeypatch, lambda ended, until: replace(ended, **planned | fault(until)))
    async with asyncio.timeout(20):
        with pytest.raises(InternalError, match=message):
            await answer(request(1), ToyGenerator(end_every=10**9), FixedScorer())


async def test_a_lost_candidate_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a wait without end for it."""
    extending(monkeypatch, lambda ended, _: replace(ended, candidates=ended.candidates[1:]))
    with pytest.raises(InternalError, match="lost 1 candidates"):
        await answer(request(), ToyGenerator(), FixedScorer())


async def test_no_message_of_a_generator_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long rounds of many candidates, whose message would be refused after its tokens were
    generated; the answer is that of one message."""
    whole = await answer(request(8), ToyGenerator(), FixedScorer())
    grown = list[int]()

    def noted(ended: c.Round, _: int) -> c.Round:
        grown.append(sum(len(one.new_token_ids) for one in ended.candidates))
        return ended

    extending(monkeypatch, noted)
    monkeypatch.setattr("orchestrator.loop.run._STRIDE_TOKENS", 24)
    parts = await answer(request(8), ToyGenerator(), FixedScorer())
    assert parts.candidates == whole.candidates
    assert 8 < max(grown) <= 24


# Rounds that end because the slots are full, and N by the memory


async def test_rounds_of_full_blocks_grow_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against rounds that release one candidate, grow by nothing and score all again, also
    where a token may need a block of slots, as on vLLM: here 120 blocks of 8 tokens."""

    def in_blocks(ended: c.Round, until: int) -> c.Round:
        is_full = ended.num_tokens < until
        return replace(ended, ended_by=c.RoundEnd.SLOTS_FULL) if is_full else ended

    extending(monkeypatch, in_blocks, lambda session: 8 * (120 // len(session._live)))
    never = request(40, 60, alpha=0.0, schedule=c.Schedule("memory", first=4))
    rounds = (await answer(never, ToyGenerator(1000 * 30, end_every=10**9), FixedScorer())).rounds
    positions = Counter(trace.decision_token for trace in rounds)
    assert len(positions) > 4 and max(positions.values()) < 4, positions


@pytest.mark.parametrize(("first", "n"), [(16, 8), (32, 4), (200, 2)])
async def test_the_memory_decides_n_by_the_first_decision_token(first: int, n: int) -> None:
    """As in the paper: all slots are full at the first cut. No cut before max_tokens: 2 fit."""
    prompt_slots = len(PROMPT.turns[0].content.split())
    generator = ToyGenerator(8 * 16 + prompt_slots, end_every=10**9)
    open_n = request(0, 64, schedule=c.Schedule("memory", first=first))
    generation = await answer(open_n, generator, FixedScorer())
    ended = generation.rounds[0]
    assert (generation.n, ended.decision_token) == (n, min(first, 64))
    assert n * ended.decision_token == 8 * 16  # all slots


# The run loop on toys: weighted rewards, normalisation and vetoes


async def test_batch_normalisation_covers_all_candidates_that_count() -> None:
    """Guards against scores of finished candidates that stay normalised over an earlier batch.

    All candidates finish after the only cut, so the scores can be computed here."""
    weights, by_batch = {"a": 1.0, "e": -0.5}, c.Normalization("batch")
    rewards = tuple(c.WeightedReward(*of, by_batch) for of in weights.items())
    asked = request(16, schedule=c.Schedule("tokens", tokens=(8,)), rewards=rewards)
    generation = await answer(asked, ToyGenerator(end_every=20), [*map(LetterScorer, weights)])
    first, last = generation.rounds
    assert last.num_rejected == 0
    assert first.num_finished + first.num_live > 8, "no finished candidate was ranked out"
    columns = [[made.rewards[index] for made in generation.candidates] for index in (0, 1)]
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

    async def score(self, candidates: Sequence[c.Candidate]) -> c.Scores:
        own = [self.qualities[candidate.id] for candidate in candidates]
        others = max(1, len(own) - 1)
        shares = [sum(other < one for other in own) / others for one in own]
        return c.Scores(tuple(shares) if len(own) > 1 else (0.5,), compare=True)


@pytest.mark.parametrize(
    ("branching", "stages"),
    [(None, ["both"]), (c.Branching(8, 4), ["both"]), (None, ["end"]), (None, ["cuts", "end"])],
)
async def test_answers_of_all_rounds_are_compared(
    branching: c.Branching | None, stages: list[Any]
) -> None:
    """Guards against scores of different batches in one ranking: the last candidate, which is
    better than all, would have 0.5, and an early answer of a weak batch more."""
    rewards = tuple(c.WeightedReward(stage, stage=stage) for stage in stages)
    options = {"branching": branching, "prefer_complete": True, "rewards": rewards}
    for seed in range(12):
        scorer, lengths = ComparingScorer(seed), FixedScorer()
        asked = request(16, schedule=c.Schedule(first=6, factor=1.5), **options)
        scorers = [lengths, scorer][-len(stages) :]
        generation = await answer(asked, ToyGenerator(end_every=12), scorers)
        assert len({*lengths.seen}) == len(lengths.seen), "it compares nothing"
        finished = [made for made in generation.candidates if made.finish is c.FinishReason.STOP]
        assert len(finished) > 1 and generation.relative_scores
        best = max((made.id for made in finished), key=scorer.qualities.__getitem__)
        assert generation.best.id == best


async def test_a_veto_that_a_later_batch_takes_back_leaves_an_answer() -> None:
    """Guards answers that a judge of pairs vetoed alone: no reward of the end has scored them."""
    rewards = (c.WeightedReward("pairs", veto_below=0.6), c.WeightedReward("end", stage="end"))
    asked = request(8, waves=2, rewards=rewards, schedule=c.Schedule(first=8), alpha=0.9)
    for seed in range(12):
        scorers = [ComparingScorer(seed), FixedScorer()]
        generation = await answer(asked, ToyGenerator(end_every=10**9), scorers)
        for made in generation.candidates:
            assert made.vetoed or not any(map(math.isnan, made.rewards))


async def test_vetoed_candidates_stop_once_there_is_an_answer() -> None:
    """The answer was ranked out, but no reward vetoes it."""

    def value(candidate: c.Candidate) -> float:
        """Low for early answers, high for early prefixes; longer ones are vetoed."""
        if candidate.num_tokens > 8:
            return 0.0
        return 1.0 if candidate.finish else 10.0

    reward = c.WeightedReward("r", veto_below=0.5)
    vetoing = request(16, schedule=c.Schedule("tokens", tokens=(8, 12)), rewards=(reward,))
    generation = await answer(vetoing, ToyGenerator(end_every=16), FixedScorer(value))
    first, second = generation.rounds
    assert first.num_finished and first.num_live, "the case did not occur"
    assert second.num_live == 0
    assert second.num_vetoed == second.num_rejected > 0
    assert generation.best.rewards == (1.0,) and not generation.best.vetoed


# Events within rounds: progress, and the text of an answer that is certain to win


@given(REQUESTS, st.integers(2, 80))
async def test_progress_changes_nothing_and_text_is_the_answers(
    any_request: c.GenerationRequest, end_every: int
) -> None:
    """Guards against text of a candidate that does not win, or that the answer does not have."""
    scorers = [LetterScorer(one.name) for one in any_request.selection.rewards] or FixedScorer()
    within: list[c.Progress | c.TextDelta] = []
    plain, generation = [
        await answer(any_request, ToyGenerator(end_every=end_every), scorers, within=sent)
        for sent in (None, WithinRounds(within.append))
    ]
    assert (generation.candidates, generation.usage) == (plain.candidates, plain.usage)
    deltas = [event for event in within if isinstance(event, c.TextDelta)]
    progress = [event for event in within if isinstance(event, c.Progress)]
    positions = [event.num_tokens for event in progress]
    assert positions == sorted(positions)
    for event in progress:
        ended = next(t for t in generation.rounds if event.num_tokens <= t.decision_token)
        fewest = ended.num_started - ended.num_finished
        assert fewest <= event.num_live <= ended.num_started
        assert event.num_live * event.num_tokens < event.session_slots <= event.capacity_slots
    if deltas:
        assert {delta.id for delta in deltas} == {generation.best.id}
        assert "".join(delta.text for delta in deltas) == generation.best.text


@pytest.mark.parametrize("n", [8, 640])
async def test_the_last_stretch_is_one_extend(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment one candidate is left and none has ended; before that nothing is certain.
    Guards against a call per token, and against all texts again in each report."""
    monkeypatch.setattr(ReportRate, "_PAUSE_S", 0.0)
    calls: list[int] = []
    extending(monkeypatch, lambda ended, until: calls.append(until) or ended)
    within: list[c.Progress | c.TextDelta] = []
    long = request(n, 64, schedule=c.Schedule(tokens=(4, 8), kind="tokens"), alpha=1.0)
    endless = ToyGenerator(end_every=10**9)
    events = await events_of(long, endless, FixedScorer(), within=WithinRounds(within.append))
    rounds = [event for event in events if isinstance(event, c.RoundCompleted)]
    assert [event.trace.decision_token for event in rounds] == [4, 8, 64] and len(calls) == 3
    deltas = [event.text for event in within if isinstance(event, c.TextDelta)]
    assert [len(delta.split()) for delta in deltas] == [5, *[1] * 59]
    assert len([event for event in within if isinstance(event, c.Progress)]) == 64
    assert [bool(event.best_text) for event in rounds] == [True, False, False]  # sent already


async def test_the_last_live_candidate_is_not_certain_to_win() -> None:
    """Guards against sent text that a shorter answer, which has ended before, then beats."""
    within: list[c.Progress | c.TextDelta] = []
    shortest = FixedScorer(lambda candidate: -float(len(candidate.text)))
    asked, sent = request(4, 64, alpha=0.0, schedule=c.Schedule(first=4, factor=1.1)), within.append
    generation = await answer(
        asked, ToyGenerator(end_every=12), shortest, within=WithinRounds(sent)
    )
    last = [trace.candidates[0].id for trace in generation.rounds if trace.num_started == 1]
    assert last and generation.best.id not in last, "the case did not occur"
    assert not any(isinstance(event, c.TextDelta) for event in within)


async def test_growth_is_reported_twenty_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a message per token of a fast engine, and a first token that waits."""
    now_s = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    rate, reported = ReportRate(), []
    for _ in range(1000):
        if rate.is_due():
            reported.append(now_s[0])
        now_s[0] += 0.004
    assert reported[0] == 100.0 and 70 < len(reported) <= 81


async def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    """Guards against sent text that a stop text then takes back."""
    sent: list[c.Progress | c.TextDelta] = []
    reporter = ProgressReporter(WithinRounds(sent.append), ["END", "\n\n"])
    for text in ("a", "a b EN", "a b ENd", "a b ENd."):
        finish = c.FinishReason.STOP if text.endswith(".") else None
        candidate = c.Candidate(0, text, 1, 0.0, finish)
        grown = c.Round((candidate,), c.RoundEnd.DECISION_TOKEN, 1, c.SlotGauge(1, 1, 1))
        reporter.report(grown, is_certain=True)
    assert [event.text for event in sent if isinstance(event, c.TextDelta)] == ["a b ", "E", "Nd."]


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


def rejected_of(generation: c.Generation) -> set[int]:
    fates = [made for trace in generation.rounds for made in trace.candidates]
    return {made.id for made in fates if made.fate is c.Fate.REJECTED}


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
    assert some.num_begun <= some.n == n


async def test_strides_do_not_decide_where_a_round_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards equal answers of equal requests: strides depend on the time left."""
    monkeypatch.setattr("orchestrator.loop.run._STRIDE_TOKENS", 8 * 5)
    generation = await answers_of(n=8, algorithm=BEST_OF_N, stop_at=2.0, max_tokens=64)
    ends = [trace.decision_token for trace in generation.rounds[:-1]]
    assert ends and not any(end % 16 for end in ends)


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


async def test_some_vote_ends_early() -> None:
    generation = await answers_of(
        n=16, algorithm=BEST_OF_N, waves=4, vote=c.Vote(), extract=lambda _: "yes"
    )
    assert generation.stopped_by is c.StopReason.VOTE
    assert generation.num_begun == 12, "9 of 16 must agree, in waves of 4"
    begun = {trace.wave: trace.num_started for trace in reversed(generation.rounds)}
    assert begun == {1: 4, 2: 4, 3: 4}
    assert generation.votes[0].answer == generation.best.vote == "yes"
    assert (generation.votes[0].share, generation.num_distinct) == (1.0, 1)


async def test_candidates_without_a_vote_are_answers_of_last_resort() -> None:
    scorer = FixedScorer(lambda made: float(len(made.text)))
    voting: dict[str, Any] = {"n": 8, "algorithm": BEST_OF_N, "vote": c.Vote(), "seed": 3}
    voting["scorers"] = [scorer]
    generation = await answers_of(**voting, extract=lambda t: "short" if len(t) < 60 else None)
    assert generation.best.vote == "short"
    assert max(one.score for one in generation.candidates) > generation.best.score

    def too_deep(_: str) -> None:
        """JSON that can be read and not written."""
        for depth in range(700, 1050, 50):
            extractor(c.Vote("json"), {})("[" * depth + "]" * depth)

    for nothing in (lambda _: None, too_deep):
        none = await answers_of(**voting, extract=nothing)
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
    rejected = rejected_of(generation)
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


async def test_less_confident_candidates_of_later_waves_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odd candidates of the later waves are not confident."""

    def doubtful(made: c.Candidate) -> c.Candidate:
        assert len(made.new_top_logprobs) == 5 * len(made.new_token_ids)
        unsure = (0.0,) * len(made.new_top_logprobs)
        return replace(made, new_top_logprobs=unsure) if made.id >= 4 and made.id % 2 else made

    def doubting(ended: c.Round, _: int) -> c.Round:
        return replace(ended, candidates=tuple(map(doubtful, ended.candidates)))

    extending(monkeypatch, doubting)
    generator, cut = ToyGenerator(end_every=200), c.ConfidenceCut(0.9, 8)
    generation = await answers_of(generator, n=8, waves=4, alpha=0.0, confidence_cut=cut)
    ended = {one.id for one in generation.candidates}
    assert {0, 1, 2, 3} <= ended, "the first wave is whole"
    assert {5, 7} <= rejected_of(generation)
    assert not any(one.logprobs or one.token_ids for one in generation.candidates)


async def test_a_wave_that_would_be_late_does_not_begin() -> None:
    generator = FaultyGenerator(token_s=1.0, end_every=10_000)
    asking = request(n=8, max_tokens=20, waves=2, algorithm=BEST_OF_N)
    generation = await answer(asking, generator, RIGHT, time_left_s=50.0)
    assert (generation.num_begun, generation.hurried, generation.degraded) == (4, True, False)
    assert len(generation.candidates) == 4


class Losing(FaultyGenerator):
    """Loses so many first sessions of a later wave; others of these raise `full`."""

    def __init__(self, num_lost: int, full: Exception | None = None) -> None:
        super().__init__(error=c.GeneratorLost)
        self.num_lost, self.full = num_lost, full
        self.later = ""  # the version that opens later waves

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
        loses = spec.first_id > 0 and self.num_broken < self.num_lost
        if self.full and spec.first_id and not loses:
            raise self.full
        self.breaks_at = 5 if loses else 10**9
        async with super().open(spec) as session:
            session.fingerprint = self.later if spec.first_id else ""
            yield session


@pytest.mark.parametrize("num_lost", [0, 1])
@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("away"), None])
async def test_a_wave_without_a_session_leaves_the_answers_so_far(
    error: Exception | None, num_lost: int
) -> None:
    """Such an answer is not stored, so it must say so. None: there is another version only."""
    generator = Losing(num_lost, error)
    generator.later = "" if error else "new"
    generation = await answers_of(generator, n=8, waves=2, algorithm=BEST_OF_N)
    assert (generation.num_begun, generation.reduced) == (2, True)


async def test_a_generator_lost_in_a_later_wave_is_replaced() -> None:
    """Guards against waves that begin again after the one that was lost."""
    generator = Losing(1)
    whole = await answers_of(n=4, waves=2, algorithm=BEST_OF_N)
    generation = await answers_of(generator, n=4, waves=2, algorithm=BEST_OF_N)
    assert generator.num_broken == 1
    assert texts_of(generation) == texts_of(whole)


async def test_a_failed_judge_falls_back_to_likelihoods_which_stop_nothing() -> None:
    rewards = (c.WeightedReward("judge", stage="end"),)
    asking = request(n=4, rewards=rewards, stop_at=-1e6, allow_degraded=True, sampling={"seed": 1})
    generation = await answer(asking, ToyGenerator(), FaultyScorer(1, Unavailable("away")))
    assert generation.degradations == (c.Degradation.REWARD,)
    assert generation.stopped_by is None
    assert len(generation.candidates) == 4
    assert sum(trace.num_finished for trace in generation.rounds) == 4
