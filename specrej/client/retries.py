"""Repeated attempts of a client's call."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from specrej.contracts.errors import Overloaded, RetryableError, SpecrejError, Unavailable

LONGEST_S = 1e8  # three years: grpc counts nanoseconds in 64 bits


@dataclass(frozen=True, slots=True)
class Retries:
    """Repeats a call that ends with an error of `on` before its first event.

    The wait is what the server's RetryInfo demands (1 s if it sends none), and up to a fifth more
    at random. If that is above `max_wait_s`, or ends after the call's deadline, the error is
    raised. The server identifies a request by its content: a repeated one joins an equal one that
    still runs, or receives its stored answer, unless its `cache` is bypass or refresh.
    """

    attempts: int = 4  # in all
    max_wait_s: float = 10.0
    on: tuple[type[RetryableError], ...] = (Unavailable, Overloaded)

    def __post_init__(self) -> None:
        """Raises ValueError: a value out of range."""
        if self.attempts < 1 or not self.max_wait_s >= 0:
            raise ValueError("attempts must be 1 or more, max_wait_s 0 or more")


# Of clients that were given none.
_DEFAULT = Retries(on=(Unavailable,))


class Attempts:
    """The attempts of one call, all before its deadline in `timeout_s` seconds."""

    def __init__(self, retries: Retries | None, timeout_s: float) -> None:
        self._retries = retries or _DEFAULT
        self._num_failed = 0
        self._deadline = time.monotonic() + min(timeout_s, LONGEST_S)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return self._deadline - time.monotonic()

    async def after(self, error: SpecrejError) -> None:
        """Wait for the next attempt; raises the error if there is none."""
        self._num_failed += 1
        retries, wait_s = self._retries, error.retry_after_s
        if wait_s is None or not isinstance(error, retries.on):
            raise error
        least_s, wait_s = wait_s, wait_s * random.uniform(1, 1.2)
        is_last = self._num_failed >= retries.attempts
        if is_last or least_s > retries.max_wait_s or wait_s >= self.left_s:
            raise error
        await asyncio.sleep(wait_s)
