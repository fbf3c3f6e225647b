"""Open-loop load: requests are sent at times of a Poisson process, whether or not earlier ones are
answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

# A request that is sent later than this after it was due counts as late.
LATE_S = 0.05

T = TypeVar("T")


def poisson(per_second: float, seed: int | str) -> Iterator[float]:
    """Seconds from the start to each arrival, endless; gaps are exponential.

    The arrivals of several sources together are those of one source with the sum of their rates.

    Raises:
        ValueError: the rate is not positive.
    """
    if per_second <= 0:
        raise ValueError("the rate of arrivals must be positive")
    rng = random.Random(seed)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_second)
        yield at_s


async def send_open_loop(
    send: Callable[[int, float], Coroutine[Any, Any, T]], arrivals_s: Iterable[float]
) -> list[T]:
    """Run `send(index, due)` for every arrival without waiting for earlier ones; all results.

    `due` is a reading of time.perf_counter(): the scheduled time, even if this loop wakes later.
    """
    started = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, at_s in enumerate(arrivals_s):
            due = started + at_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(group.create_task(send(index, due)))
    return [task.result() for task in tasks]
