"""Estimates with 95 % intervals over prompts.

Intervals are percentile bootstraps over prompts (`scipy.stats.bootstrap`). A prompt is drawn with
all its candidates. Candidates are not drawn within prompts: of 512 drawn with replacement a third
is missing, often the best one too, so that the best of the draw is biased downwards (Bickel and
Freedman, 1981). Fewer than four prompts have no interval, since draws of one prompt are all equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
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
    from scipy import stats  # only here: to import it takes seconds

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


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Kendall's tau-b; NaN for fewer than two values, and if all of x, or of y, are equal."""
    from scipy import stats

    return float(stats.kendalltau(x, y).statistic) if np.size(x) > 1 else math.nan
