"""What is flat and what grows: a soak that cannot fail proves nothing."""

from __future__ import annotations

import random

import pytest

from tests.faults.slopes import slope
from tests.faults.soak import BOUNDS, KNOWN_LEAK_BYTES, STEPS

SECONDS = [2.0 * number for number in range(300)]  # ten minutes
MIB_PER_HOUR = 4.0


def noisy(per_hour: float, noise: float = 0.2, seed: int = 1) -> list[float]:
    drawn = random.Random(seed)
    return [100 + per_hour * second / 3600 + drawn.gauss(0, noise) for second in SECONDS]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat(seed: int) -> None:
    """In 1 of 40 seeds the interval lies above zero by chance: then the growth is tiny."""
    assert slope(SECONDS, noisy(0, seed=seed)).is_flat(MIB_PER_HOUR, step=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_grows(seed: int) -> None:
    found = slope(SECONDS, noisy(20, seed=seed))
    assert not found.is_flat(MIB_PER_HOUR, step=0.3)
    assert found.low < 20 < found.high or abs(found.per_hour - 20) < 5


def test_a_small_leak_without_noise_grows_and_shrinking_is_none() -> None:
    assert not slope(SECONDS, noisy(1, noise=0)).is_flat(MIB_PER_HOUR)
    assert slope(SECONDS, noisy(1, noise=0)).is_flat(MIB_PER_HOUR, step=0.2)
    assert slope(SECONDS, noisy(-500)).is_flat(0)


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_leak_of_ours_is_seen_beside_the_known_one(seed: int) -> None:
    """Guards against calling a leak grpc's: 64 bytes of each of 50 requests a second still grow."""
    requests, known_mib = 50 * SECONDS[-1], KNOWN_LEAK_BYTES * 0.07 * 50 * SECONDS[-1] / (1 << 20)
    ours = 64 * requests * 3600 / SECONDS[-1] / (1 << 20)
    grpcs = known_mib * 3600 / SECONDS[-1]
    bound, step = BOUNDS["MiB"], STEPS["MiB"]
    both = slope(SECONDS, noisy(ours + grpcs, seed=seed))
    assert not both.is_flat(bound, step)
    assert not both.without(known_mib, SECONDS[-1]).is_flat(bound, step)
    alone = slope(SECONDS, noisy(grpcs, noise=0.01, seed=seed))
    assert not alone.is_flat(bound, step)
    assert alone.without(known_mib, SECONDS[-1]).is_flat(bound, step)


def test_too_much_noise_shows_nothing() -> None:
    """Guards against a soak that is flat because nothing can be seen."""
    found = slope(SECONDS, noisy(0, noise=20))
    assert found.low <= 0
    assert not found.is_flat(MIB_PER_HOUR)


def test_what_comes_and_goes_does_not_count() -> None:
    """Guards against one request more at the end of a soak: the floor is what is never freed."""
    drawn = random.Random(3)
    values = [100 + drawn.choice((0, 0, 0, 20)) for _ in SECONDS]
    values[-3:] = [120] * 3
    assert slope(SECONDS, values) == slope(SECONDS, [100] * len(SECONDS))


def test_one_more_at_the_end_of_a_short_measurement_is_no_trend() -> None:
    """Guards against a soak of a minute that fails for one connection."""
    found = slope(SECONDS[:30], [14.0] * 20 + [15.0] * 10)
    assert not found.is_flat()
    assert found.is_flat(step=2)
    leaking = slope(SECONDS[:30], [14.0 + number for number in range(30)])
    assert not leaking.is_flat(step=2)


def test_a_wandering_series_is_not_called_a_leak() -> None:
    """Neighbouring samples of a slow wave are no independent witnesses: the interval is wider."""
    drawn, level, values = random.Random(5), 0.0, []
    for _ in SECONDS:
        level = 0.95 * level + drawn.gauss(0, 1)
        values.append(level)
    found = slope(SECONDS, values)
    independent = slope(SECONDS, random.Random(5).sample(values, len(values)))
    assert found.high - found.low > 2 * (independent.high - independent.low)


def test_a_constant_is_flat_to_the_last_bit() -> None:
    found = slope(SECONDS, [7.0] * len(SECONDS))
    assert (found.per_hour, found.low, found.high) == (0, 0, 0)


def test_too_few_samples_are_no_soak() -> None:
    with pytest.raises(ValueError, match="windows"):
        slope(SECONDS[:7], [1.0] * 7)
