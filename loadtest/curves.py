"""The number of users over time. Does not import Locust, which patches ssl."""

from __future__ import annotations

import math


def ramp(elapsed_s: float, length_s: float, users: int) -> int:
    """From one user to all, evenly."""
    return min(users, 1 + math.floor(users * elapsed_s / length_s))


def spike(elapsed_s: float, length_s: float, users: int) -> int:
    """A tenth of the users, all in the middle third, a tenth again."""
    in_the_middle = length_s / 3 <= elapsed_s < 2 * length_s / 3
    return users if in_the_middle else max(1, users // 10)


def constant(elapsed_s: float, length_s: float, users: int) -> int:
    """All users."""
    return users
