"""The rejection policy of Speculative Rejection (arXiv 2410.20290, Algorithm 1), and where forks go
(see `specrej.contracts.Branching`).

Pure functions of numbers: no model, no wire, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal

from specrej.contracts import Branching


def num_kept(num_ranked: int, alpha: float, least: int = 1) -> int:
    """max(least, round_half_even((1 - alpha) * num_ranked)), alpha as it is written in decimal.

    In binary, (1 - 0.9) * 15 falls just short of 1.5, which would change the rounding.
    """
    exact = (1 - Decimal(repr(alpha))) * num_ranked
    return max(least, int(exact.to_integral_value(rounding=ROUND_HALF_EVEN)))


def rank(
    scores: Mapping[int, float], vetoed: Collection[int] = (), truncated: Collection[int] = ()
) -> list[int]:
    """Candidate ids, best first: the one order of cuts, answers, stored answers and studies.

    By descending score; `truncated` ones after all others, vetoed ones last; ties: the lower id
    first. `truncated` is empty where a request ranks by reward alone.
    """
    return sorted(scores, key=lambda c: (c in vetoed, c in truncated, -scores[c], c))


def num_released(num_live: int, num_tokens: int, num_stalled: int = 0) -> int:
    """Live candidates to reject when the slots are full, at least 1: each survivor can then grow by
    a token. All have `num_tokens` tokens, the newest of which holds no slot yet.

    Twice as many for each of the `num_stalled` rounds whose slots were full here before: where
    slots come in blocks, a token may need a whole one."""
    return max(1, -(-num_live // max(1, num_tokens))) << num_stalled


def cut(
    scores: Mapping[int, float],
    live: Collection[int],
    alpha: float,
    *,
    least: int = 1,
    release: int = 0,
    vetoed: Collection[int] = (),
    has_answer: bool = False,
) -> set[int]:
    """The candidates that stay when the lowest fraction alpha of the ranked ones is rejected,
    finished and live together.

    Keeps at least `least` candidates, or all. With `release`, rejects at least so many *live* ones
    as long as `least` live ones remain; of `least` or fewer live ones, it rejects one unless it is
    the only one. Otherwise a round that full slots end could free no slot, and the run would never
    end.

    Vetoed candidates rank lowest and are rejected whatever alpha is. If all are vetoed, the best
    live one is kept, so that there is an answer. With `has_answer` none is kept: a complete
    candidate without a veto exists already, though it was ranked out.
    """
    ranking = rank(scores, vetoed)
    best = ranking[: num_kept(len(ranking), alpha, least)]
    kept = [number for number in best if number not in vetoed]
    if not kept and not has_answer:
        kept = ([number for number in ranking if number in live] or ranking)[:1]
    live_kept = [candidate for candidate in kept if candidate in live]
    for candidate in live_kept[max(1, min(least, len(live) - 1), len(live) - release) :]:
        kept.remove(candidate)
    return set(kept)


def width_at(branching: Branching, first_tokens: int, growth_tokens: int) -> int:
    """Live candidates of a round of `growth_tokens`; the first round has `first_tokens`."""
    part = math.pow(first_tokens / max(first_tokens, growth_tokens), branching.taper)
    return max(branching.keep, round(branching.width * part))


def forks_of(survivors: Sequence[int], width: int, first_id: int) -> dict[int, int]:
    """The parent of each fork that `width` candidates need, in turn from the first survivor.

    `survivors` are ids, best first; forks have consecutive ids from `first_id` on.
    """
    count = max(0, width - len(survivors)) if survivors else 0
    return {first_id + index: survivors[index % len(survivors)] for index in range(count)}
