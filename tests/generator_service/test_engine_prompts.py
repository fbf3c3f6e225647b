"""Shared prompts and turns: which prompts a step reads, and which sessions wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator_service.engine.engine import Engine
from specrej.contracts import RoundEnd
from tests.generator_service.stepping import (
    ENDLESS,
    MODEL,
    PROMPT,
    Recorder,
    admitted,
    alone,
    grown,
    result,
    steps,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = [3 + 11 * i % 89 for i in range(70)]


@pytest.mark.parametrize("is_read_first", [False, True])
def test_equal_prompts_are_read_once(is_read_first: bool) -> None:
    """Sessions with other seeds draw the tokens that they draw alone."""
    model = Recorder(MODEL)
    engine = Engine(model, 5000, prefill_chunk=7)
    samplings = [replace(ENDLESS, seed=seed) for seed in (3, 4, 5)]
    sessions = []
    for sampling in samplings:
        sessions.append(admitted(engine, sampling=sampling))
        if is_read_first:
            steps(engine)
    running = [engine.extend(session_id, 24) for session_id in sessions]
    made = [tokens_of(result(engine, future)) for future in running]
    assert made == [alone(sampling=sampling) for sampling in samplings]
    assert made[0] != made[1]
    assert model.num_prompt_tokens == engine.ledger.held == 17
    for session_id, owned in zip(sessions, (17, 17, 0), strict=True):
        engine.close(session_id)
        assert engine.ledger.owned == owned
        engine.check_integrity()


def test_prompts_stay_within_their_slots_and_are_used_again() -> None:
    """Of an equal prompt only the last token is computed again, for its logits."""
    model = Recorder(MODEL)
    engine = Engine(model, 5000, prefill_chunk=7, prefix_cache_slots=20)
    first = admitted(engine)
    expected = tokens_of(grown(engine, first))
    assert engine.close(first) == 17
    assert (engine.gauge().owned, engine.gauge().cached) == (0, 17)
    again = admitted(engine)
    assert (engine.gauge().owned, engine.gauge().cached) == (17, 0)
    assert tokens_of(grown(engine, again)) == expected
    assert model.num_prompt_tokens == 17
    assert sum(step.num_prompt_rows for step in model.passes) == 17 + 1
    engine.close(again)
    other = admitted(engine, PROMPT[::-1])
    grown(engine, other, 1)
    engine.close(other)  # 34 would be more than may stay
    assert (engine.gauge().owned, engine.gauge().cached) == (0, 17)
    engine.check_integrity()


def test_cached_prompts_give_way_to_a_share_that_widens() -> None:
    """Free slots belong to the shares of open sessions first, then to cached prompts."""
    engine = Engine(MODEL, 17 + 8 * 23 - 1, prefix_cache_slots=1000)
    other = admitted(engine, PROMPT[::-1], n=4)
    grown(engine, other, 4)
    session_id = admitted(engine, n=8, first=4)
    engine.close(other)
    assert engine.gauge().cached == 17
    running = engine.extend(session_id, 24)
    assert (engine.gauge().cached, engine.ledger.unshared) == (0, 0)
    engine.check_integrity()
    assert result(engine, running).ended_by is RoundEnd.SLOTS_FULL
    engine.close(session_id)


# Steps


def test_a_long_prompt_does_not_delay_sessions_that_grow() -> None:
    """Chunks bound a step's prompt tokens, and each step makes a token of all other sessions."""
    model = Recorder(MODEL)
    engine = Engine(model, 5000, prefill_chunk=16)
    growing = admitted(engine)
    grown(engine, growing, 1)
    model.passes.clear()
    running = engine.extend(growing, 24)
    reading = admitted(engine, [5 + i % 80 for i in range(200)])
    grown(engine, reading, 1)
    assert [step.num_prompt_tokens for step in model.passes] == [16] * 12 + [7, 1]
    assert [step.rows for step in model.passes] == [(3,)] * 14
    assert engine.sessions[growing].num_tokens == 1 + 14
    assert tokens_of(result(engine, running)) == alone()


def test_sessions_on_a_stored_prompt_begin_together() -> None:
    """Guards against sessions that begin one after the other although their prompt is stored."""
    model = Recorder(MODEL)
    engine = Engine(model, 5000)
    grown(engine, admitted(engine), 1)
    model.passes.clear()
    for seed in range(4):
        admitted(engine, sampling=replace(ENDLESS, seed=seed))
    engine.step()
    assert not any(session.is_reading for session in engine.sessions.values())
    assert model.num_prompt_tokens == 0
