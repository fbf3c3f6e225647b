"""Correlations, expected maxima and intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import statistics
from experiments.statistics import (
    bootstrap,
    expected_first,
    kendall,
    matched_cost,
    pearson,
)
from experiments.trajectories import FloatArray

values = st.lists(st.integers(min_value=-20, max_value=20).map(float), min_size=2, max_size=8).map(
    np.array
)


def test_constants_have_no_correlation() -> None:
    """Guards against a warning of scipy, which is an error in the tests, or a 0."""
    for constant, of in ((np.ones(4), np.arange(4.0)), (np.ones(1), np.zeros(1))):
        assert math.isnan(pearson(constant, of))
        assert math.isnan(kendall(constant, of))


@given(values)
def test_expected_first_equals_the_mean_over_subsets(x: FloatArray) -> None:
    """In the given order, which need not be by value; sorted, it is the expected maximum."""
    first, maximum = expected_first(x), expected_first(np.sort(x)[::-1])
    for n in range(1, len(x) + 1):
        draws = list(itertools.combinations(range(len(x)), n))
        assert first[n] == pytest.approx(np.mean([x[min(draw)] for draw in draws]))
        assert maximum[n] == pytest.approx(np.mean([x[list(draw)].max() for draw in draws]))
    assert math.isnan(first[0])


def test_interval_covers_the_mean_as_often_as_stated() -> None:
    """Of 200 samples with mean 0. 95 % of 200 is 190, +- 3 at one sigma; few prompts cover less."""
    samples = np.random.default_rng(2).standard_normal((200, 30))
    covered = [statistics.mean(sample) for sample in samples]
    assert 176 <= sum(estimate.low <= 0 <= estimate.high for estimate in covered) <= 199
    few = statistics.mean(np.ones(3))  # too few for an interval
    assert (few.value, math.isnan(few.low)) == (1, True)
    assert math.isnan(statistics.mean(np.full(5, np.nan)).value)
    infinite = statistics.mean(np.array([1.0, 1.0, math.inf, math.inf]))
    assert (infinite.value, infinite.high) == (math.inf, math.inf)


def test_both_sides_of_a_quotient_are_drawn_together() -> None:
    """A constant ratio on every prompt has an interval without width."""
    below = np.array([1.0, 10.0, 100.0, 1000.0])
    ratio = bootstrap(4, lambda rows: (2 * below[rows]).sum(axis=-1) / below[rows].sum(axis=-1))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
    ("count", "size", "low", "high"),
    [(0, 20, 0, 0.1684), (1, 20, 0.0013, 0.2487), (10, 20, 0.2720, 0.7280), (100, 100, 0.9638, 1)],
)
def test_shares_have_the_exact_interval(count: int, size: int, low: float, high: float) -> None:
    """By the tables of Clopper and Pearson (1934). Guards against 0 of 20 as a certain 0."""
    share = statistics.share([*[True] * count, *[False] * (size - count)])
    assert share.value == count / size
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)
    of = np.repeat([1.0, 0.0], [count, size - count])
    bounded = statistics.bounded_mean(of, 1.0)
    assert (bounded.low, bounded.high) == pytest.approx((low, high), abs=0.006)  # of 4,000 draws


@pytest.mark.parametrize("lost", [0.01, 0.3])
@pytest.mark.parametrize("sizes", ["exponential", "heavy"])
def test_interval_of_regret_covers_where_losses_are_rare(lost: float, sizes: str) -> None:
    """In at least 93 % of 400 data sets of 20 prompts; `largest`, the gain over one answer, is 1.

    With a coverage of 95 %, fewer than 372 have a probability of 3 %; it is 97 % or more here. The
    bootstrap, which it replaces, covers 16 to 86 % with a loss in ten or fewer.
    """
    random = np.random.default_rng(1)
    losses, mean_loss = {
        "exponential": (random.exponential(0.15, (400, 20)), 0.15),
        # Pareto with an exponent of 1.5, cut off at 3: now and then above `largest`.
        "heavy": (np.minimum(0.1 * random.pareto(1.5, (400, 20)), 3.0), 0.1641),
    }[sizes]
    covered = 0
    for regrets in np.where(random.random((400, 20)) < lost, losses, 0.0):
        estimate = statistics.bounded_mean(regrets, 1.0)
        covered += estimate.low <= lost * mean_loss <= estimate.high
        assert estimate.low <= estimate.value <= estimate.high
    assert covered >= 0.93 * 400


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6, unique=True), st.floats(-6, 6))
def test_matched_cost_is_the_inverse_of_a_rising_curve(rewards: list[float], target: float) -> None:
    costs, rising = 2.0 ** np.arange(len(rewards)), np.sort(rewards)
    (cost,) = matched_cost(costs, rising[None], np.array([target]))
    if target <= rising[0]:
        assert cost == costs[0]
    elif target > rising[-1] + 1e-9 * np.ptp(rising):
        assert cost == math.inf
    else:
        assert np.interp(np.log(cost), np.log(costs), rising) == pytest.approx(target, abs=1e-6)
