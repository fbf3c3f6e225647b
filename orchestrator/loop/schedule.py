"""Where rounds end: the next decision token after a token position. Pure; standard library only."""

from __future__ import annotations

import math
from bisect import bisect_right

from specrej.contracts import Algorithm, Schedule, Selection

# Of a prefix cache, which keeps whole blocks: vLLM's on GPUs, and half of one on CPUs.
BLOCK_TOKENS = 16


def schedule_of(selection: Selection) -> Schedule:
    """Its schedule; without decision tokens for Best-of-N: all candidates must reach their end."""
    is_best_of_n = selection.algorithm is Algorithm.BEST_OF_N
    return Schedule("tokens") if is_best_of_n else selection.schedule


def next_decision_token(
    schedule: Schedule, num_tokens: int, max_tokens: int, *, cached_prompt_tokens: int = 0
) -> int:
    """The first planned decision token beyond `num_tokens`, at most `max_tokens`.

    `cached_prompt_tokens`: those of the prompt, if each round computes again what is behind the
    last whole block of a prefix cache. There a geometric schedule's decision tokens are up to
    `BLOCK_TOKENS` - 1 later, where that is the last token only, which has no keys and values yet.
    """
    match schedule.kind:
        case "geometric":
            # The least floor(first * factor**i) beyond num_tokens: a small factor has equal ones.
            exact = float(schedule.first)
            while math.floor(exact) <= num_tokens and exact < max_tokens:
                exact *= schedule.factor
            planned = math.floor(min(exact, max_tokens))
            if cached_prompt_tokens:
                planned += (1 - cached_prompt_tokens - planned) % BLOCK_TOKENS
            return min(planned, max_tokens)
        case "tokens":
            tokens = schedule.tokens
            index = bisect_right(tokens, num_tokens)
            return min(tokens[index], max_tokens) if index < len(tokens) else max_tokens
        case "memory":
            return max_tokens


def most_rounds(schedule: Schedule, max_tokens: int) -> int:
    """The most rounds that the schedule plans; full slots may add some."""
    match schedule.kind:
        case "geometric":
            growth = max(max_tokens / schedule.first, 1.0)
            return min(max_tokens, 1 + math.ceil(math.log(growth) / math.log(schedule.factor)))
        case "tokens":
            return 1 + bisect_right(schedule.tokens, max_tokens - 1)
        case "memory":
            return 1


def first_round_tokens(schedule: Schedule, max_tokens: int) -> int:
    """Tokens that every candidate must be able to reach before the first cut."""
    if schedule.kind == "memory":
        return min(schedule.first, max_tokens)
    return next_decision_token(schedule, 0, max_tokens)
