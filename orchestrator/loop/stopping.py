"""When enough is known: waves of candidates, confidence, and what ends a request early.

Pure functions of numbers: no model, no wire, no clock. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import accumulate

from orchestrator.loop.votes import Choice, is_decided, votes_needed
from specrej.contracts import Selection, StopReason

TOP_LOGPROBS = 5  # most probable tokens whose log-probabilities are the confidence of a step


def next_wave(selection: Selection, begun: int, choices: list[Choice]) -> range:
    """The ids of the next wave's candidates, when `begun` have begun; empty: none is left.

    First `waves`, or all if it is 0; then as many as there are already, up to n. With a vote no
    more than may decide it, and at least `waves`.
    """
    n, least = selection.n, selection.waves or selection.n
    size = min(begun or least, n - begun)
    if selection.vote and begun:
        size = min(size, max(least, votes_needed(choices, selection.vote, n - begun)))
    return range(begun, begun + size)


def reason_to_stop(
    selection: Selection, scores: Sequence[float], choices: list[Choice], num_left: int
) -> StopReason | None:
    """Why the request can end now, with `scores` of the complete answers that no reward vetoes.

    `choices`: the votes; `num_left`: candidates that are live or have not begun. None while fewer
    than `min_answers` are complete.
    """
    if not num_left or len(scores) < max(1, selection.min_answers):
        return None
    if selection.stop_at is not None and max(scores) >= selection.stop_at:
        return StopReason.SCORE
    if selection.first and len(scores) >= selection.first:
        return StopReason.FIRST
    if selection.vote and is_decided(choices, selection.vote, num_left):
        return StopReason.VOTE
    return None


def confidence(top_logprobs: Sequence[float]) -> float:
    """Of one step: minus the mean log-probability of its most probable tokens. Higher is surer: the
    less probable the others are, the lower is the mean (DeepConf, arXiv 2508.15260)."""
    return -math.fsum(top_logprobs) / len(top_logprobs)


def least_confidence(confidences: Sequence[float], window: int) -> float:
    """The least mean over `window` consecutive steps; of fewer steps, their mean; inf of none."""
    if len(confidences) <= window:
        return math.fsum(confidences) / len(confidences) if confidences else math.inf
    sums = list(accumulate(confidences, initial=0.0))
    return min(end - begin for begin, end in zip(sums, sums[window:], strict=False)) / window


def threshold(confidences: Sequence[float], keep: float) -> float:
    """The greatest one that at least the fraction `keep` of them reaches; -inf of none."""
    ordered = sorted(confidences, reverse=True)
    # In binary, 0.28 * 25 is above 7.
    return ordered[math.ceil(Decimal(repr(keep)) * len(ordered)) - 1] if ordered else -math.inf
