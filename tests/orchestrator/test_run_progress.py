"""Events within rounds: progress, and the text of an answer that is certain to win."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_service.toy import ToyGenerator
from orchestrator.loop.progress import ProgressReporter, WithinRounds
from specrej.contracts import (
    Algorithm,
    Candidate,
    FinishReason,
    GenerationRequest,
    Progress,
    Round,
    RoundEnd,
    Schedule,
    SlotGauge,
    TextDelta,
)
from tests.orchestrator.runs import REQUESTS, FixedScorer, LetterScorer, answer, request


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
    long = request(8, 64, schedule=Schedule(first=4))
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
