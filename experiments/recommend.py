"""From a sweep to a setting: the least compute for a regret, or the best reward for a compute.

Means over prompts come with 95 % intervals from a bootstrap over prompts. The best of hundreds of
settings looks better on the prompts it was chosen on than it is; so the choice is made again in
every resample, and judged on the prompts that were left out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.sweep import Swept
from experiments.trajectories import FloatArray, IntArray

_LEVELS = (2.5, 97.5)
DEFAULT_RESAMPLES = 1000


class NothingFits(ValueError):
    """No setting meets the target; says how near the nearest comes."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked: the fewest tokens with at most `regret`, or the least regret for a budget.

    Exactly one is given, of means over prompts. regret, cost: as in `experiments.sweep`.
    tokens: generated per prompt.
    """

    regret: float | None = None
    tokens: float | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        if [self.regret, self.tokens, self.cost].count(None) != 2:
            raise ValueError("a target is either a regret, a number of tokens or a cost")

    @property
    def budget(self) -> float:
        """Tokens or cost; infinite where a regret is asked for."""
        return next((each for each in (self.tokens, self.cost) if each is not None), math.inf)

    def spent(self, swept: Swept) -> FloatArray:
        """[P] of a setting, in what the budget is in."""
        return swept.tokens if self.cost is None else swept.costs


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The chosen setting, what it costs and gives on these prompts, and how sure that is.

    held_out_*: means on prompts that had no part in a choice, over all resamples.
    same_choice: the share of resamples that choose this very setting.
    runners_up: the settings next to it, best first.
    """

    chosen: Swept
    regret: Estimate
    tokens: Estimate
    cost: Estimate
    held_out_regret: float
    held_out_tokens: float
    held_out_cost: float
    same_choice: float
    runners_up: tuple[Swept, ...]


def recommend(
    swept: Sequence[Swept],
    target: Target,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
    num_runners_up: int = 3,
) -> Recommendation:
    """The setting that meets the target best.

    Raises:
        NothingFits: none does.
    """
    regrets = np.stack([each.regrets for each in swept])  # [settings, prompts]
    spent = np.stack([target.spent(each) for each in swept])
    order = ranking(regrets.mean(axis=1), spent.mean(axis=1), target)
    if not len(order):
        raise NothingFits(_nearest(regrets, spent, target))
    best = int(order[0])
    draws = drawn(regrets.shape[1], resamples, seed)
    choices = [_choice(regrets, spent, draw, target) for draw in draws]
    held_out = _held_out(swept, choices, draws)
    chosen = swept[best]
    return Recommendation(
        chosen=chosen,
        regret=estimate(chosen.regrets, draws),
        tokens=estimate(chosen.tokens, draws),
        cost=estimate(chosen.costs, draws),
        held_out_regret=held_out[0],
        held_out_tokens=held_out[1],
        held_out_cost=held_out[2],
        same_choice=sum(choice == best for choice in choices) / len(choices),
        runners_up=tuple(swept[int(row)] for row in order[1 : 1 + num_runners_up]),
    )


def ranking(regrets: FloatArray, spent: FloatArray, target: Target) -> IntArray:
    """Rows that meet the target, best first; ties are broken by the other of the two."""
    if target.regret is not None:
        rows = np.lexsort((regrets, spent))
        fits = regrets[rows] <= target.regret
    else:
        rows = np.lexsort((spent, regrets))
        fits = spent[rows] <= target.budget
    chosen: IntArray = rows[fits]
    return chosen


def drawn(num_prompts: int, resamples: int, seed: int) -> IntArray:
    """[resamples, prompts] prompts drawn with replacement."""
    return np.random.default_rng(seed).integers(num_prompts, size=(resamples, num_prompts))


def estimate(values: FloatArray, draws: IntArray) -> Estimate:
    """A mean over prompts, with its interval."""
    low, high = np.percentile(values[draws].mean(axis=1), _LEVELS)
    return Estimate(float(values.mean()), float(low), float(high))


def _choice(regrets: FloatArray, spent: FloatArray, draw: IntArray, target: Target) -> int | None:
    """What would be chosen on these prompts; None: nothing fits there."""
    order = ranking(regrets[:, draw].mean(axis=1), spent[:, draw].mean(axis=1), target)
    return int(order[0]) if len(order) else None


def _held_out(
    swept: Sequence[Swept], choices: Sequence[int | None], draws: IntArray
) -> tuple[float, float, float]:
    """Mean regret, tokens and cost of choices on prompts that they did not see; NaN if none."""
    seen = []
    for choice, draw in zip(choices, draws, strict=True):
        left = np.setdiff1d(np.arange(draws.shape[1]), draw)
        if choice is not None and len(left):
            chosen = swept[choice]
            seen.append([x[left].mean() for x in (chosen.regrets, chosen.tokens, chosen.costs)])
    if not seen:
        return math.nan, math.nan, math.nan
    regret, tokens, cost = np.mean(seen, axis=0)
    return float(regret), float(tokens), float(cost)


def _nearest(regrets: FloatArray, spent: FloatArray, target: Target) -> str:
    if target.regret is not None:
        least = float(regrets.mean(axis=1).min())
        return f"no setting has a regret of at most {target.regret:g}: the least is {least:.3g}"
    least = float(spent.mean(axis=1).min())
    if target.cost is not None:
        return f"no setting has a cost of at most {target.cost:g}: the least is {least:.3g}"
    return f"no setting makes at most {target.tokens:g} tokens: the least is {least:.0f}"
