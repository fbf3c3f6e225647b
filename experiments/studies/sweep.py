"""Speculative Rejection over alpha, N and schedule: what it saves, and what it loses.

Regret is the reward of Best-of-N less that of Speculative Rejection, as in `experiments.replay`.
Both are of the same answers, so that luck cancels. Where a prompt has more
answers than N, several groups of N are replayed and averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import Replayer
from experiments.studies.best_of_n import curve
from experiments.studies.compute import ComputeModel
from experiments.studies.improvement_score import Base, base_of, improvement_score
from experiments.studies.runs import Plan, groups, run
from experiments.studies.statistics import Estimate, FloatArray, mean, quotient
from experiments.studies.tables import Table
from experiments.trajectories import IntArray, Trajectories
from specrej.contracts import FinishReason

_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan, replayed: arrays are [prompts], means over groups.

    rewards: Best-of-N's less the regret. full_*: of Best-of-N, the same N. complete: the share of
    answers that are.
    """

    plan: Plan
    rewards: FloatArray
    regrets: FloatArray
    tokens: FloatArray
    full_tokens: FloatArray
    flops: FloatArray
    complete: FloatArray
    full_complete: FloatArray


@dataclass(frozen=True, slots=True)
class Point:
    """A setting. `regret_share` is of what Best-of-N gains over one answer; `saving` in tokens."""

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
class Sweep:
    """The study's result."""

    reward: str
    base_n: int
    points: tuple[Point, ...]

    def tables(self) -> tuple[Table, ...]:
        """A row per setting."""
        headings = (
            *("N", "alpha", "schedule", "reward (95 %)", "regret (95 %)", "regret of gain"),
            *("tokens", "tokens, Best-of-N over ours (95 %)", "improvement score (95 %)"),
            "complete answers",
        )
        rows = tuple(
            (
                *(p.n, p.alpha, p.schedule, p.reward, p.regret, p.regret_share),
                *(p.tokens, p.saving, p.improvement, p.complete_share),
            )
            for p in self.points
        )
        caption = f"Speculative Rejection by {self.reward}; base of the score: N = {self.base_n}"
        return (Table("sweep", caption, headings, rows),)


def measure(replayers: Sequence[Replayer], plan: Plan, compute: ComputeModel) -> Measured:
    """Replay one plan on every prompt.

    Raises:
        ValueError: a prompt has fewer answers than N.
        OffGrid: a round ends where no prefix was scored.
    """
    rows = np.array([_prompt(each, plan, compute) for each in replayers])
    prompts, reward = [each.trajectories for each in replayers], replayers[0].reward
    best = curve(prompts, reward, [plan.n]).rewards[:, 0]
    return Measured(plan, best - rows[:, 0], *rows.T)


def study(
    prompts: Sequence[Trajectories], reward: str, measured: Sequence[Measured], base_n: int
) -> Sweep:
    """Of all settings that were measured."""
    base = base_of(prompts, reward, base_n)
    single = curve(prompts, reward, [1]).rewards[:, 0]
    return Sweep(reward, base_n, tuple(_point(each, base, single) for each in measured))


def _prompt(replayer: Replayer, plan: Plan, compute: ComputeModel) -> FloatArray:
    """Fields of Measured from `regrets` on."""
    rows = groups(replayer.trajectories.n, plan.n, _GROUPS)
    means: FloatArray = np.mean([_group(replayer, plan, each, compute) for each in rows], axis=0)
    return means


def _group(
    replayer: Replayer, plan: Plan, rows: IntArray, compute: ComputeModel
) -> tuple[float, ...]:
    found = run(replayer, plan, rows)
    return (
        found.regret,
        float(found.generated_tokens),
        float(found.best_of_n_tokens),
        compute.flops(replayer.trajectories.prompt_tokens, found),
        float(found.finish is FinishReason.STOP),
        float(replayer.trajectories.finished[found.best_of_n_answer]),
    )


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
