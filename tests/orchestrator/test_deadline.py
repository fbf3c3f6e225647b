"""The deadline controller: how strides and cuts follow from the time left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.loop.deadline import DeadlineController
from orchestrator.loop.rejection import num_kept
from orchestrator.loop.schedule import next_decision_token
from specrej.contracts import Schedule
from tests.orchestrator.caching import Clock

MAX_TOKENS = 128


def controller(
    time_left_s: float, *, clock: Clock | None = None, measured: bool = True
) -> DeadlineController:
    """A controller that has measured 16 steps of 64 rows, 0.1 s each, after a prompt of 3 s."""

    def next_token(position: int) -> int:
        return next_decision_token(Schedule(), position, MAX_TOKENS)

    deadline = DeadlineController(next_token, MAX_TOKENS, time_left_s, clock or Clock())
    deadline.note_stride(64, 1, 0, 3.0)
    if measured:
        deadline.note_stride(64, 16, 0, 1.6)
    return deadline


def test_reading_the_prompt_is_no_step() -> None:
    """Guards against deep cuts, since the first stride of a long prompt took seconds."""
    deadline = DeadlineController(lambda position: 2 * position, MAX_TOKENS, 60.0, Clock())
    assert deadline.stride_tokens(0, 16, 64) == 1
    deadline.note_stride(64, 1, 0, 8.0)
    assert deadline.stride_tokens(1, 64, 64) == 1  # as if a step took all of these 8 s
    deadline.note_stride(64, 15, 0, 1.5)
    assert deadline.step_s(64) == pytest.approx(0.1)


@pytest.mark.parametrize(("left_s", "tokens"), [(3600.0, 128), (60.0, 29), (4.0, 16)])
def test_where_pauses_cost_the_first_stride_is_long(left_s: float, tokens: int) -> None:
    """Guards against prompts that a server computes again for each of several short strides."""
    deadline = DeadlineController(lambda position: 2 * position, MAX_TOKENS, left_s, Clock())
    deadline.pauses_freely = False
    assert deadline.stride_tokens(0, 128, 64) == tokens
    deadline.note_stride(64, tokens, 0, 0.1 * tokens)
    assert deadline.step_s(64) == pytest.approx(0.1)


def test_without_a_deadline_nothing_changes() -> None:
    deadline = controller(math.inf)
    assert deadline.stride_tokens(16, 128, 64) == 112
    assert not deadline.must_cut(16, 128, 64)
    assert deadline.alpha(16, 64, 64, 0.5) == 0.5
    assert not deadline.is_over
    assert deadline.patience_s == math.inf
    assert not deadline.hurried


@pytest.mark.parametrize(
    ("time_left_s", "alpha"), [(100.0, 0.5), (5.0, 0.1)], ids=["ample time", "too little for one"]
)
def test_cuts_stay_as_planned_where_others_do_not_help(time_left_s: float, alpha: float) -> None:
    """A far deadline costs no quality. Before one that not even a single candidate can meet, many
    candidates are likelier to have one that ends early."""
    deadline = controller(time_left_s)
    deadline.note_scoring(64, 0.1)
    assert deadline.alpha(16, 64, 64, alpha) == alpha
    # With one number of rows, what a step of one row takes is a guess: one cut as planned shows it.
    is_guess = time_left_s < 10
    assert deadline.must_cut(16, 32, 64) == deadline.hurried == is_guess
    assert not deadline.must_cut(16, 32, 64)


def test_a_short_deadline_raises_alpha_no_more_than_needed() -> None:
    """Guards against rejecting all candidates where rejecting half of them is enough."""
    alphas = []
    for time_left_s in (30.0, 12.0, 9.0, 7.0, 5.9):
        deadline = controller(time_left_s)
        alphas.append(deadline.alpha(16, 64, 64, 0.1))
        assert deadline.hurried == (alphas[-1] > 0.1)
    assert alphas == sorted(alphas)
    assert alphas[0] == 0.1
    assert 0.1 < alphas[2] < alphas[-1]
    assert num_kept(64, alphas[-1]) < 8


def test_candidates_are_forked_if_all_can_end_in_time() -> None:
    deadline = controller(30.0)  # 112 steps are left, of 0.1 s for 64 rows
    assert deadline.has_time_for(16, 64) and not deadline.hurried
    assert not deadline.has_time_for(16, 640) and deadline.hurried


@given(
    part=st.floats(0.5, 0.55) | st.floats(0.5, 1.1),
    requested=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    num_ranked=st.integers(2, 300),
    position=st.integers(1, MAX_TOKENS // 2),
    step_s=st.floats(0.01, 2),
    score_s=st.floats(0, 0.1),
)
def test_alpha_is_never_below_the_requested_one_and_keeps_a_candidate(
    part: float,
    requested: float,
    num_ranked: int,
    position: int,
    step_s: float,
    score_s: float,
) -> None:
    """`part` of the time of all steps is left, `score_s` of a step's time is that of its scores."""
    deadline = controller(part * step_s * (MAX_TOKENS - position) + 0.1, measured=False)
    deadline.note_stride(num_ranked, 16, 0, 16 * step_s)
    deadline.note_scoring(num_ranked, score_s * step_s)
    alpha = deadline.alpha(position, num_ranked, num_ranked, requested)
    assert requested <= alpha < 1
    assert num_kept(num_ranked, alpha) >= 1
    assert deadline.hurried == (alpha > requested)
    assert 1 <= deadline.stride_tokens(0, 50, num_ranked) <= 50


def test_a_cut_comes_early_where_the_planned_one_would_be_too_late() -> None:
    """Guards Best-of-N and long rounds: at the decision token there would be no time left."""
    clock = Clock()
    deadline = controller(10.0, clock=clock)
    assert not deadline.must_cut(16, 32, 64)  # 1.6 s, and then 96 steps of one row, 0.05 s each
    assert deadline.must_cut(16, 128, 64)  # 11.2 s
    clock.now_s += 3.5
    assert deadline.must_cut(16, 32, 64)
    assert deadline.hurried
    clock.now_s += 1.0
    deadline.note_stride(32, 1, 0, 0.09)  # so another number of rows is measured
    assert not deadline.must_cut(16, 32, 64)  # too late for a cut to help
    assert not deadline.must_cut(16, 128, 1)  # a single candidate is left


def test_a_stride_takes_a_quarter_of_the_time_left() -> None:
    """Guards against one stride that takes all of the time left because its estimate was wrong."""
    assert controller(300.0, measured=False).stride_tokens(0, 128, 64) == 16
    assert controller(30.0, measured=False).stride_tokens(0, 128, 64) == 2  # of 3 s at most
    assert controller(10.0).stride_tokens(16, 128, 64) == math.floor(0.25 * 9.7 / 0.1)


def test_the_time_is_over_when_no_step_fits() -> None:
    clock = Clock()
    deadline = controller(10.0, clock=clock, measured=False)
    assert not deadline.is_over
    deadline.note_stride(4, 10, 0, 4.0)
    clock.now_s += 9.0
    assert not deadline.is_over  # 0.7 s are left, and a step of one row takes 0.25 s
    clock.now_s += 0.5
    assert deadline.is_over


def test_candidates_that_end_early_need_less_time() -> None:
    """Guards against cuts for the sake of tokens that no candidate will ever reach."""
    endless, ending = controller(6.0), controller(6.0, measured=False)
    ending.note_stride(64, 16, 60, 1.6)
    assert endless.alpha(16, 64, 64, 0.1) > ending.alpha(16, 64, 64, 0.1) == 0.1


def test_the_time_of_a_step_is_extrapolated_to_other_numbers_of_rows() -> None:
    deadline = controller(10.0, measured=False)
    deadline.note_stride(100, 10, 0, 10.0)
    assert deadline.step_s(50) == pytest.approx(0.75)
    deadline.note_stride(50, 10, 0, 6.0)
    deadline.note_stride(50, 0, 0, 6.0)  # without tokens it measures nothing
    assert deadline.step_s(25) == pytest.approx(0.4)
    assert deadline.step_s(100) == pytest.approx(1.0)
