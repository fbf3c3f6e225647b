"""The run loop on toys: its invariants for all sizes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from generator_service.steps import Step
from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop import Verdict, growth, run_state
from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from orchestrator.loop.run import run
from orchestrator.loop.run_state import MAX_TRACED, RunState
from orchestrator.loop.schedule import first_round_tokens
from orchestrator.loop.scoring import LikelihoodScorer, judged
from specrej.contracts import (
    Admitted,
    Algorithm,
    Branching,
    Candidate,
    Degradation,
    Fate,
    Finished,
    FinishReason,
    Fork,
    Generation,
    GenerationRequest,
    GeometricSchedule,
    MemorySchedule,
    Normalization,
    Progress,
    Round,
    RoundCompleted,
    RoundEnd,
    Sampling,
    Scores,
    Selection,
    SessionSpec,
    SlotGauge,
    TextDelta,
    TokensSchedule,
    WeightedReward,
)
from specrej.errors import InternalError, RewardInvalid, SlotsExceeded, Unavailable
from tests.orchestrator.runs import (
    PROMPT,
    SCHEDULES,
    FixedScorer,
    LetterScorer,
    answer,
    events_of,
    request,
)

STOP = FinishReason.STOP
REWARDS = st.builds(
    WeightedReward,
    st.sampled_from("aeo"),
    st.sampled_from([-1.0, 0.5, 2.0]),
    st.sampled_from([Normalization(), Normalization("batch")]),
    st.none() | st.floats(0, 0.2),
)
REQUESTS = st.builds(
    request,
    n=st.integers(1, 40),
    max_tokens=st.integers(1, 60),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.99]),
    schedule=SCHEDULES,
    rewards=st.lists(REWARDS, max_size=3, unique_by=lambda reward: reward.name).map(tuple),
    prefer_complete=st.booleans(),
    branching=st.none() | st.builds(Branching, st.integers(4, 20), st.integers(1, 3)),
)


def promising(any_request: GenerationRequest, most: int) -> GenerationRequest:
    """With min_answers, as large as the request allows, at most `most`."""
    selection = any_request.selection
    keep = selection.branching.keep if selection.branching else most
    least = min(most, keep, selection.n)
    return replace(any_request, selection=replace(selection, min_answers=least))


PROMISING = st.builds(promising, REQUESTS, st.integers(1, 12))


@settings(max_examples=100, deadline=None)
@given(REQUESTS | PROMISING, st.integers(70, 2000), st.integers(2, 80))
async def test_every_request_ends_with_an_answer_and_all_slots_free(
    any_request: GenerationRequest, capacity: int, end_every: int
) -> None:
    """Progress, Never empty and Conservation, for capacities from ample to hardly enough."""
    generator = ToyGenerator(capacity, end_every=end_every)
    selection, max_tokens = any_request.selection, any_request.sampling.max_tokens
    first = first_round_tokens(selection.schedule, max_tokens)
    # Else the generator refuses the session.
    assume(4 + max(selection.n * first, selection.min_answers * max_tokens) <= capacity)
    scorers: list[FixedScorer] = [LetterScorer(reward.name) for reward in selection.rewards]
    events = await events_of(any_request, generator, scorers or FixedScorer())
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Finished)
    _check_counts(events[-1].generation, selection.n)
    _check_ranking(events[-1].generation, selection)
    if all(reward.veto_below is None for reward in selection.rewards):
        _check_promise(events[-1].generation, selection.min_answers)
    generator.ledger.check_integrity()
    assert generator.ledger.owned == 0
    for event in events[1:-1]:
        assert isinstance(event, RoundCompleted)
        assert event.trace.num_live == len(event.survivors)


def _check_counts(generation: Generation, n: int) -> None:
    """Every candidate is finished or rejected once, and every token is counted once."""
    rounds = generation.rounds
    num_finished = sum(trace.num_finished for trace in rounds)
    num_forks = sum(len(trace.forks) for trace in rounds)
    assert num_finished + sum(trace.num_rejected for trace in rounds) == n + num_forks
    assert len(generation.candidates) == min(64, num_finished)
    assert generation.usage.generated_tokens == sum(trace.generated_tokens for trace in rounds)
    if not num_forks:
        usage = generation.usage
        assert usage.best_of_n_tokens_estimate >= usage.generated_tokens - usage.discarded_tokens
    for trace in rounds:
        if trace.ended_by is RoundEnd.SLOTS_FULL and trace.num_started > 1:
            assert trace.num_rejected + trace.num_finished >= 1
            assert not trace.forks
        # One vetoed candidate may continue if no other is left.
        num_kept = trace.num_live - len(trace.forks)
        assert trace.num_rejected >= trace.num_vetoed - (num_kept <= 1)


def _check_promise(generation: Generation, least: int) -> None:
    """So many candidates of the start are live or complete after every cut."""
    num_finished = 0
    for trace in generation.rounds:
        num_finished += trace.num_finished
        assert trace.num_live - len(trace.forks) + num_finished >= least
    assert len(generation.candidates) >= least


def _check_ranking(generation: Generation, selection: Selection) -> None:
    """Vetoed candidates are last, before them truncated ones if complete ones are preferred; only
    low values are vetoed."""
    last = FinishReason.LENGTH if selection.prefer_complete else None
    ranks = [(c.vetoed, c.finish is last, -c.score) for c in generation.candidates]
    assert ranks == sorted(ranks)
    rewards = selection.rewards
    for candidate in generation.candidates:
        raw = zip(candidate.rewards, rewards, strict=bool(rewards))
        assert candidate.vetoed == any(value < (reward.veto_below or -1) for value, reward in raw)


async def test_cuts_do_not_change_the_survivors() -> None:
    """Survivors have the texts of a run without cuts."""
    uncut = await answer(request(algorithm=Algorithm.BEST_OF_N), ToyGenerator(), LikelihoodScorer())
    survivors = await answer(request(alpha=0.5), ToyGenerator(), LikelihoodScorer())
    assert sum(trace.num_rejected for trace in survivors.rounds) > 0
    texts = {candidate.id: candidate.text for candidate in uncut.candidates}
    for candidate in survivors.candidates:
        assert candidate.text == texts[candidate.id]


async def test_speculative_rejection_generates_fewer_tokens_than_best_of_n() -> None:
    """For texts that reach max_tokens; where most end at once there is little to save."""
    best_of_n, speculative = [
        await answer(request(32, **selection), ToyGenerator(end_every=10**9), FixedScorer())
        for selection in (
            {"algorithm": Algorithm.BEST_OF_N, "alpha": 0.9},
            {"schedule": GeometricSchedule(first=8)},
        )
    ]
    assert [trace.num_rejected for trace in best_of_n.rounds] == [0]
    assert len(best_of_n.candidates) == 32
    assert speculative.usage.generated_tokens < best_of_n.usage.generated_tokens / 2
    assert best_of_n.usage.best_of_n_tokens_estimate == best_of_n.usage.generated_tokens


async def test_the_candidates_in_an_answers_rounds_are_bounded() -> None:
    """Guards against 1,024 rounds of 1,024 candidates each: 100 MB in answer, cache and record."""
    whole = await answer(
        request(300, alpha=0.0, schedule=TokensSchedule(tuple(range(1, 61))), max_tokens=60),
        ToyGenerator(end_every=10**9),
        FixedScorer(),
    )
    traced = [len(trace.candidates) for trace in whole.rounds]
    assert len(traced) == 60
    assert sum(traced) == MAX_TRACED // 300 * 300
    assert [trace.num_started for trace in whole.rounds] == [300] * 60


@pytest.mark.parametrize("branching", [None, Branching(8, 3)])
async def test_promised_answers_survive_full_slots(branching: Branching | None) -> None:
    """Guards against a share of slots in which fewer candidates than promised can end."""
    whole = request(
        16, 60, schedule=MemorySchedule(first=4), alpha=0.9, branching=branching, min_answers=3
    )
    toy = ToyGenerator(4 + 3 * 60, end_every=10**9)
    generation = await answer(whole, toy, FixedScorer())
    assert len(generation.candidates) == 3
    assert {candidate.num_tokens for candidate in generation.candidates} == {60}
    assert {trace.ended_by for trace in generation.rounds} >= {RoundEnd.SLOTS_FULL}
    with pytest.raises(SlotsExceeded) as refused:
        await answer(whole, ToyGenerator(4 + 3 * 60 - 1), FixedScorer())
    assert [violation.field for violation in refused.value.violations] == ["min_answers"]
    left_open = replace(whole, selection=replace(whole.selection, n=0, min_answers=12))
    assert len((await answer(left_open, ToyGenerator(), FixedScorer())).candidates) >= 12


async def test_a_finished_candidate_is_scored_once_and_can_win() -> None:
    """Live candidates may rank it out, and it can still be the best answer."""
    scorer = FixedScorer(lambda c: -c.id if c.finish else 100.0 - c.id)
    generation = await answer(
        request(16, schedule=GeometricSchedule(first=4), alpha=0.75),
        ToyGenerator(end_every=9),
        scorer,
    )
    assert len(scorer.seen) == len(set(scorer.seen))
    assert generation.best.score == max(c.score for c in generation.candidates)
    early = [trace.num_finished for trace in generation.rounds[:-1]]
    assert sum(early) > 0, "the case did not occur"


async def test_an_answer_is_truncated_only_if_none_is_complete() -> None:
    """No candidate ends before 5 tokens here."""
    generation = await answer(request(max_tokens=5), ToyGenerator(end_every=10**9), FixedScorer())
    assert generation.best.finish is FinishReason.LENGTH


async def test_forks_fill_the_room_of_rejected_candidates() -> None:
    """The best two go on, and six forks of them in turn; each has its parent's text up to there."""
    seen: dict[int, list[str]] = {}

    class Noting(LikelihoodScorer):
        async def score(self, candidates: Sequence[Candidate]) -> Scores:
            for candidate in candidates:
                seen.setdefault(candidate.id, []).append(candidate.text)
            return await super().score(candidates)

    branching = request(16, 64, schedule=GeometricSchedule(8), branching=Branching(8, 2))
    branching = replace(branching, sampling=replace(branching.sampling, logprobs=True))
    generation = await answer(branching, ToyGenerator(end_every=10**9), Noting())
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


class SlowScorer(LetterScorer):
    """Returns after some turns of the event loop, in which a session may grow."""

    def __init__(self, letter: str, turns: int, fails: bool = False) -> None:
        super().__init__(letter)
        self.turns, self.fails = turns, fails

    async def score(self, candidates: Sequence[Candidate]) -> Scores:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.fails:
            raise Unavailable("the reward is gone")
        return await super().score(candidates)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are never awaited before candidates grow on."""
    monkeypatch.setattr(growth, "_SOON_S", 0.0)


@pytest.mark.usefixtures("at_once")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(REQUESTS, st.integers(2, 80), st.integers(0, 40))
async def test_an_answer_is_the_same_if_scores_overlap(
    any_request: GenerationRequest, end_every: int, turns: int
) -> None:
    """Survivors have the tokens that they would have drawn later; discarded tokens are counted."""
    scorers = [SlowScorer(reward.name, turns) for reward in any_request.selection.rewards]
    toys = [ToyGenerator(end_every=end_every) for _ in range(2)]
    waiting, overlapping = [
        await events_of(any_request, toy, scorers or SlowScorer("a", turns), overlaps=overlaps)
        for toy, overlaps in zip(toys, (False, True), strict=True)
    ]
    first, second = waiting[-1], overlapping[-1]
    assert isinstance(first, Finished) and isinstance(second, Finished)
    assert first.generation.candidates == second.generation.candidates
    positions = [[trace.decision_token for trace in e.generation.rounds] for e in (first, second)]
    assert positions[0] == positions[1]
    _check_counts(second.generation, any_request.selection.n)
    usage = second.generation.usage
    made = first.generation.usage.generated_tokens
    assert usage.generated_tokens - usage.discarded_tokens == made
    assert usage.discarded_tokens == sum(t.discarded_tokens for t in second.generation.rounds)
    assert toys[1].ledger.owned == 0


@pytest.mark.usefixtures("at_once")
async def test_candidates_grow_while_scores_are_under_way() -> None:
    """Guards against a generator that waits for every score, and against growth past the next
    decision token, which would move it."""
    long = request(16, 64, schedule=GeometricSchedule(8))
    toy = ToyGenerator(end_every=10**9)
    generation = await answer(long, toy, SlowScorer("a", 1000), overlaps=True)
    discarded = [trace.discarded_tokens for trace in generation.rounds]
    assert discarded == [8 * 7, 4 * 15, 2 * 31, 0]
    alone = await answer(long, toy, SlowScorer("a", 0), overlaps=True)
    assert alone.candidates == generation.candidates
    async with toy.open(SessionSpec(PROMPT, 1, Sampling(), 1)) as other:
        await other.extend(1)
        shared = await answer(long, toy, SlowScorer("a", 1000), overlaps=True)
    assert shared.candidates == generation.candidates
    assert shared.usage.discarded_tokens == 0


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("may_degrade", [True, False])
async def test_scores_that_fail_end_the_growth_ahead(may_degrade: bool) -> None:
    """Guards against tasks and slots that stay behind."""
    toy = ToyGenerator(end_every=10**9)
    long = replace(request(8, 64), allow_degraded=may_degrade)
    failing = SlowScorer("a", 50, fails=True)
    if may_degrade:
        generation = await answer(long, toy, failing, overlaps=True)
        assert Degradation.REWARD in generation.degradations
    else:
        with pytest.raises(Unavailable):
            await answer(long, toy, failing, overlaps=True)
    assert toy.ledger.owned == 0


@pytest.mark.usefixtures("at_once")
async def test_scores_that_fail_in_a_cancelled_request_are_no_error_of_the_loop() -> None:
    """Guards against "Task exception was never retrieved", with a traceback, in the log."""
    growing, failed, errors = asyncio.Event(), asyncio.Event(), list[dict[str, Any]]()

    class Endless:
        async def extend(self, until_tokens: int) -> None:
            growing.set()
            await asyncio.Event().wait()

    async def failing() -> None:
        await growing.wait()
        failed.set()
        raise Unavailable("the reward is gone")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    deadline = DeadlineController(lambda position: position + 1, 8)
    deadline.note_stride(1, 1, 0, 0.1)
    ahead = growth.Growth(Endless(), deadline, lambda: 0.0)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(ahead.while_waiting(failing(), 1, 8, 1))
    await failed.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    del waiting  # with its frames: the loop reports when the task of the scores is freed
    gc.collect()
    assert not errors


@pytest.mark.usefixtures("at_once")
async def test_a_generator_that_fails_ahead_fails_the_next_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against finished candidates whose scores are lost with the stride ahead."""
    extend = ToySession.extend

    async def failing(session: ToySession, until_tokens: int) -> Round:
        if until_tokens > 8:
            raise Unavailable("the generator is gone")
        return await extend(session, until_tokens)

    monkeypatch.setattr(ToySession, "extend", failing)
    scorer = SlowScorer("a", 50)
    early = replace(request(40, 64, schedule=GeometricSchedule(8)), allow_degraded=True)
    generation = await answer(early, ToyGenerator(end_every=10), scorer, overlaps=True)
    assert generation.degradations == (Degradation.GENERATOR,)
    assert {c.id for c in generation.candidates} <= set(scorer.seen)


@pytest.mark.usefixtures("at_once")
async def test_tokens_grown_before_a_failure_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of survivors that no round takes."""
    extend, num_made = ToySession.extend, 0

    def count(step: Step) -> None:
        nonlocal num_made
        num_made += step.generated

    async def failing(session: ToySession, until_tokens: int) -> Round:
        if until_tokens > 12:
            raise Unavailable("the generator is gone")
        return await extend(session, until_tokens)

    monkeypatch.setattr(ToySession, "extend", failing)
    early = replace(request(40, 64, schedule=GeometricSchedule(8)), allow_degraded=True)
    toy = ToyGenerator(end_every=10, on_step=count)
    usage = (await answer(early, toy, SlowScorer("a", 50), overlaps=True)).usage
    assert usage.generated_tokens == num_made
    assert usage.discarded_tokens > 0


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(2, 80))
async def test_progress_changes_nothing_and_text_is_the_answers(
    any_request: GenerationRequest, end_every: int
) -> None:
    """Guards against text of a candidate that does not win, or that the answer does not have."""
    scorers = [LetterScorer(reward.name) for reward in any_request.selection.rewards]
    plain = await answer(any_request, ToyGenerator(end_every=end_every), scorers or FixedScorer())
    within: list[Progress | TextDelta] = []
    generation = await answer(
        any_request,
        ToyGenerator(end_every=end_every),
        scorers or FixedScorer(),
        within=WithinRounds(within.append),
    )
    assert generation.candidates == plain.candidates
    assert generation.usage == plain.usage
    deltas = [event for event in within if isinstance(event, TextDelta)]
    progress = [event for event in within if isinstance(event, Progress)]
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


async def test_the_last_stretch_streams_token_by_token() -> None:
    """From the moment one candidate is left and none has ended; before that nothing is certain."""
    within: list[Progress | TextDelta] = []
    long = request(8, 64, schedule=GeometricSchedule(4))
    endless = ToyGenerator(end_every=10**9)
    generation = await answer(long, endless, FixedScorer(), within=WithinRounds(within.append))
    last_cut = next(t.decision_token for t in generation.rounds if t.num_live == 1)
    deltas = [event.text for event in within if isinstance(event, TextDelta)]
    assert len(deltas) == 64 - last_cut
    assert len(deltas[0].split()) == last_cut + 1
    assert {len(delta.split()) for delta in deltas[1:]} == {1}


@pytest.mark.parametrize(("n", "num_strides"), [(8, 16), (64, 16), (640, 2)])
async def test_the_progress_of_many_candidates_comes_in_longer_strides(
    n: int, num_strides: int
) -> None:
    """Guards the generator, which decodes all texts after each stride: for a thousand candidates it
    would do little else."""
    within: list[Progress | TextDelta] = []
    receiver = WithinRounds(within.append)
    one_round = request(n, 64, algorithm=Algorithm.BEST_OF_N)
    await answer(one_round, ToyGenerator(end_every=10**9), FixedScorer(), within=receiver)
    assert len(within) == num_strides


@pytest.mark.usefixtures("at_once")
async def test_an_answer_that_ends_while_it_is_scored_is_sent_whole() -> None:
    """Guards against a last part of the text that only the answer has."""
    for seed in range(8):
        within: list[Progress | TextDelta] = []
        alone = replace(request(1), sampling=Sampling(max_tokens=60, seed=seed))
        receiver = WithinRounds(within.append)
        toy, scorer = ToyGenerator(end_every=20), SlowScorer("a", 100)
        generation = await answer(alone, toy, scorer, overlaps=True, within=receiver)
        text = "".join(event.text for event in within if isinstance(event, TextDelta))
        assert text == generation.best.text


async def test_the_beginning_of_a_stop_text_is_held_back() -> None:
    """Guards against sent text that a stop text then takes back."""
    sent: list[Progress | TextDelta] = []
    reporter = ProgressReporter(WithinRounds(sent.append), ["END", "\n\n"])
    for text, finish in (("a", None), ("a b EN", None), ("a b ENd", None), ("a b ENd.", STOP)):
        candidate = Candidate(0, text, 1, 0.0, finish)
        grown = Round((candidate,), RoundEnd.DECISION_TOKEN, 1, SlotGauge(1, 1, 1))
        reporter.report(grown, is_certain=True)
    assert [event.text for event in sent if isinstance(event, TextDelta)] == ["a b ", "E", "Nd."]


async def test_the_forks_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a million candidates of one request, and against texts of rejected ones."""
    monkeypatch.setattr(run_state, "MAX_FORKS", 100)
    every_token = TokensSchedule(tuple(range(1, 60)))
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
    texts = [n for n, candidate in states[0].latest.items() if candidate.text]
    assert texts == [candidate.id for candidate in generation.candidates]


async def test_forks_that_there_cannot_be_do_not_make_an_answer_hurried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the cache: there is time for two candidates and not for 64, and no fork is left."""
    monkeypatch.setattr(run_state, "MAX_FORKS", 0)
    seconds = itertools.count()
    generation = await answer(
        request(4, 64, schedule=GeometricSchedule(8), branching=Branching(64, 2)),
        ToyGenerator(end_every=10**9),
        FixedScorer(),
        time_left_s=100.0,
        clock=lambda: float(next(seconds)),
    )
    assert generation.rounds[0].num_live == 2
    assert not generation.hurried


@pytest.mark.parametrize("kind", ["none", "batch"])
async def test_scores_of_ended_candidates_are_combined_anew_only_if_they_depend_on_others(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Guards the event loop: thousands of forks that have ended took 0.2 s of it per round."""
    every_token, num_judged = TokensSchedule(tuple(range(1, 60))), 0

    def counted(values: Mapping[int, Sequence[float]], *others: Any) -> dict[int, Verdict]:
        nonlocal num_judged
        num_judged += len(values)
        return judged(values, *others)

    monkeypatch.setattr(run_state, "judged", counted)
    rewards = (WeightedReward("a", normalization=Normalization(kind)),)
    many = request(8, 60, schedule=every_token, branching=Branching(16, 1), rewards=rewards)
    generation = await answer(many, ToyGenerator(end_every=8), LetterScorer("a"))
    num_scored = sum(trace.num_started for trace in generation.rounds)
    assert sum(trace.num_finished for trace in generation.rounds) > 60
    assert (num_judged > num_scored) == (kind == "batch")


async def test_by_reward_alone_a_truncated_answer_can_win() -> None:
    """The same run with both orders: some candidates end at max_tokens, with the best scores."""
    scorer = FixedScorer(lambda c: float(c.num_tokens))
    whole = {"algorithm": Algorithm.BEST_OF_N, "return_candidates": 16}
    preferred, by_reward = [
        await answer(
            request(16, 20, prefer_complete=prefer, **whole), ToyGenerator(end_every=20), scorer
        )
        for prefer in (True, False)
    ]
    assert preferred.best.finish is FinishReason.STOP
    assert by_reward.best.finish is FinishReason.LENGTH
    assert {c.id for c in preferred.candidates} == {c.id for c in by_reward.candidates}


async def test_rounds_of_full_slots_grow_with_a_small_alpha() -> None:
    """Guards against rounds that release one candidate, grow by nothing and score all again."""
    generator = ToyGenerator(256 * 4 + 10, end_every=10**9)
    never = request(256, 60, alpha=0.0, schedule=MemorySchedule(first=4))
    rounds = (await answer(never, generator, FixedScorer())).rounds
    positions = [trace.decision_token for trace in rounds]
    assert positions == sorted(set(positions))
    assert rounds[0].ended_by is RoundEnd.SLOTS_FULL


async def test_memory_schedule_ends_rounds_when_slots_are_full() -> None:
    """The paper's trigger: with room for a quarter, the live set shrinks as texts grow."""
    generator = ToyGenerator(32 * 16 + 10, end_every=10**9)
    generation = await answer(request(32, 64, schedule=MemorySchedule()), generator, FixedScorer())
    full = [t for t in generation.rounds if t.ended_by is RoundEnd.SLOTS_FULL]
    assert len(full) >= 2
    assert all(trace.freed_slots > 0 for trace in full)


@pytest.mark.parametrize(("first", "n"), [(16, 8), (32, 4), (200, 2)])
async def test_the_memory_decides_n_by_the_first_decision_token(first: int, n: int) -> None:
    """As in the paper: all slots are full at the first cut. No cut before max_tokens: 2 fit."""
    prompt_slots = len(PROMPT.turns[0].content.split())
    generator = ToyGenerator(8 * 16 + prompt_slots, end_every=10**9)
    open_n = request(0, 64, schedule=MemorySchedule(first))
    generation = await answer(open_n, generator, FixedScorer())
    ended = generation.rounds[0]
    assert (generation.n, ended.decision_token) == (n, min(first, 64))
    assert n * ended.decision_token == 8 * 16  # all slots


async def test_tokens_of_forks_and_their_most_probable_ones() -> None:
    """Guards against tokens of another candidate, step or round."""
    selection = replace(request(8, 60, schedule=GeometricSchedule(8)).selection)
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


async def test_a_missing_candidate_is_an_internal_error() -> None:
    """Guards against a loop that waits without end for the missing candidate."""

    class Losing(ToyGenerator):
        @asynccontextmanager
        async def open(self, spec: SessionSpec) -> AsyncIterator[ToySession]:
            async with super().open(spec) as session:
                extend = session.extend

                async def lossy(until_tokens: int) -> Round:
                    ended = await extend(until_tokens)
                    return replace(ended, candidates=ended.candidates[1:])

                session.extend = lossy  # type: ignore[method-assign]
                yield session

    with pytest.raises(InternalError, match="lost"):
        await answer(request(), Losing(), FixedScorer())


async def test_closing_the_iterator_frees_the_slots() -> None:
    generator = ToyGenerator()
    async with aclosing(run(request(), generator, FixedScorer())) as events:
        async for event in events:
            if isinstance(event, RoundCompleted):
                break
        assert generator.ledger.owned > 0
    assert generator.ledger.owned == 0


async def test_logprobs_cover_all_rounds() -> None:
    """Guards against the tokens of the last round only, or of another candidate."""
    with_logprobs = replace(
        request(schedule=GeometricSchedule(first=4)),
        sampling=Sampling(max_tokens=60, logprobs=True),
    )
    generation = await answer(with_logprobs, ToyGenerator(end_every=20), FixedScorer())
    assert len(generation.rounds) > 2, "the case did not occur"
    assert len({candidate.token_ids for candidate in generation.candidates}) > 1
    for candidate in generation.candidates:
        assert len(candidate.token_ids) == len(candidate.logprobs) == candidate.num_tokens
        total = candidate.mean_logprob * candidate.num_tokens
        assert sum(candidate.logprobs) == pytest.approx(total)
    without = await answer(request(), ToyGenerator(), FixedScorer())
    assert not any(c.token_ids or c.logprobs for c in without.candidates)
