"""Correlations, expected maxima and intervals, against theory and counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import statistics
from experiments.studies.statistics import FloatArray, expected_first, kendall, pearson

values = st.lists(st.integers(min_value=-20, max_value=20).map(float), min_size=2, max_size=8).map(
    np.array
)


def test_pearson_is_that_of_numpy() -> None:
    x, y = np.random.default_rng(1).standard_normal((2, 50))
    assert pearson(x, y + x) == pytest.approx(np.corrcoef(x, y + x)[0, 1])


def test_what_does_not_vary_has_no_correlation() -> None:
    same, other = np.ones(4), np.arange(4.0)
    assert math.isnan(pearson(same, other))
    assert math.isnan(kendall(same, other))
    assert math.isnan(pearson(other[:1], other[:1]))


def test_kendall_by_hand_with_ties() -> None:
    """Pairs: 3 in order, 2 the other way round, 1 tied in x: (3 - 2) / sqrt(5 * 6)."""
    x, y = np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0, 1.5])
    assert kendall(x, y) == pytest.approx(1 / math.sqrt(30))


@given(values)
def test_kendall_is_one_with_itself_and_minus_one_reversed(x: FloatArray) -> None:
    if len(set(x.tolist())) > 1:
        assert kendall(x, x) == pytest.approx(1)
        assert kendall(x, -x) == pytest.approx(-1)


@given(values, st.integers(min_value=1, max_value=8))
def test_the_expected_best_is_that_of_all_subsets(x: FloatArray, n: int) -> None:
    n = min(n, len(x))
    counted = [max(subset) for subset in itertools.combinations(x.tolist(), n)]
    assert expected_first(np.sort(x)[::-1], n) == pytest.approx(sum(counted) / len(counted))


@given(values, st.integers(min_value=1, max_value=8))
def test_what_comes_first_need_not_be_the_largest(x: FloatArray, n: int) -> None:
    """Complete answers come before stopped ones, whatever their rewards."""
    n = min(n, len(x))
    counted = [x[min(subset)] for subset in itertools.combinations(range(len(x)), n)]
    assert expected_first(x, n) == pytest.approx(sum(counted) / len(counted))


@pytest.mark.parametrize("n", [0, 5])
def test_there_are_no_such_subsets(n: int) -> None:
    with pytest.raises(ValueError, match="no subsets"):
        expected_first(np.arange(4.0), n)


def test_an_interval_covers_as_often_as_it_says() -> None:
    """Of 200 samples with mean 0. 95 % of 200 is 190, +- 3 at one sigma; few prompts cover less."""
    samples = np.random.default_rng(2).standard_normal((200, 30))
    covered = [statistics.mean(sample) for sample in samples]
    assert 176 <= sum(each.low <= 0 <= each.high for each in covered) <= 199


def test_few_prompts_have_no_interval() -> None:
    """Guards against a certain look of figures that one prompt made."""
    found = statistics.mean(np.ones(3))
    assert found.value == 1
    assert math.isnan(found.low)
    assert math.isnan(statistics.mean(np.full(5, np.nan)).value)


def test_a_quotient_draws_both_sides_together() -> None:
    """Tokens that are twice the other's on every prompt leave nothing to chance."""
    below = np.array([1.0, 10.0, 100.0, 1000.0])
    found = statistics.quotient(2 * below, below)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_draws_may_be_infinite() -> None:
    values = np.array([1.0, 1.0, math.inf, math.inf])
    found = statistics.mean(values)
    assert found.value == math.inf
    assert found.high == math.inf
