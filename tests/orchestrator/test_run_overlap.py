"""Growth while scores are under way: it changes no answer, and its failures are accounted for."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generator_service.engine.steps import Step
from generator_service.toy import ToyGenerator
from orchestrator.loop import growth
from orchestrator.loop.deadline import DeadlineController
from specrej.contracts import (
    Candidate,
    Degradation,
    Finished,
    GenerationRequest,
    Round,
    RoundEnd,
    Sampling,
    Schedule,
    SessionSpec,
    SlotGauge,
)
from specrej.contracts.errors import Unavailable
from tests.orchestrator.runs import (
    PROMPT,
    REWARDS,
    FaultyGenerator,
    FixedScorer,
    LetterScorer,
    answer,
    check_counts,
    events_of,
    request,
)

pytestmark = pytest.mark.usefixtures("at_once")
# Of several rounds; with branching, nothing grows while scores are under way.
OF_ROUNDS = st.builds(
    request,
    n=st.integers(2, 40),
    max_tokens=st.integers(20, 60),
    alpha=st.sampled_from([0.1, 0.5, 0.75]),
    schedule=st.builds(Schedule, first=st.integers(2, 8), factor=st.floats(1.3, 3)),
    rewards=st.lists(REWARDS, max_size=3, unique_by=lambda reward: reward.name).map(tuple),
    prefer_complete=st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OF_ROUNDS, st.integers(2, 80), st.integers(0, 40))
async def test_an_answer_is_the_same_if_scores_overlap(
    any_request: GenerationRequest, end_every: int, turns: int
) -> None:
    """Survivors have the tokens that they would have drawn later; discarded tokens are counted."""
    scorers = [LetterScorer(reward.name, turns) for reward in any_request.selection.rewards]
    toys = [ToyGenerator(end_every=end_every) for _ in range(2)]
    waiting, overlapping = [
        await events_of(any_request, toy, scorers or LetterScorer("a", turns), overlaps=overlaps)
        for toy, overlaps in zip(toys, (False, True), strict=True)
    ]
    first, second = waiting[-1], overlapping[-1]
    assert isinstance(first, Finished) and isinstance(second, Finished)
    assert first.generation.candidates == second.generation.candidates
    positions = [[trace.decision_token for trace in e.generation.rounds] for e in (first, second)]
    assert positions[0] == positions[1]
    check_counts(second.generation, any_request.selection.n)
    usage = second.generation.usage
    made = first.generation.usage.generated_tokens
    assert usage.generated_tokens - usage.discarded_tokens == made
    assert usage.discarded_tokens == sum(t.discarded_tokens for t in second.generation.rounds)
    assert toys[1].ledger.owned == 0


async def test_candidates_grow_while_scores_are_under_way() -> None:
    """Guards against a generator that waits for every score, and against growth past the next
    decision token, which would move it."""
    long = request(16, 64, schedule=Schedule(first=8))
    toy = ToyGenerator(end_every=10**9)
    generation = await answer(long, toy, LetterScorer("a", num_turns=1000), overlaps=True)
    discarded = [trace.discarded_tokens for trace in generation.rounds]
    assert discarded == [8 * 7, 4 * 15, 2 * 31, 0]
    alone = await answer(long, toy, LetterScorer("a", num_turns=0), overlaps=True)
    assert alone.candidates == generation.candidates
    async with toy.open(SessionSpec(PROMPT, 1, Sampling(), 1)) as other:
        await other.extend(1)
        shared = await answer(long, toy, LetterScorer("a", num_turns=1000), overlaps=True)
    assert shared.candidates == generation.candidates
    assert shared.usage.discarded_tokens == 0


@pytest.mark.parametrize("may_degrade", [True, False])
async def test_scores_that_fail_end_the_growth_ahead(may_degrade: bool) -> None:
    """Guards against tasks and slots that stay behind."""

    def failing(_: Candidate) -> float:
        raise Unavailable("the reward is gone")

    toy = ToyGenerator(end_every=10**9)
    long = request(8, 64, allow_degraded=may_degrade)
    scorer = FixedScorer(failing, num_turns=50)
    if may_degrade:
        generation = await answer(long, toy, scorer, overlaps=True)
        assert Degradation.REWARD in generation.degradations
    else:
        with pytest.raises(Unavailable):
            await answer(long, toy, scorer, overlaps=True)
    assert toy.ledger.owned == 0


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


async def test_an_answer_that_is_rejected_is_none() -> None:
    """Guards against a deadline controller that counts on it: it would plan for fewer candidates
    than must finish."""
    deadline = DeadlineController(lambda position: position + 4, 8, min_answers=2)
    async with ToyGenerator(end_every=3).open(SessionSpec(PROMPT, 4, Sampling(8), 8)) as session:
        ahead = growth.Growth(session, deadline, lambda: 0.0)
        await ahead.extend(0, 2, 4)
        deadline.min_answers += deadline._num_ended
        await ahead.while_waiting(asyncio.sleep(0.01), 2, 8, 4)
        grown = ahead._ahead
        assert grown
        finished = {c.id for c in grown.candidates if c.finish}
        assert finished and deadline._least < 2, "the case did not occur"
        ahead.discard({c.id for c in grown.candidates} - finished)
    assert deadline._least == 2


async def test_a_generator_that_fails_ahead_fails_the_next_round() -> None:
    """Guards against finished candidates whose scores are lost with the stride ahead, and against
    a further call, which could send the prompt to a third generator."""
    scorer = LetterScorer("a", num_turns=50)
    generator = FaultyGenerator(breaks_at=9, end_every=10)  # the second stride ahead
    early = request(40, 64, schedule=Schedule(first=8), allow_degraded=True)
    generation = await answer(early, generator, scorer, overlaps=True)
    assert generation.degradations == (Degradation.GENERATOR,)
    assert {c.id for c in generation.candidates} <= set(scorer.seen)
    assert generator.num_broken == 1


async def test_tokens_grown_before_a_failure_are_counted() -> None:
    """Also those of survivors that no round takes."""
    num_made = 0

    def count(step: Step) -> None:
        nonlocal num_made
        num_made += step.generated

    early = request(40, 64, schedule=Schedule(first=8), allow_degraded=True)
    toy = FaultyGenerator(breaks_at=12, end_every=10, on_step=count)
    usage = (await answer(early, toy, LetterScorer("a", num_turns=50), overlaps=True)).usage
    assert usage.generated_tokens == num_made
    assert usage.discarded_tokens > 0


async def test_a_part_that_lags_behind_has_grown_by_no_negative_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards estimates of the time left: an end before the beginning seems to be in time."""
    grown = list[int]()
    deadline = DeadlineController(lambda position: position + 1, 8)
    noted = lambda _, rows, tokens, *others, **more: grown.append(tokens)  # noqa: E731
    monkeypatch.setattr(DeadlineController, "note_stride", noted)

    class Lagging:
        async def extend(self, until_tokens: int) -> Round:
            return Round((), RoundEnd.SLOTS_FULL, 3, SlotGauge(0, 0, 0))

    await growth.Growth(Lagging(), deadline, lambda: 0.0).extend(5, 8, 2)  # type: ignore[arg-type]
    assert grown == [0]
