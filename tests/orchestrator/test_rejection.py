"""The rejection policy against the paper's rules and the invariants it must keep."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rejection import Cut, cut, num_kept, rank

SCORES = st.dictionaries(
    st.integers(0, 500), st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60
)
ALPHAS = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 0.99])


def live_of(scores: dict[int, float]) -> set[int]:
    """A third is finished, whatever the scores."""
    return {candidate for candidate in scores if candidate % 3 != 1}


@pytest.mark.parametrize(
    ("ranked", "alpha", "kept"),
    [
        (8, 0.5, 4),
        (5, 0.5, 2),  # 2.5 rounds to even
        (7, 0.5, 4),  # 3.5 rounds to even
        (1, 0.5, 1),  # 0.5 rounds to 0: one is always kept
        (2, 0.9, 1),
        (15, 0.9, 2),  # exactly 1.5; in binary it is just less and would give 1
        (5, 0.1, 4),
        (10, 0.0, 10),
    ],
)
def test_keeps_the_rounded_share(ranked: int, alpha: float, kept: int) -> None:
    assert num_kept(ranked, alpha) == kept


@given(st.integers(1, 5000), st.integers(0, 999))
def test_rounding_is_exact_for_every_decimal_alpha(ranked: int, thousandths: int) -> None:
    """Guards against binary fractions: compared with integer arithmetic."""
    doubled, unit = 2 * (1000 - thousandths) * ranked, 2000
    floor, rest = divmod(doubled, unit)
    expected = floor + (rest > 1000 or (rest == 1000 and floor % 2 == 1))
    assert num_kept(ranked, float(Decimal(thousandths) / 1000)) == max(1, expected)


@given(SCORES)
def test_ranking_is_descending_and_ties_go_to_the_lower_id(scores: dict[int, float]) -> None:
    order = rank(scores)
    assert sorted(order) == sorted(scores)
    for better, worse in itertools.pairwise(order):
        assert scores[better] > scores[worse] or (
            scores[better] == scores[worse] and better < worse
        )


@given(SCORES, ALPHAS, st.booleans())
def test_a_cut_never_empties_and_progresses_when_slots_are_full(
    scores: dict[int, float], alpha: float, full: bool
) -> None:
    """Never empty and Progress: a full cache that releases nobody would loop for ever."""
    live = live_of(scores)
    outcome = cut(scores, live, alpha, must_release=full)
    assert outcome.kept
    assert outcome.kept | outcome.rejected == set(scores)
    assert not outcome.kept & outcome.rejected
    if full and len(live) > 1:
        assert live & outcome.rejected
    if not full:
        assert len(outcome.kept) == num_kept(len(scores), alpha)
        assert min(scores[i] for i in outcome.kept) >= max(
            (scores[i] for i in outcome.rejected), default=float("-inf")
        )


@st.composite
def vetoes(draw: st.DrawFn) -> tuple[dict[int, float], set[int], set[int]]:
    """Scores, the live ones among them, and the vetoed ones: few, many, or all."""
    scores = draw(SCORES)
    vetoed = set(draw(st.sets(st.sampled_from(sorted(scores))) | st.just(set(scores))))
    return scores, live_of(scores), vetoed


@given(vetoes(), ALPHAS, st.booleans(), st.booleans())
def test_vetoed_candidates_are_rejected_unless_nobody_else_is_left(
    ranked: tuple[dict[int, float], set[int], set[int]], alpha: float, full: bool, has_answer: bool
) -> None:
    """Guards against a veto that a high score, or a low alpha, overrules."""
    scores, live, vetoed = ranked
    outcome = cut(scores, live, alpha, must_release=full, vetoed=vetoed, has_answer=has_answer)
    assert outcome.kept | outcome.rejected == set(scores)
    assert not outcome.kept & outcome.rejected
    if vetoed < set(scores):
        assert outcome.kept and not outcome.kept & vetoed
    elif has_answer:
        assert not outcome.kept
    else:
        (alone,) = outcome.kept
        hopeful = vetoed & live or vetoed
        assert scores[alone] == max(scores[candidate] for candidate in hopeful)
        assert alone in hopeful


@given(vetoes(), ALPHAS)
def test_full_slots_release_somebody_whoever_is_vetoed(
    ranked: tuple[dict[int, float], set[int], set[int]], alpha: float
) -> None:
    """Progress: a round whose vetoes are counted, and whose live ones all stay, would loop."""
    scores, live, vetoed = ranked
    outcome = cut(scores, live, alpha, must_release=True, vetoed=vetoed)
    assert outcome.kept
    assert live & outcome.rejected or len(live) <= 1


@given(vetoes(), ALPHAS)
def test_vetoes_take_the_places_of_the_lowest(
    ranked: tuple[dict[int, float], set[int], set[int]], alpha: float
) -> None:
    """Guards against vetoes that cost the others places: alpha is of all that were ranked."""
    scores, live, vetoed = ranked
    others = len(scores) - len(vetoed)
    outcome = cut(scores, live, alpha, must_release=False, vetoed=vetoed)
    if others:
        assert len(outcome.kept) == min(others, num_kept(len(scores), alpha))


@given(SCORES, ALPHAS, st.booleans(), st.booleans())
def test_without_vetoes_nothing_changes(
    scores: dict[int, float], alpha: float, full: bool, has_answer: bool
) -> None:
    """Guards against rules for vetoes that have a say where there are none."""
    live = live_of(scores)
    plain = cut(scores, live, alpha, must_release=full)
    assert cut(scores, live, alpha, must_release=full, vetoed={501}, has_answer=has_answer) == plain


def test_a_live_vetoed_candidate_goes_on_rather_than_a_finished_one() -> None:
    """Guards against giving up with an answer that is vetoed while one may still be better."""
    outcome = cut({0: 5.0, 1: 4.0, 2: 3.0}, {1, 2}, 0.0, must_release=False, vetoed={0, 1, 2})
    assert outcome == Cut((0, 1, 2), frozenset({1}), frozenset({0, 2}))


def test_the_one_released_is_the_worst_live_one() -> None:
    """Not a finished one: releasing it would free no slots."""
    scores = {0: 5.0, 1: 4.0, 2: 3.0, 3: 1.0}
    outcome = cut(scores, {0, 1}, 0.0, must_release=True)
    assert outcome.rejected == {1}
