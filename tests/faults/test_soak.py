"""Flat and growing measurements, so that the soak can fail."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tests.faults.soak import KNOWN_LEAK_BYTES, Soak
from tests.faults.world import SERVICES

SECONDS = [2.0 * number for number in range(300)]  # ten minutes
REQUESTS_PER_S, EARLY = 50, 0.07
# A leak of 64 bytes per request, and that of grpc per call that its client ended early.
OURS, GRPCS = (3600 * REQUESTS_PER_S * size / (1 << 20) for size in (64, KNOWN_LEAK_BYTES * EARLY))


def soaked(mib_per_hour: float, early: float, seed: int) -> Soak:
    """Memory with peaks of 0.2 MiB, and two keys of Redis more or less."""
    chance = random.Random(seed)
    soak = Soak(early=round(early * REQUESTS_PER_S * SECONDS[-1]), seconds=SECONDS)
    grown = [100 + mib_per_hour * second / 3600 for second in SECONDS]
    soak.values = defaultdict(list, {"redis keys": [chance.choice((30.0, 32.0)) for _ in SECONDS]})
    for name in SERVICES:
        soak.values[f"{name} MiB"] = [mib + abs(chance.gauss(0, 0.2)) for mib in grown]
    return soak


@pytest.mark.parametrize("seed", range(5))
def test_leaks_grow_and_noise_and_the_known_leak_do_not(seed: int) -> None:
    """Guards against a leak that is taken for grpc's, too."""
    memory = [f"{name} MiB" for name in SERVICES]
    assert soaked(0, 0, seed).growing() == []
    assert soaked(2 * GRPCS, EARLY, seed).growing() == []
    assert soaked(2 * GRPCS, 0, seed).growing() == memory
    assert soaked(GRPCS + OURS, EARLY, seed).growing() == memory


def test_counts_may_not_grow() -> None:
    soak = soaked(0, 0, 1)
    soak.values["redis keys"] = [0.0] * 150 + [1.0] * 150
    soak.values["generator fds"] = [30.0] * 150 + [33.0] * 150
    assert soak.growing() == ["redis keys", "generator fds"]
