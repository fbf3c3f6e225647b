"""Correlations, expected answers and bootstrap intervals, on plain arrays. Knows no study.

Intervals are 95 % percentile bootstraps (Efron, 1979) over prompts: a figure is computed anew from
prompts that are drawn with replacement, as many as there are, and the middle 95 % of these are its
interval. A prompt is drawn with all its candidates: prompts that differ by the luck of their
candidates too make the interval wider by just that. Candidates are not drawn anew within prompts:
of 512 drawn with replacement a third is missing, mostly the best one too, so that the best of them
is always worse than the best there was (the bootstrap of a maximum fails: Bickel and Freedman,
1981). Fewer than four prompts have none: draws from one are all the same, and would look certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Statistic = Callable[[IntArray], Any]

FEWEST = 4
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan


def bootstrap(num_prompts: int, statistic: Statistic, draws: int = 1000) -> Estimate:
    """A figure of prompts: `statistic` gets indices in [..., prompts] and returns [...].

    Draws are the same for the same number of prompts, so that figures can be compared. A statistic
    may be infinite; where it is NaN, the draw is left out.
    """
    value = float(statistic(np.arange(num_prompts)))
    return interval(value, np.asarray(statistic(drawn(num_prompts, draws))), num_prompts)


def interval(value: float, again: FloatArray, num_prompts: int) -> Estimate:
    """A figure, and the middle of what resampled prompts gave."""
    if num_prompts < FEWEST:
        return Estimate(value)
    return Estimate(value, *_middle(again[~np.isnan(again)]))


def drawn(num_prompts: int, draws: int = 1000) -> IntArray:
    """[draws, prompts]: indices, with replacement."""
    return np.random.default_rng(0).integers(num_prompts, size=(draws, num_prompts))


def mean(values: FloatArray) -> Estimate:
    """Of a figure per prompt; NaNs are left out."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return Estimate(math.nan)
    return bootstrap(len(known), lambda prompts: known[prompts].mean(axis=-1))


def quotient(above: FloatArray, below: FloatArray) -> Estimate:
    """Of the sums of two figures per prompt, drawn together."""
    return bootstrap(
        len(above), lambda prompts: above[prompts].sum(axis=-1) / below[prompts].sum(axis=-1)
    )


def _middle(values: FloatArray) -> tuple[float, float]:
    if len(values) == 0:
        return math.nan, math.nan
    edge = (1 - _SHARE) / 2
    # Never between two draws: one of them may be infinite.
    low, high = np.quantile(values, [edge, 1 - edge], method="nearest")
    return float(low), float(high)


def pearson(x: FloatArray, y: FloatArray) -> float:
    """Covariance over the product of the standard deviations (Pearson, 1895); NaN if one is 0."""
    if len(x) < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / scale if scale > 0 else math.nan


def kendall(x: FloatArray, y: FloatArray) -> float:
    """Tau-b (Kendall, 1945): (C - D) / sqrt((P - X) (P - Y)); NaN if all of x, or of y, are equal.

    Of P pairs, C are ordered the same way by both, D the other way round, X are tied in x and Y in
    y. Counts all pairs: meant for a thousand values at most.
    """
    above = np.triu_indices(len(x), k=1)
    signs_x = np.sign(x[:, None] - x[None, :])[above]
    signs_y = np.sign(y[:, None] - y[None, :])[above]
    untied = math.sqrt(float(np.abs(signs_x).sum()) * float(np.abs(signs_y).sum()))
    return float((signs_x * signs_y).sum()) / untied if untied > 0 else math.nan


def expected_first(ranked: FloatArray, n: int) -> float:
    """The mean, over all subsets of `n`, of the value that comes first in a subset.

    `ranked` has the values in their order, the best first. The r-th (from 0) of N is a subset's
    first with probability C(N-1-r, n-1) / C(N, n): it is in, and the rest come later (Dodge et al.,
    arXiv 1909.03004, without replacement as in Chen et al., arXiv 2107.03374).
    """
    size = len(ranked)
    if not 1 <= n <= size:
        raise ValueError(f"no subsets of {n} among {size}")
    ranks = np.arange(size - n)
    # Each weight from the one before: binomials themselves are too large.
    steps = (size - ranks - n) / (size - 1 - ranks)
    weights = n / size * np.concatenate([[1.0], np.cumprod(steps)])
    return float(ranked[: size - n + 1] @ weights)
