"""The rejection policy against the paper's rules and the invariants it must keep."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rejection import cut, num_kept, rank

SCORES = st.dictionaries(
    st.integers(0, 500), st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60
)
ALPHAS = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 0.99])


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
    live = {candidate for candidate in scores if candidate % 3 != 1}
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


def test_the_one_released_is_the_worst_live_one() -> None:
    """Not a finished one: releasing it would free no slots."""
    scores = {0: 5.0, 1: 4.0, 2: 3.0, 3: 1.0}
    outcome = cut(scores, {0, 1}, 0.0, must_release=True)
    assert outcome.rejected == {1}
