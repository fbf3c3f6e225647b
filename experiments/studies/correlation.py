"""Whether a prefix's reward tells the answer's: what early rejection rests on.

At every decision token: how partial rewards of the answers that go on relate to their final ones,
and whether the answer that is best in the end would survive a cut there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import highest_answer
from experiments.studies.statistics import Estimate, FloatArray, kendall, mean, pearson
from experiments.studies.tables import Cell, Table
from experiments.trajectories import Trajectories
from orchestrator.rejection import num_kept

ALPHAS = (0.5, 0.75)
_POINTS = 250  # of a scatter


@dataclass(frozen=True, slots=True)
class Survival:
    """In what share of prompts the best answer survives a cut of alpha, against chance."""

    alpha: float
    share: Estimate


@dataclass(frozen=True, slots=True)
class DecisionToken:
    """What a cut at `position` would go by; correlations are within prompts, then averaged.

    partial, final: some answers that go on, of all prompts, less the prompt's mean; for a picture.
    """

    position: int
    live_share: float
    pearson: Estimate
    kendall: Estimate
    survivals: tuple[Survival, ...]
    partial: tuple[float, ...]
    final: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Correlation:
    """The study's result."""

    reward: str
    num_prompts: int
    max_tokens: int
    decision_tokens: tuple[DecisionToken, ...]

    def tables(self) -> tuple[Table, ...]:
        """A row per decision token."""
        rows: list[tuple[Cell, ...]] = []
        for each in self.decision_tokens:
            survived = (survival.share for survival in each.survivals)
            rows.append((each.position, each.live_share, each.pearson, each.kendall, *survived))
        headings = ("decision token", "share still growing", "Pearson (95 %)", "Kendall tau (95 %)")
        cuts = tuple(f"best survives alpha {alpha:g} (95 %)" for alpha in ALPHAS)
        caption = f"Partial against final {self.reward}"
        return (Table("correlation", caption, headings + cuts, tuple(rows)),)


def study(prompts: Sequence[Trajectories], reward: str) -> Correlation:
    """At 8, 16, 32, ... as far as prefixes were scored there."""
    positions = decision_tokens(prompts)
    found = tuple(_at(prompts, reward, position) for position in positions)
    return Correlation(reward, len(prompts), max(each.max_tokens for each in prompts), found)


def decision_tokens(prompts: Sequence[Trajectories], first: int = 4) -> tuple[int, ...]:
    """Doubling from `first`, below the limit, where all prompts have scores."""
    known = set.intersection(*({int(p) for p in each.positions} for each in prompts))
    limit = min(each.max_tokens for each in prompts)
    return tuple(2**i for i in range(20) if first <= 2**i < limit and 2**i in known)


def live(prompt: Trajectories, position: int) -> np.typing.NDArray[np.bool_]:
    """[N]: who goes on after `position`."""
    return prompt.num_tokens > position


def scores_at(prompt: Trajectories, reward: str, position: int) -> FloatArray:
    """[N]: what a cut at `position` ranks by, whole answers among prefixes."""
    partial = prompt.partial_at(reward, position)
    return np.where(live(prompt, position), partial, prompt.scores(reward).final)


def survives(prompt: Trajectories, reward: str, position: int, alpha: float) -> bool:
    """Whether the best answer is still there after one cut; one that is whole cannot be lost."""
    best = highest_answer(prompt, reward)
    if not live(prompt, position)[best]:
        return True
    ranking = np.argsort(-scores_at(prompt, reward, position), kind="stable")
    return best in ranking[: num_kept(prompt.n, alpha)]


def _at(prompts: Sequence[Trajectories], reward: str, position: int) -> DecisionToken:
    pairs = [_pairs(each, reward, position) for each in prompts]
    survivals = tuple(
        Survival(
            alpha,
            mean(np.array([float(survives(each, reward, position, alpha)) for each in prompts])),
        )
        for alpha in ALPHAS
    )
    partial, final = _sample(pairs)
    return DecisionToken(
        position,
        float(np.mean([live(each, position).mean() for each in prompts])),
        mean(np.array([pearson(x, y) for x, y in pairs])),
        mean(np.array([kendall(x, y) for x, y in pairs])),
        survivals,
        partial,
        final,
    )


def _pairs(prompt: Trajectories, reward: str, position: int) -> tuple[FloatArray, FloatArray]:
    """Partial and final rewards of those that go on."""
    going_on = live(prompt, position)
    return prompt.partial_at(reward, position)[going_on], prompt.scores(reward).final[going_on]


def _sample(
    pairs: Sequence[tuple[FloatArray, FloatArray]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Some of all, centred per prompt: prompts differ more than their answers do."""
    x = np.concatenate([partial - _mean(partial) for partial, _ in pairs])
    y = np.concatenate([final - _mean(final) for _, final in pairs])
    chosen = np.random.default_rng(0).permutation(len(x))[:_POINTS]
    return tuple(map(_rounded, x[chosen])), tuple(map(_rounded, y[chosen]))


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
