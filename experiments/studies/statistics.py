"""Correlations, expected maxima and bootstrap intervals on plain arrays.

Intervals are 95 % percentile bootstraps (Efron, 1979) over prompts: prompts are drawn with
replacement, as many as there are, the figure is computed from each draw, and the middle 95 % of
these values are the interval. A prompt is drawn with all its candidates, so the variation between
its candidates is part of the variation between prompts. Candidates are not drawn within prompts: of
512 drawn with replacement a third is missing, often the best one too, so that the best of the draw
is biased downwards (the bootstrap of a maximum fails: Bickel and Freedman, 1981). Fewer than four
prompts have no interval, since draws of one prompt are all equal and would look certain.

A bootstrap does not cover where few prompts differ from the rest: of 20 prompts without a loss, no
draw has one. So shares have the exact interval of Clopper and Pearson (1934), and regrets, most of
which are 0, that of Gaffke (2005) for bounded values (`bounded_mean`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from experiments.trajectories import FloatArray, IntArray

Statistic = Callable[[IntArray], Any]

MIN_PROMPTS = 4
_CONFIDENCE = 0.95
_EDGE = (1 - _CONFIDENCE) / 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def bootstrap(num_prompts: int, statistic: Statistic) -> Estimate:
    """An estimate of `statistic`, which maps indices in [..., prompts] to values in [...].

    Draws are equal for equal numbers of prompts, so that figures can be compared. Values may be
    infinite; draws with NaN are left out.
    """
    value = float(statistic(np.arange(num_prompts)))
    return interval(value, np.asarray(statistic(resamples(num_prompts))), num_prompts)


def interval(value: float, resampled: FloatArray, num_prompts: int) -> Estimate:
    """A figure with the middle 95 % of its values on resampled prompts."""
    defined = resampled[~np.isnan(resampled)]
    if num_prompts < MIN_PROMPTS or len(defined) == 0:
        return Estimate(value)
    # "nearest", since no value lies between a finite and an infinite one.
    low, high = np.quantile(defined, [_EDGE, 1 - _EDGE], method="nearest")
    return Estimate(value, float(low), float(high))


def resamples(num_prompts: int, draws: int = 1000) -> IntArray:
    """[draws, prompts] indices drawn with replacement; equal for equal arguments."""
    return np.random.default_rng(0).integers(num_prompts, size=(draws, num_prompts))


def mean(values: FloatArray) -> Estimate:
    """The mean of a figure per prompt; NaNs are left out."""
    defined = values[~np.isnan(values)]
    if len(defined) == 0:
        return Estimate(math.nan)
    return bootstrap(len(defined), lambda prompts: defined[prompts].mean(axis=-1))


def share(outcomes: Iterable[bool]) -> Estimate:
    """The share of prompts with an outcome, with its exact interval (Clopper and Pearson, 1934).

    At each end, the observed number or a more extreme one has a probability of 2.5 %.
    """
    happened = [bool(outcome) for outcome in outcomes]
    size, count = len(happened), sum(happened)
    if not size:
        return Estimate(math.nan)
    low = _largest(lambda p: _tail(size, count, p) <= _EDGE) if count else 0.0
    high = 1 - _largest(lambda p: _tail(size, size - count, p) <= _EDGE) if count < size else 1.0
    return Estimate(count / size, low, high)


def _tail(size: int, least: int, probability: float) -> float:
    """The probability of at least `least` outcomes among `size`."""
    log_p, log_q = math.log(probability), math.log1p(-probability)
    log_ways = [
        math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
        for k in range(size + 1)
    ]
    return math.fsum(
        math.exp(log_ways[k] + k * log_p + (size - k) * log_q) for k in range(least, size + 1)
    )


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest probability up to which a condition holds, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def bounded_mean(values: FloatArray, largest: float) -> Estimate:
    """The mean of a figure per prompt that is at least 0 and on average at most `largest`.

    The interval covers for few values and where nearly all of them are 0: it ends at quantiles of
    the mean of the values and of one further at either bound, under random weights (Gaffke, 2005;
    Learned-Miller and Thomas, 2019, arXiv 1905.06208). Of values that are all 0 or `largest` it is
    the interval of Clopper and Pearson. A simulation is in tests/experiments/test_statistics.py.
    """
    if not len(values) or np.isnan(values).any():
        return Estimate(math.nan)
    bounds = (0.0, max(largest, float(values.max())))
    weights = _weights(len(values) + 1)
    low, high = (weights @ np.append(values, bound) for bound in bounds)
    return Estimate(
        float(values.mean()), float(np.quantile(low, _EDGE)), float(np.quantile(high, 1 - _EDGE))
    )


@lru_cache(maxsize=4)
def _weights(size: int) -> FloatArray:
    """[4000, size] random weights with a sum of 1, all equally likely; equal in every call."""
    gaps: FloatArray = np.random.default_rng(0).standard_exponential((4000, size))
    weights: FloatArray = gaps / gaps.sum(axis=1, keepdims=True)
    return weights


def quotient(above: FloatArray, below: FloatArray) -> Estimate:
    """The quotient of the sums of two figures per prompt, which are drawn together."""
    return bootstrap(
        len(above), lambda prompts: above[prompts].sum(axis=-1) / below[prompts].sum(axis=-1)
    )


def pearson(x: FloatArray, y: FloatArray) -> float:
    """Covariance over the product of the standard deviations (Pearson, 1895); NaN if one is 0."""
    if len(x) < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / scale if scale > 0 else math.nan


def kendall(x: FloatArray, y: FloatArray) -> float:
    """Tau-b (Kendall, 1945): (C - D) / sqrt((P - X) (P - Y)); NaN if all of x, or of y, are equal.

    Of P pairs, C have the same order in both, D the opposite order, X are tied in x and Y in y.
    Compares all pairs: suited to a thousand values at most.
    """
    above = np.triu_indices(len(x), k=1)
    signs_x = np.sign(x[:, None] - x[None, :])[above]
    signs_y = np.sign(y[:, None] - y[None, :])[above]
    untied = math.sqrt(float(np.abs(signs_x).sum()) * float(np.abs(signs_y).sum()))
    return float((signs_x * signs_y).sum()) / untied if untied > 0 else math.nan


def expected_first(ranked: FloatArray, n: int) -> float:
    """The mean, over all subsets of size `n`, of the value that ranks first in the subset.

    `ranked` has the values in their order, the best first; errors as of `first_weights`.
    """
    weights = first_weights(len(ranked), n)
    return float(ranked[: len(weights)] @ weights)


def first_weights(size: int, n: int) -> FloatArray:
    """The probability of each rank, from 0 to `size` - `n`, to be the first in a subset of `n`.

    It is C(N-1-r, n-1) / C(N, n) for rank r of N (Dodge et al., arXiv 1909.03004, without
    replacement as in Chen et al., arXiv 2107.03374).

    Raises:
        ValueError: `n` is not between 1 and `size`.
    """
    if not 1 <= n <= size:
        raise ValueError(f"no subsets of {n} among {size}")
    ranks = np.arange(size - n)
    # Each weight follows from the one before: binomial coefficients would overflow.
    steps = (size - ranks - n) / (size - 1 - ranks)
    return n / size * np.concatenate([[1.0], np.cumprod(steps)])
