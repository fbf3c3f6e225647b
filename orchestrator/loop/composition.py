"""How several rewards become one score: normalisation, weights and vetoes.

Pure functions of names and numbers: no model, no wire, no clock. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrej.contracts import WeightedReward
from specrej.contracts.errors import RewardInvalid

# The generator's own mean log-likelihood goes by this name.
LIKELIHOOD = "likelihood"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A candidate's score, and whether one of the rewards vetoes it."""

    score: float
    vetoed: bool


def combine(
    values: Mapping[int, Sequence[float]], rewards: Sequence[WeightedReward]
) -> dict[int, Verdict]:
    """Per candidate id the weighted sum of its normalised values; vetoes use the raw ones.

    `values` are the raw values, one per reward, of all candidates to compare: "batch" normalises
    over just these.

    Raises:
        RewardInvalid: a weighted sum of finite values is too large for a float.
    """
    if not values:
        return {}
    columns = zip(*values.values(), strict=True)
    weighted = [_weighted(column, reward) for column, reward in zip(columns, rewards, strict=True)]
    return {
        candidate: Verdict(_sum(terms), is_vetoed(values[candidate], rewards))
        for candidate, terms in zip(values, zip(*weighted, strict=True), strict=True)
    }


def _weighted(column: Sequence[float], reward: WeightedReward) -> list[float]:
    """All candidates' terms of one reward."""
    if reward.normalization.kind == "batch":
        column = _standardised(column)
    return [reward.weight * value for value in column]


def _standardised(column: Sequence[float]) -> list[float]:
    """Standard deviations (of all, not of a sample) from the mean; 0 where all are equal.

    Shifted by the least value and scaled by the power of two above the largest: so no square of
    finite numbers overflows or vanishes, and equal values differ by exactly 0.
    """
    _, exponent = math.frexp(max(map(abs, column)))
    least = math.ldexp(min(column), -exponent)
    above = [math.ldexp(value, -exponent) - least for value in column]
    mean = math.fsum(above) / len(above)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in above) / len(above))
    return [(value - mean) / deviation if deviation else 0.0 for value in above]


def _sum(terms: Sequence[float]) -> float:
    try:
        # Exactly rounded, so that the order of the rewards does not matter.
        if math.isfinite(total := math.fsum(terms)):
            return total
    except (OverflowError, ValueError):  # too large, or infinities of both signs
        pass
    raise RewardInvalid("a combined score is not finite")


def is_vetoed(raw: Sequence[float], rewards: Sequence[WeightedReward]) -> bool:
    """Whether a raw value is below its reward's threshold; NaN, where none is known, is not."""
    return any(
        reward.veto_below is not None and value < reward.veto_below
        for value, reward in zip(raw, rewards, strict=True)
    )
