"""Best-of-N: what each doubling of N buys, and what it costs.

The reward of Best-of-N is the highest among N answers, as in the paper. It is not measured on one
draw of N of the answers there are, but averaged over all such draws, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.statistics import Estimate, FloatArray, expected_first, mean
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories


@dataclass(frozen=True, slots=True)
class Curve:
    """Best-of-N of every prompt: arrays are [prompts, len(ns)]."""

    ns: tuple[int, ...]
    rewards: FloatArray
    tokens: FloatArray


@dataclass(frozen=True, slots=True)
class Point:
    """One N. `gain` is over a single answer; tokens are per prompt."""

    n: int
    reward: Estimate
    gain: Estimate
    tokens: float


@dataclass(frozen=True, slots=True)
class BestOfN:
    """The study's result."""

    reward: str
    num_prompts: int
    points: tuple[Point, ...]

    def tables(self) -> tuple[Table, ...]:
        """Reward and tokens by N."""
        rows = tuple((p.n, p.reward, p.gain, p.tokens) for p in self.points)
        headings = ("N", "mean reward of the best (95 %)", "gain over one answer (95 %)", "tokens")
        return (Table("best_of_n", f"Best-of-N by {self.reward}", headings, rows),)


def doublings(n: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `n`."""
    return tuple(sorted({*(2**i for i in range(n.bit_length())), n}))


def curve(prompts: Sequence[Trajectories], reward: str, ns: Sequence[int]) -> Curve:
    """Best-of-N of every prompt, at every N."""
    falling = [np.sort(each.scores(reward).final)[::-1] for each in prompts]
    rewards = [[expected_first(finals, n) for n in ns] for finals in falling]
    lengths = np.array([each.num_tokens.mean() for each in prompts])
    return Curve(tuple(ns), np.array(rewards), lengths[:, None] * np.array(ns, dtype=np.float64))


def study(prompts: Sequence[Trajectories], reward: str) -> BestOfN:
    """At N = 1, 2, 4, ... and what every prompt has."""
    ns = doublings(min(each.n for each in prompts))
    found = curve(prompts, reward, ns)
    single = found.rewards[:, 0]
    points = tuple(
        Point(
            n,
            mean(found.rewards[:, column]),
            mean(found.rewards[:, column] - single),
            float(found.tokens[:, column].mean()),
        )
        for column, n in enumerate(ns)
    )
    return BestOfN(reward, len(prompts), points)
