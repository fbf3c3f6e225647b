"""Speculative Rejection by alpha, N and schedule: the tokens it saves and the reward it loses.

With the likelihood as the reward this is the paper's study of probability maximisation: the
perplexity of the best answer, exp(-mean log-probability per token), against the speed-up over
Best-of-N, counted in tokens. Lower perplexity is better. It needs no reward model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.best_of_n import curve
from experiments.studies.improvement import Base, base_of, improvement_score
from experiments.studies.plans import Measured
from experiments.studies.statistics import Estimate, expected_first, mean, quotient
from experiments.studies.tables import Table
from experiments.trajectories import FloatArray, Trajectories
from orchestrator.loop.composition import LIKELIHOOD


@dataclass(frozen=True, slots=True)
class Point:
    """A setting. `regret_share` is of Best-of-N's gain over one answer; `saving` is in tokens."""

    n: int
    alpha: float
    schedule: str
    reward: Estimate
    regret: Estimate
    regret_share: float
    tokens: float
    saving: Estimate
    improvement: Estimate
    complete_share: float


@dataclass(frozen=True, slots=True)
class Savings:
    """All settings; base_n is that of the improvement score."""

    reward: str
    base_n: int
    points: tuple[Point, ...]

    def tables(self) -> tuple[Table, ...]:
        """A row per setting."""
        columns = {
            "N": "n",
            "alpha": "alpha",
            "schedule": "schedule",
            "reward (95 %)": "reward",
            "regret (95 %)": "regret",
            "regret of gain": "regret_share",
            "tokens": "tokens",
            "tokens, Best-of-N over ours (95 %)": "saving",
            "improvement score (95 %)": "improvement",
            "complete answers": "complete_share",
        }
        caption = f"Speculative Rejection by {self.reward}; base of the score: N = {self.base_n}"
        return (Table.of("savings", caption, self.points, columns),)

    def largest_free(self, n: int, schedule: str) -> Point | None:
        """The largest alpha with a regret of at most 1 % of the gain; None if there is none."""
        points = [point for point in self.points if (point.n, point.schedule) == (n, schedule)]
        free = [point for point in points if point.regret_share <= 0.01]
        return max(free, key=lambda point: point.alpha, default=None)


def study(
    prompts: Sequence[Trajectories], reward: str, measured: Sequence[Measured], base_n: int
) -> Savings:
    """Of all settings that were measured."""
    base = base_of(prompts, reward, base_n)
    single = curve(prompts, reward, [1]).rewards[:, 0]
    return Savings(reward, base_n, tuple(_point(run, base, single) for run in measured))


def _point(measured: Measured, base: Base, single: FloatArray) -> Point:
    gain = float((measured.rewards + measured.regrets - single).mean())
    return Point(
        measured.plan.n,
        measured.plan.alpha,
        measured.plan.name,
        mean(measured.rewards),
        mean(measured.regrets),
        float(measured.regrets.mean()) / gain if gain > 0 else np.nan,
        float(measured.tokens.mean()),
        quotient(measured.full_tokens, measured.tokens),
        improvement_score(measured.rewards, base),
        float(measured.complete.mean()),
    )


@dataclass(frozen=True, slots=True)
class PerplexityRow:
    """The perplexity of the answers of one method, averaged over prompts.

    alpha is NaN and speed_up 1 for Best-of-N, which is averaged over all draws of N answers.
    best_found: the share of prompts with the most probable answer returned; NaN for Best-of-N.
    """

    method: str
    n: int
    alpha: float
    perplexity: Estimate
    speed_up: Estimate
    best_found: float


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity by method and alpha, under one schedule."""

    schedule: str
    rows: tuple[PerplexityRow, ...]

    def tables(self) -> tuple[Table, ...]:
        """The paper's table."""
        columns = {
            "method": "method",
            "N": "n",
            "alpha": "alpha",
            "perplexity (95 %)": "perplexity",
            "speed-up in tokens (95 %)": "speed_up",
            "prompts with the best found": "best_found",
        }
        caption = f"Most probable answers; {self.schedule}"
        return (Table.of("perplexity", caption, self.rows, columns),)


def perplexity(
    prompts: Sequence[Trajectories], measured: Sequence[Measured], baselines: Sequence[int]
) -> Perplexity:
    """One answer, Best-of-N at `baselines`, and plans of one schedule, replayed by likelihood."""
    # Perplexities are averaged over draws; the exponential of a mean would be too low.
    rising = [np.exp(-np.sort(prompt.final(LIKELIHOOD))[::-1]) for prompt in prompts]
    rows = [
        PerplexityRow(
            "Best-of-N" if n > 1 else "one answer",
            n,
            math.nan,
            mean(np.array([expected_first(values, n) for values in rising])),
            Estimate(1.0),
            math.nan,
        )
        for n in (1, *baselines)
    ]
    rows += [
        PerplexityRow(
            "Speculative Rejection",
            run.plan.n,
            run.plan.alpha,
            mean(np.exp(-run.rewards)),
            quotient(run.full_tokens, run.tokens),
            float((run.regrets == 0).mean()),
        )
        for run in measured
    ]
    return Perplexity(measured[0].plan.name if measured else "", tuple(rows))
