"""Deadlines: what is left of the time, and how cuts follow from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pacing import Pace
from orchestrator.rejection import num_kept
from orchestrator.schedule import next_decision_token
from specrej.contracts import Schedule

MAX_TOKENS = 128


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def pace_of(time_left_s: float | None, clock: Clock | None = None) -> Pace:
    def next_token(position: int) -> int:
        return next_decision_token(Schedule(), position, MAX_TOKENS)

    return Pace(next_token, MAX_TOKENS, time_left_s, clock or Clock())


def test_without_a_deadline_nothing_changes() -> None:
    pace = pace_of(None)
    pace.note_stride(64, 16, 0, 100.0)
    assert pace.stride_tokens(16, 128, 64) == 112
    assert not pace.must_cut(16, 128, 64)
    assert pace.alpha(16, 64, 0.5) == 0.5
    assert not pace.is_over
    assert pace.patience_s is None
    assert not pace.hurried


def test_where_nobody_would_get_to_the_end_nobody_is_given_up() -> None:
    """Guards the chance that one of many ends early: alone, a candidate makes fewer tokens."""
    pace = pace_of(5.0)
    pace.note_stride(64, 16, 0, 1.6)
    assert pace.alpha(16, 64, 0.1) == 0.1
    assert not pace.must_cut(16, 128, 64)
    assert not pace.hurried


def test_with_time_enough_nothing_changes() -> None:
    """Guards the quality of answers: a deadline that is far away costs nothing."""
    pace = pace_of(100.0)
    pace.note_stride(64, 16, 0, 1.6)
    pace.note_scoring(64, 0.1)
    assert pace.alpha(16, 64, 0.5) == 0.5
    assert not pace.must_cut(16, 32, 64)
    assert not pace.hurried


def test_a_short_deadline_raises_alpha_no_more_than_it_takes() -> None:
    """Guards against giving up all candidates where half of them would do."""
    chosen = []
    for left_s in (30.0, 12.0, 9.0, 7.0, 5.9):
        pace = pace_of(left_s)
        pace.note_stride(64, 16, 0, 1.6)  # a tenth of a second per step
        chosen.append(pace.alpha(16, 64, 0.1))
        assert pace.hurried == (chosen[-1] > 0.1)
    assert chosen == sorted(chosen)
    assert chosen[0] == 0.1
    assert 0.1 < chosen[2] < chosen[-1]
    assert num_kept(64, chosen[-1]) < 8


@given(
    left_s=st.floats(0.1, 200),
    alpha=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    num_ranked=st.integers(1, 300),
    position=st.integers(1, MAX_TOKENS),
    step_s=st.floats(1e-4, 2),
    score_s=st.floats(0, 1),
)
def test_alpha_is_never_less_than_asked_for_and_keeps_somebody(
    left_s: float, alpha: float, num_ranked: int, position: int, step_s: float, score_s: float
) -> None:
    pace = pace_of(left_s)
    pace.note_stride(max(1, num_ranked), 16, 0, 16 * step_s)
    pace.note_scoring(num_ranked, score_s)
    chosen = pace.alpha(position, num_ranked, alpha)
    assert alpha <= chosen < 1
    assert num_kept(num_ranked, chosen) >= 1
    assert pace.hurried == (chosen > alpha)
    assert 1 <= pace.stride_tokens(0, 50, num_ranked) <= 50


def test_a_cut_comes_early_where_the_planned_one_would_be_too_late() -> None:
    """Guards Best-of-N and long rounds: at the decision token there would be no time left."""
    clock = Clock()
    pace = pace_of(10.0, clock)
    pace.note_stride(64, 16, 0, 1.6)
    assert not pace.must_cut(16, 32, 64)  # 1.6 s, and then 96 steps of one row, at 0.05 s each
    assert pace.must_cut(16, 128, 64)  # 11.2 s
    clock.now_s += 3.5
    assert pace.must_cut(16, 32, 64)
    assert pace.hurried
    clock.now_s += 1.0
    assert not pace.must_cut(16, 32, 64)  # it would not help any more
    assert not pace.must_cut(16, 128, 1)  # nobody is left to reject


def test_the_clock_is_looked_at_again_before_much_of_the_time_is_gone() -> None:
    """Guards against one stride that takes all of the time left, by a speed that was wrong."""
    pace = pace_of(10.0)
    assert pace.stride_tokens(0, 128, 64) == 16  # nothing is known yet
    pace.note_stride(64, 16, 0, 1.6)
    assert pace.stride_tokens(16, 128, 64) == math.floor(0.25 * 9.7 / 0.1)


def test_time_is_over_when_not_even_a_step_fits() -> None:
    clock = Clock()
    pace = pace_of(10.0, clock)
    assert not pace.is_over
    pace.note_stride(4, 10, 0, 4.0)
    clock.now_s += 9.0
    assert not pace.is_over  # 0.7 s, and a step of one row takes a quarter of one
    clock.now_s += 0.5
    assert pace.is_over


def test_candidates_that_end_early_need_less_time() -> None:
    """Guards against cuts for the sake of tokens that no candidate will ever reach."""
    endless, ending = pace_of(6.0), pace_of(6.0)
    endless.note_stride(64, 16, 0, 1.6)
    ending.note_stride(64, 16, 60, 1.6)
    assert endless.alpha(16, 64, 0.1) > ending.alpha(16, 64, 0.1) == 0.1


def test_a_step_of_fewer_rows_is_faster_by_what_was_seen() -> None:
    pace = pace_of(10.0)
    pace.note_stride(100, 10, 0, 10.0)
    assert pace.step_s(50) == pytest.approx(0.75)
    pace.note_stride(50, 10, 0, 6.0)
    assert pace.step_s(25) == pytest.approx(0.4)
    assert pace.step_s(100) == pytest.approx(1.0)
