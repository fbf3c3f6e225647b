"""When requests of an open loop are due: as they please, whatever the service does. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator

# A request that is sent later than this after it was due counts as late.
LATE_S = 0.05


def poisson(per_second: float, seed: int | str) -> Iterator[float]:
    """Seconds from the beginning to each arrival, without end; gaps are exponential.

    Several independent sources are together one whose rate is their sum.

    Raises:
        ValueError: the rate is not positive.
    """
    if per_second <= 0:
        raise ValueError("the rate of arrivals must be positive")
    drawn = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += drawn.expovariate(per_second)
        yield at_s
