"""Correlations, expected maxima and bootstrap intervals on plain arrays.

Intervals are 95 % percentile bootstraps (Efron, 1979) over prompts: prompts are drawn with
replacement, as many as there are, the figure is computed from each draw, and the middle 95 % of
these values are the interval. A prompt is drawn with all its candidates, so the variation between
its candidates is part of the variation between prompts. Candidates are not drawn within prompts: of
512 drawn with replacement a third is missing, often the best one too, so that the best of the draw
is biased downwards (the bootstrap of a maximum fails: Bickel and Freedman, 1981). Fewer than four
prompts have no interval, since draws of one prompt are all equal and would look certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.trajectories import FloatArray, IntArray

Statistic = Callable[[IntArray], Any]

MIN_PROMPTS = 4
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def bootstrap(num_prompts: int, statistic: Statistic, draws: int = 1000) -> Estimate:
    """An estimate of `statistic`, which maps indices in [..., prompts] to values in [...].

    Draws are equal for equal numbers of prompts, so that figures can be compared. Values may be
    infinite; draws with NaN are left out.
    """
    value = float(statistic(np.arange(num_prompts)))
    return interval(value, np.asarray(statistic(resamples(num_prompts, draws))), num_prompts)


def interval(value: float, resampled: FloatArray, num_prompts: int) -> Estimate:
    """A figure with the middle 95 % of its values on resampled prompts."""
    defined = resampled[~np.isnan(resampled)]
    if num_prompts < MIN_PROMPTS or len(defined) == 0:
        return Estimate(value)
    edge = (1 - _CONFIDENCE) / 2
    # "nearest", since no value lies between a finite and an infinite one.
    low, high = np.quantile(defined, [edge, 1 - edge], method="nearest")
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

    `ranked` has the values in their order, the best first. The value of rank r (from 0) of N is the
    first of a subset with probability C(N-1-r, n-1) / C(N, n) (Dodge et al., arXiv 1909.03004,
    without replacement as in Chen et al., arXiv 2107.03374).

    Raises:
        ValueError: `n` is not between 1 and the number of values.
    """
    size = len(ranked)
    if not 1 <= n <= size:
        raise ValueError(f"no subsets of {n} among {size}")
    ranks = np.arange(size - n)
    # Each weight follows from the one before: binomial coefficients would overflow.
    steps = (size - ranks - n) / (size - 1 - ranks)
    weights = n / size * np.concatenate([[1.0], np.cumprod(steps)])
    return float(ranked[: size - n + 1] @ weights)
