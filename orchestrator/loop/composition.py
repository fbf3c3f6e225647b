"""How several rewards become one score: composites by name, normalisation, weights and vetoes.

Pure functions of names and numbers: no model, no wire, no clock. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specrej.contracts import Normalization, WeightedReward
from specrej.contracts.errors import RewardInvalid, Violation
from specrej.contracts.validation import MAX_REWARDS, check_rewards

# The generator's own mean log-likelihood goes by this name.
LIKELIHOOD = "likelihood"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Composite:
    """Several rewards under one name; none of them is a composite itself."""

    name: str
    rewards: tuple[WeightedReward, ...]


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


def expanded(
    rewards: Sequence[WeightedReward], composites: Mapping[str, Composite]
) -> list[tuple[int, WeightedReward]]:
    """The rewards with composites replaced by their rewards, each with the index in `rewards`.

    Weights multiply. A composite hides a reward of the same name.
    """
    return [
        (index, part)
        for index, reward in enumerate(rewards)
        for part in _parts(reward, composites.get(reward.name))
    ]


def check_expansion(
    rewards: Sequence[WeightedReward], composites: Mapping[str, Composite], path: str
) -> Iterator[Violation]:
    """Check that requests set no normalization or veto of a composite, and that each reward occurs
    once after expansion."""
    for index, reward in enumerate(rewards):
        if reward.name not in composites:
            continue
        description = f"must be absent: the rewards of composite {reward.name} have theirs"
        if reward.normalization != Normalization():
            yield Violation(f"{path}[{index}].normalization", description)
        if reward.veto_below is not None:
            yield Violation(f"{path}[{index}].veto_below", description)
        if reward.stage != "both":
            yield Violation(f"{path}[{index}].stage", description)
        if reward.data:
            yield Violation(f"{path}[{index}].data", "must be absent: composites take none")
    names = [part.name for _, part in expanded(rewards, composites)]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        description = f"must have each once, also in composites: {', '.join(repeated)}"
        yield Violation(path, description)
    elif len(names) > MAX_REWARDS:
        description = f"must have at most {MAX_REWARDS}, those of composites counted"
        yield Violation(path, f"{description}, has {len(names)}")


def check_composites(composites: Sequence[Composite]) -> Iterator[Violation]:
    """Check for unique, valid names, and for valid rewards that are not composites."""
    names = [composite.name for composite in composites]
    for composite in composites:
        path = repr(composite.name)
        if not _NAME.fullmatch(composite.name) or composite.name == LIKELIHOOD:
            yield Violation(f"{path}.name", f"must match {_NAME.pattern} and not be {LIKELIHOOD}")
        if names.count(composite.name) > 1:
            yield Violation(f"{path}.name", "must be there once")
        if not composite.rewards:
            yield Violation(f"{path}.rewards", "must have at least 1")
        yield from check_rewards(composite.rewards, f"{path}.rewards")
        for index, reward in enumerate(composite.rewards):
            if reward.name in names:
                where = f"{path}.rewards[{index}].name"
                yield Violation(where, f"must be a reward, {reward.name} is a composite")


def _parts(reward: WeightedReward, composite: Composite | None) -> tuple[WeightedReward, ...]:
    if composite is None:
        return (reward,)
    return tuple(replace(part, weight=reward.weight * part.weight) for part in composite.rewards)


def _weighted(column: Sequence[float], reward: WeightedReward) -> list[float]:
    """All candidates' terms of one reward."""
    match reward.normalization.kind:
        case "fixed":
            mean, deviation = reward.normalization.mean, reward.normalization.deviation
            column = [(value - mean) / deviation for value in column]
        case "batch":
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
