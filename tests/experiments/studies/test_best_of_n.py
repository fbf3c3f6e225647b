"""Best-of-N: doubling N."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import best_of_n
from tests.experiments.synthetic import WALK, collection, made_of

SCORES = np.ones((4, 64)) * np.array([[1.0], [2.0], [3.0], [4.0]])


def test_by_hand() -> None:
    """Finals 1, 2, 3, 4: one answer is worth 2.5, the best of two 20 / 6, of four 4."""
    whole = made_of(SCORES, np.array([64, 32, 32, 64]), finished=np.ones(4, dtype=np.bool_))
    result = best_of_n.study([whole], WALK)
    assert [point.n for point in result.points] == [1, 2, 4]
    assert [point.reward.value for point in result.points] == pytest.approx([2.5, 20 / 6, 4])
    assert [point.gain.value for point in result.points] == pytest.approx([0, 20 / 6 - 2.5, 1.5])
    assert [point.tokens for point in result.points] == [48, 96, 192]


def test_stopped_answers_count_as_complete_ones_do() -> None:
    """As in the paper. 2 and 3 are complete, 1 and 4 are not; that changes nothing."""
    result = best_of_n.study([made_of(SCORES, np.array([64, 32, 32, 64]))], WALK)
    assert [point.reward.value for point in result.points] == pytest.approx([2.5, 20 / 6, 4])


@given(st.integers(min_value=0, max_value=1000))
def test_more_answers_are_never_worse(seed: int) -> None:
    result = best_of_n.study(collection(2, 16, seed=seed), WALK)
    rewards = [point.reward.value for point in result.points]
    assert all(later >= earlier for earlier, later in itertools.pairwise(rewards))


def test_the_table_has_a_row_per_n() -> None:
    (table,) = best_of_n.study(collection(2, 16), WALK).tables()
    assert [row[0] for row in table.rows] == [1, 2, 4, 8, 16]
