"""Poisson arrivals."""

from __future__ import annotations

import itertools
import statistics

import pytest

from loadtest.arrivals import poisson


def test_gaps_are_exponential() -> None:
    """Mean and deviation of 20,000 gaps are 1 / rate, within 3 % (seeded: never by chance)."""
    times = list(itertools.islice(poisson(4.0, 1), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)


def test_a_seed_is_a_schedule() -> None:
    """Both algorithms of a sweep meet the same arrivals."""
    one, same, other = (list(itertools.islice(poisson(1.0, seed), 5)) for seed in ("a", "a", "b"))
    assert one == same != other


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        next(poisson(rate, 1))
