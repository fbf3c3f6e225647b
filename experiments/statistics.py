"""Estimates with 95 % intervals over prompts.

Intervals are percentile bootstraps over prompts (Efron, 1979). A prompt is drawn with
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

MIN_PROMPTS = 4
_DRAWS, _EDGES = 1000, (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def bootstrap(num_prompts: int, statistic: Callable[[NDArray[np.int64]], Any]) -> Estimate:
    """An estimate of a statistic on prompts.

    `statistic` maps indices in [..., prompts] to values in [...]. Draws are equal for equal numbers
    of prompts, so that figures can be compared.
    """
    value = float(statistic(np.arange(num_prompts)))
    if num_prompts < MIN_PROMPTS:
        return Estimate(value)
    drawn = np.random.default_rng(0).integers(0, num_prompts, (_DRAWS, num_prompts))
    low, high = np.quantile(statistic(drawn), _EDGES, method="nearest")
    return Estimate(value, float(low), float(high))


def mean(values: ArrayLike) -> Estimate:
    """The mean of a figure per prompt; NaNs are left out."""
    array = np.asarray(values, dtype=np.float64)
    defined = array[~np.isnan(array)]
    if not len(defined):
        return Estimate(math.nan)
    return bootstrap(len(defined), lambda prompts: defined[prompts].mean(axis=-1))
