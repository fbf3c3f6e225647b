"""Estimates with 95 % intervals over prompts, and exact expectations over draws of answers.

Intervals are percentile bootstraps over prompts (`scipy.stats.bootstrap`). A prompt is drawn with
all its candidates. Candidates are not drawn within prompts: of 512 drawn with replacement a third
is missing, often the best one too, so that the best of the draw is biased downwards (Bickel and
Freedman, 1981). Fewer than four prompts have no interval, since draws of one prompt are all equal.

A bootstrap does not cover where few prompts differ from the rest: of 20 prompts without a loss, no
draw has one. So shares have the exact interval of Clopper and Pearson (1934), and regrets, most of
which are 0, that of Gaffke (2005) for bounded values (`bounded_mean`), which scipy lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from experiments.trajectories import FloatArray, IntArray

MIN_PROMPTS = 4
_CONFIDENCE = 0.95
_EDGES = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.value) or math.isnan(self.low):
            return shown(self.value)
        return f"{shown(self.value)} ({shown(self.low)} to {shown(self.high)})"


def shown(value: Any) -> str:
    """A cell as text: three digits, nothing for NaN and None, "beyond" for infinity."""
    if isinstance(value, bool | str | Estimate):
        return str(value)
    if value is None or math.isnan(value):
        return ""
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if math.isinf(value):
        return "beyond" if value > 0 else "-beyond"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value + 0.0:.3g}"  # adding 0.0 turns -0.0 into 0.0


def resampled(num_prompts: int, statistic: Callable[[IntArray], Any]) -> FloatArray:
    """[1000] values of a statistic on prompts drawn with replacement; [1] for a single prompt.

    `statistic` maps indices in [..., prompts] to values in [...]. Draws are equal for equal numbers
    of prompts, so that figures can be compared. Values may be infinite.
    """
    if num_prompts == 1:
        return np.atleast_1d(statistic(np.zeros(1, np.int64)))
    with np.errstate(invalid="ignore"):
        result = stats.bootstrap(
            (np.arange(num_prompts),),
            lambda prompts, axis: np.asarray(statistic(prompts), dtype=np.float64),
            n_resamples=_DRAWS,
            confidence_level=_CONFIDENCE,
            method="percentile",
            vectorized=True,
            rng=np.random.default_rng(0),
        )
    draws: FloatArray = result.bootstrap_distribution
    return draws


def bootstrap(num_prompts: int, statistic: Callable[[IntArray], Any]) -> Estimate:
    """An estimate of a statistic, as of `resampled`; draws with NaN are left out."""
    value = float(statistic(np.arange(num_prompts)))
    if num_prompts < MIN_PROMPTS:
        return Estimate(value)
    draws = resampled(num_prompts, statistic)
    defined = draws[~np.isnan(draws)]
    if math.isnan(value) or not len(defined):
        return Estimate(value)
    # "nearest", since no value lies between a finite and an infinite one.
    low, high = np.quantile(defined, _EDGES, method="nearest")
    return Estimate(value, float(low), float(high))


def mean(values: ArrayLike) -> Estimate:
    """The mean of a figure per prompt; NaNs are left out."""
    array = np.asarray(values, dtype=np.float64)
    defined = array[~np.isnan(array)]
    if not len(defined):
        return Estimate(math.nan)
    return bootstrap(len(defined), lambda prompts: defined[prompts].mean(axis=-1))


def share(outcomes: Iterable[bool]) -> Estimate:
    """The share of prompts with an outcome, with its exact interval (Clopper and Pearson)."""
    happened = [bool(outcome) for outcome in outcomes]
    if not happened:
        return Estimate(math.nan)
    test = stats.binomtest(sum(happened), len(happened))
    interval = test.proportion_ci(_CONFIDENCE, method="exact")
    return Estimate(float(test.statistic), float(interval.low), float(interval.high))


def bounded_mean(values: ArrayLike, largest: float) -> Estimate:
    """The mean of a figure per prompt that is at least 0 and on average at most `largest`.

    The interval covers for few values and where nearly all of them are 0: it ends at quantiles of
    the mean of the values and of one further at either bound, under random weights (Gaffke, 2005;
    Learned-Miller and Thomas, 2019, arXiv 1905.06208). Of values that are all 0 or `largest` it is
    the interval of Clopper and Pearson. A simulation is in tests/experiments/test_statistics.py.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array) or np.isnan(array).any():
        return Estimate(math.nan)
    bounds = (0.0, max(largest, float(array.max())))
    weights = _weights(len(array) + 1)
    low, high = (weights @ np.append(array, bound) for bound in bounds)
    edges = (float(np.quantile(low, _EDGES[0])), float(np.quantile(high, _EDGES[1])))
    return Estimate(float(array.mean()), *edges)


@lru_cache(maxsize=4)
def _weights(size: int) -> FloatArray:
    """[4000, size] random weights with a sum of 1, all equally likely; equal in every call."""
    gaps: FloatArray = np.random.default_rng(0).standard_exponential((4000, size))
    weights: FloatArray = gaps / gaps.sum(axis=1, keepdims=True)
    return weights


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's tau-b; NaN for fewer than two values, and if all of x, or of y, are equal."""
    return float(stats.kendalltau(x, y).statistic) if np.size(x) > 1 else math.nan


def pearson(x: FloatArray, y: FloatArray) -> float:
    """Pearson's r; NaN for fewer than two values, and if all of x, or of y, are equal."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(stats.pearsonr(x, y).statistic)


def expected_first(ranked: FloatArray) -> FloatArray:
    """[N + 1, ...] means, over all subsets of n rows of `ranked`, of the row that ranks first.

    `ranked` [N, ...] has the best row first. Row n of the result is for subsets of n; row 0 is NaN.
    Rank r of N is the first with probability C(N-1-r, n-1) / C(N, n) (Dodge et al., arXiv
    1909.03004, without replacement as in Chen et al., arXiv 2107.03374).
    """
    means: FloatArray = np.tensordot(_first_weights(len(ranked)), ranked, axes=1)
    means[0] = math.nan
    return means


@lru_cache(maxsize=8)
def _first_weights(size: int) -> FloatArray:
    """[size + 1, size] probabilities of each rank to be the first in a subset of n; row 0 is 0."""
    weights = np.zeros((size + 1, size))
    for n in range(1, size + 1):
        ranks = np.arange(size - n)
        # Each weight follows from the one before: binomial coefficients would overflow.
        steps = (size - ranks - n) / (size - 1 - ranks)
        weights[n, : size - n + 1] = n / size * np.concatenate([[1.0], np.cumprod(steps)])
    return weights


def matched_cost(costs: ArrayLike, rewards: FloatArray, targets: FloatArray) -> FloatArray:
    """[draws] the least cost with a reward of at least the target, such as N or tokens.

    Between two costs, rewards are interpolated linearly over the logarithm of the cost.

    costs: [any] or [draws, any], rising. rewards: [draws, any], rising with cost. targets: [draws].
    The first cost if it is as good; infinite if the last one is not.
    """
    matched = np.empty(len(targets))
    rows = zip(np.broadcast_to(costs, rewards.shape), rewards, targets, strict=True)
    for i, (known, row, target) in enumerate(rows):
        # Sums in another order may differ in the last bits.
        is_as_good = row >= target - 1e-9 * abs(row[-1] - row[0])
        first = int(np.argmax(is_as_good))
        if not is_as_good[first]:
            matched[i] = math.inf
        elif first == 0:
            matched[i] = known[0]
        else:
            between = slice(first - 1, first + 1)
            matched[i] = np.exp(np.interp(target, row[between], np.log(known[between])))
    return matched


def expected_saving(lengths: IntArray, alpha: float, decision_tokens: Sequence[int]) -> float:
    """Tokens of all answers over those of a run that keeps 1 - alpha at each decision token.

    For doublings from 16, alpha 0.5 and answers of T tokens it is T / (16 (1 + log2(T / 16) / 2)).
    Survival is assumed independent of length; only for equal lengths is the result a bound.
    """
    ends = [0, *decision_tokens, int(lengths.max())]
    spent = np.diff([float(np.minimum(lengths, end).mean()) for end in ends])
    kept = (1 - alpha) ** np.arange(len(spent))
    return float(lengths.mean() / (kept * spent).sum())
