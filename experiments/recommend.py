"""From a sweep to a setting: the least compute for a regret, or the best reward for a compute.

Means over prompts come with 95 % intervals from a bootstrap over prompts. The best of hundreds of
settings looks better on the prompts it was chosen on than it is; so the choice is made again in
every resample, and judged on the prompts that were left out of it.
"""

from __future__ import annotations

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
    """What is asked: the least cost with at most `regret`, or the least regret with `tokens`.

    Exactly one is given. regret: of the mean over prompts, as in `experiments.sweep`.
    tokens: generated per prompt, on average.
    """

    regret: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        if (self.regret is None) == (self.tokens is None):
            raise ValueError("a target is either a regret or a number of tokens")


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
    tokens = np.stack([each.tokens for each in swept])
    order = ranking(regrets.mean(axis=1), tokens.mean(axis=1), target)
    if not len(order):
        raise NothingFits(_nearest(regrets, tokens, target))
    best = int(order[0])
    draws = drawn(regrets.shape[1], resamples, seed)
    choices = [_choice(regrets, tokens, draw, target) for draw in draws]
    held_out = _held_out(regrets, tokens, choices, draws)
    chosen = swept[best]
    return Recommendation(
        chosen=chosen,
        regret=estimate(chosen.regrets, draws),
        tokens=estimate(chosen.tokens, draws),
        cost=estimate(chosen.costs, draws),
        held_out_regret=held_out[0],
        held_out_tokens=held_out[1],
        same_choice=sum(choice == best for choice in choices) / len(choices),
        runners_up=tuple(swept[int(row)] for row in order[1 : 1 + num_runners_up]),
    )


def ranking(regrets: FloatArray, tokens: FloatArray, target: Target) -> IntArray:
    """Rows that meet the target, best first; ties are broken by the other of the two."""
    if target.regret is not None:
        rows = np.lexsort((regrets, tokens))
        fits = regrets[rows] <= target.regret
    else:
        assert target.tokens is not None
        rows = np.lexsort((tokens, regrets))
        fits = tokens[rows] <= target.tokens
    chosen: IntArray = rows[fits]
    return chosen


def drawn(num_prompts: int, resamples: int, seed: int) -> IntArray:
    """[resamples, prompts] prompts drawn with replacement."""
    return np.random.default_rng(seed).integers(num_prompts, size=(resamples, num_prompts))


def estimate(values: FloatArray, draws: IntArray) -> Estimate:
    """A mean over prompts, with its interval."""
    low, high = np.percentile(values[draws].mean(axis=1), _LEVELS)
    return Estimate(float(values.mean()), float(low), float(high))


def _choice(regrets: FloatArray, tokens: FloatArray, draw: IntArray, target: Target) -> int | None:
    """What would be chosen on these prompts; None: nothing fits there."""
    order = ranking(regrets[:, draw].mean(axis=1), tokens[:, draw].mean(axis=1), target)
    return int(order[0]) if len(order) else None


def _held_out(
    regrets: FloatArray, tokens: FloatArray, choices: Sequence[int | None], draws: IntArray
) -> tuple[float, float]:
    """Mean regret and tokens of choices on prompts that they did not see; NaN if they saw all."""
    seen_regrets, seen_tokens = [], []
    for choice, draw in zip(choices, draws, strict=True):
        left = np.setdiff1d(np.arange(regrets.shape[1]), draw)
        if choice is not None and len(left):
            seen_regrets.append(regrets[choice, left].mean())
            seen_tokens.append(tokens[choice, left].mean())
    if not seen_regrets:
        return float("nan"), float("nan")
    return float(np.mean(seen_regrets)), float(np.mean(seen_tokens))


def _nearest(regrets: FloatArray, tokens: FloatArray, target: Target) -> str:
    if target.regret is not None:
        least = float(regrets.mean(axis=1).min())
        return f"no setting has a regret of at most {target.regret:g}: the least is {least:.3g}"
    least = float(tokens.mean(axis=1).min())
    return f"no setting makes at most {target.tokens:g} tokens: the least is {least:.0f}"
