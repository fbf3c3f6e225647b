"""Events within rounds: progress, and the text of an answer that is certain to win."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.engine.commands import ReportRate
from generator_service.toy import ToyGenerator, ToySession
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from specrej.contracts import (
    Candidate,
    FinishReason,
    GenerationRequest,
    Progress,
    Round,
    RoundCompleted,
    RoundEnd,
    Schedule,
    SlotGauge,
    TextDelta,
)
from tests.orchestrator.runs import (
    REQUESTS,
    FixedScorer,
    LetterScorer,
    answer,
    events_of,
    request,
)


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


@pytest.mark.parametrize("n", [8, 640])
async def test_the_last_stretch_streams_within_one_extend(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment one candidate is left and none has ended; before that nothing is certain.
    Guards against a call per token, and against all texts again in each report."""
    monkeypatch.setattr(ReportRate, "_PAUSE_S", 0.0)
    extend, calls = ToySession.extend, []

    async def counted(*arguments: Any) -> Round:
        calls.append(arguments)
        return await extend(*arguments)

    monkeypatch.setattr(ToySession, "extend", counted)
    within: list[Progress | TextDelta] = []
    long = request(n, 64, schedule=Schedule(tokens=(4, 8), kind="tokens"), alpha=1.0)
    endless = ToyGenerator(end_every=10**9)
    events = await events_of(long, endless, FixedScorer(), within=WithinRounds(within.append))
    rounds = [event for event in events if isinstance(event, RoundCompleted)]
    assert [event.trace.decision_token for event in rounds] == [4, 8, 64] and len(calls) == 3
    deltas = [event.text for event in within if isinstance(event, TextDelta)]
    assert [len(delta.split()) for delta in deltas] == [5, *[1] * 59]
    assert len([event for event in within if isinstance(event, Progress)]) == 64
    assert [bool(event.best_text) for event in rounds] == [True, False, False]  # sent already


async def test_the_last_live_candidate_is_not_certain_to_win() -> None:
    """Guards against sent text that a shorter answer, which has ended before, then beats."""
    within: list[Progress | TextDelta] = []
    shortest = FixedScorer(lambda candidate: -float(len(candidate.text)))
    generation = await answer(
        request(4, 64, alpha=0.0, schedule=Schedule(first=4, factor=1.1)),
        ToyGenerator(end_every=12),
        shortest,
        within=WithinRounds(within.append),
    )
    last = [trace.candidates[0].id for trace in generation.rounds if trace.num_started == 1]
    assert last and generation.best.id not in last, "the case did not occur"
    assert not any(isinstance(event, TextDelta) for event in within)


async def test_growth_is_reported_at_once_then_some_twenty_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    sent: list[Progress | TextDelta] = []
    reporter = ProgressReporter(WithinRounds(sent.append), ["END", "\n\n"])
    for text, finish in (
        ("a", None),
        ("a b EN", None),
        ("a b ENd", None),
        ("a b ENd.", FinishReason.STOP),
    ):
        candidate = Candidate(0, text, 1, 0.0, finish)
        grown = Round((candidate,), RoundEnd.DECISION_TOKEN, 1, SlotGauge(1, 1, 1))
        reporter.report(grown, is_certain=True)
    assert [event.text for event in sent if isinstance(event, TextDelta)] == ["a b ", "E", "Nd."]
