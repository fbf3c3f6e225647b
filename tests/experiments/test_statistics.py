"""Means and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from experiments import statistics
from experiments.statistics import bootstrap


def test_interval_covers_the_mean_as_often_as_stated() -> None:
    """Of 200 samples with mean 0. 95 % of 200 is 190, +- 3 at one sigma; few prompts cover less."""
    samples = np.random.default_rng(2).standard_normal((200, 30))
    covered = [statistics.mean(sample) for sample in samples]
    assert 176 <= sum(estimate.low <= 0 <= estimate.high for estimate in covered) <= 199
    few = statistics.mean(np.ones(3))  # too few for an interval
    assert (few.value, math.isnan(few.low)) == (1, True)
    assert math.isnan(statistics.mean(np.full(5, np.nan)).value)
    assert str(few) == "1" and str(bootstrap(4, lambda rows: rows.mean(axis=-1))).count(" to ") == 1


def test_both_sides_of_a_quotient_are_drawn_together() -> None:
    """A constant ratio on every prompt has an interval without width."""
    below = np.array([1.0, 10.0, 100.0, 1000.0])
    ratio = bootstrap(4, lambda rows: (2 * below[rows]).sum(axis=-1) / below[rows].sum(axis=-1))
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
