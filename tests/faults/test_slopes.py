"""Slopes: flat and growing series, so that the soak can fail."""

from __future__ import annotations

import random

import pytest

from tests.faults.slopes import slope
from tests.faults.soak import BOUNDS, KNOWN_LEAK_BYTES, STEPS

SECONDS = [2.0 * number for number in range(300)]  # ten minutes
MIB_PER_HOUR = 4.0


def noisy(per_hour: float, noise: float = 0.2, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [100 + per_hour * second / 3600 + chance.gauss(0, noise) for second in SECONDS]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_grows(seed: int) -> None:
    assert slope(SECONDS, noisy(0, seed=seed)).is_flat(MIB_PER_HOUR, step=0.3)
    growth = slope(SECONDS, noisy(20, seed=seed))
    assert not growth.is_flat(MIB_PER_HOUR, step=0.3)
    assert growth.low < 20 < growth.high or abs(growth.per_hour - 20) < 5


@pytest.mark.parametrize("seed", range(5))
def test_slow_leak_is_detected_beside_the_known_one(seed: int) -> None:
    """Guards against attributing a leak to grpc: 64 bytes per request at 50 per second grow."""
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
