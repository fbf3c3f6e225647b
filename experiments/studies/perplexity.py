"""Maximising probability: the likelihood as the reward, and the perplexity of the best answer.

The paper's table: how probable an answer Speculative Rejection finds at each alpha, and how much
faster than Best-of-N it is there. Perplexity is exp(-mean log-probability per token); lower is
better. It needs no reward model at all. Speed-up is counted in tokens of one engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.statistics import Estimate, expected_first, mean, quotient
from experiments.studies.sweep import Measured
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories
from orchestrator.composition import LIKELIHOOD


@dataclass(frozen=True, slots=True)
class Row:
    """One way to answer: perplexity of the answer, averaged over prompts.

    alpha NaN and speed-up 1: Best-of-N, over all ways to draw N of the answers. best_found: the
    share of prompts whose most probable answer it gave; NaN of Best-of-N itself.
    """

    method: str
    n: int
    alpha: float
    perplexity: Estimate
    speed_up: Estimate
    best_found: float


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The study's result."""

    schedule: str
    rows: tuple[Row, ...]

    def tables(self) -> tuple[Table, ...]:
        """The paper's."""
        headings = (
            *("method", "N", "alpha", "perplexity (95 %)", "speed-up in tokens (95 %)"),
            "prompts whose best was found",
        )
        rows = tuple(
            (row.method, row.n, row.alpha, row.perplexity, row.speed_up, row.best_found)
            for row in self.rows
        )
        return (Table("perplexity", f"Most probable answers; {self.schedule}", headings, rows),)


def study(
    prompts: Sequence[Trajectories], measured: Sequence[Measured], baselines: Sequence[int]
) -> Perplexity:
    """One answer, Best-of-N at `baselines`, and plans of one schedule, replayed by likelihood."""
    rows = [_baseline(prompts, n) for n in (1, *baselines)]
    rows += [_rejection(each) for each in measured]
    return Perplexity(measured[0].plan.name if measured else "", tuple(rows))


def perplexity(mean_logprob: float) -> float:
    """Of an answer; its likelihood reward is its mean log-probability."""
    return math.exp(-mean_logprob)


def _baseline(prompts: Sequence[Trajectories], n: int) -> Row:
    """The perplexity of each answer before they are averaged: e to a mean would be too low."""
    rising = [np.exp(-np.sort(each.scores(LIKELIHOOD).final)[::-1]) for each in prompts]
    expected = np.array([expected_first(each, n) for each in rising])
    name = "Best-of-N" if n > 1 else "one answer"
    return Row(name, n, math.nan, mean(expected), Estimate(1.0), math.nan)


def _rejection(measured: Measured) -> Row:
    return Row(
        "Speculative Rejection",
        measured.plan.n,
        measured.plan.alpha,
        mean(np.exp(-measured.rewards)),
        quotient(measured.full_tokens, measured.tokens),
        float((measured.regrets == 0).mean()),
    )
