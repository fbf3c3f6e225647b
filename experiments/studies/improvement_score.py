"""The paper's improvement score: how far beyond a Best-of-N of few, on that one's own scale.

100 x (1 + mean over prompts of (reward - best of base) / (best of base - worst of base)), Sun et
al., arXiv 2410.20290, section 5. 100 is as good as the base, 200 better by the base's whole range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.best_of_n import curve
from experiments.studies.statistics import Estimate, FloatArray, expected_first, mean
from experiments.trajectories import Trajectories


@dataclass(frozen=True, slots=True)
class Base:
    """Best-of-N's answer, and the lowest reward, expected over all draws of `n`: [prompts]."""

    n: int
    best: FloatArray
    worst: FloatArray


def base_of(prompts: Sequence[Trajectories], reward: str, n: int) -> Base:
    """What is compared with."""
    rising = [np.sort(each.scores(reward).final) for each in prompts]
    worst = np.array([expected_first(finals, n) for finals in rising])
    return Base(n, curve(prompts, reward, [n]).rewards[:, 0], worst)


def improvement_score(rewards: FloatArray, base: Base) -> Estimate:
    """Of a reward per prompt; prompts whose base answers are all equal say nothing."""
    scale = base.best - base.worst
    known = scale > 0
    return mean(100 * (1 + (rewards - base.best)[known] / scale[known]))
