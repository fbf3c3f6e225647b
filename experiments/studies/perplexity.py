"""The paper's study of probability maximisation, with the likelihood as the reward.

The perplexity of the best answer, exp(-mean log-probability per token), against the speed-up over
Best-of-N, counted in tokens. Lower perplexity is better. It needs no reward model. Answers that the
limit ended count like complete ones, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.studies.plans import Measured
from experiments.studies.statistics import Estimate, expected_first, mean, quotient, share
from experiments.studies.tables import Table
from experiments.trajectories import Trajectories
from orchestrator.loop.composition import LIKELIHOOD


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
    best_found: Estimate


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
            "prompts with the best found (95 %)": "best_found",
        }
        caption = f"Most probable answers; {self.schedule}"
        return (Table.of("perplexity", caption, self.rows, columns),)


def study(
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
            Estimate(math.nan),
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
            share(run.regrets == 0),
        )
        for run in measured
    ]
    return Perplexity(measured[0].plan.name if measured else "", tuple(rows))
