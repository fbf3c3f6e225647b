"""Where rounds end: the next decision token after a token position. Pure; standard library only."""

from __future__ import annotations

import math
from bisect import bisect_right

from specrej.contracts import Schedule


def next_decision_token(schedule: Schedule, num_tokens: int, max_tokens: int) -> int:
    """The first planned decision token beyond `num_tokens`, at most `max_tokens`."""
    match schedule.kind:
        case "tokens":
            index = bisect_right(schedule.tokens, num_tokens)
            planned = schedule.tokens[index] if index < len(schedule.tokens) else max_tokens
        case "geometric":
            planned = _geometric(schedule, num_tokens, max_tokens)
        case _:
            planned = max_tokens
    return min(planned, max_tokens)


def _geometric(schedule: Schedule, num_tokens: int, max_tokens: int) -> int:
    """The least floor(first * factor**i) beyond `num_tokens`; a small factor skips equal ones."""
    exact = float(schedule.first)
    while math.floor(exact) <= num_tokens and exact < max_tokens:
        exact *= schedule.factor
    return math.floor(min(exact, max_tokens))
