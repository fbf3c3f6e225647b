"""Does an alpha of its own for every round beat the best fixed one, for the same tokens?

The policy learns from all prompts but the one it is tried on. What it is held against is the lower
hull of all fixed settings' means: the least regret that any of them, or two of them by turns, gives
for as many tokens. That hull is chosen on the very prompts it is measured on, so the comparison
leans towards the fixed ones.

There are several kinds, schedules and numbers to try, and the best of many is partly luck. So
intervals are of all numbers of all comparisons at once. (To choose on all prompts but one and
measure on that one is no way out: choices hardly differ between prompts, and what was lucky is
lucky on the last one too.) A mean over numbers would say nothing: some are far off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.policy import Forecast, PricePolicy, RiskPolicy, fit
from experiments.recommend import Estimate, drawn
from experiments.replay import Policy, Setting
from experiments.sweep import Swept, sweep
from experiments.trajectories import FloatArray, IntArray, Trajectories
from specrej.cli import schedule_text
from specrej.contracts import Schedule

DEFAULT_ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DEFAULT_RISKS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
DEFAULT_PRICES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_LEAST_ERROR = 0.1  # of a draw, in parts of the sample's: few prompts may be drawn all alike

# By kind, schedule and number.
Tried = Mapping[tuple[str, Schedule, float], Swept]


@dataclass(frozen=True, slots=True)
class Kind:
    """A policy's kind: how one is made of a forecast and a number, and the numbers to try."""

    name: str
    make: Callable[[Forecast, float], Policy]
    knobs: tuple[float, ...]


RISK = Kind("risk", RiskPolicy, DEFAULT_RISKS)
PRICE = Kind("price", PricePolicy, DEFAULT_PRICES)


@dataclass(frozen=True, slots=True)
class Point:
    """A policy with one number against fixed settings at as many tokens.

    gain: by how much its regret is lower, above 0: it is better. Intervals hold for all points of
    all comparisons at once: in 95 of 100 cases, none of them is off.
    """

    knob: float
    adaptive: Swept
    fixed_regret: float
    gain: Estimate

    @property
    def wins(self) -> bool:
        """Whether it is better beyond chance, and beyond that of having tried several."""
        return self.gain.low > 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of policy under one schedule against all fixed settings.

    points: of all numbers at which fixed settings make as few tokens.
    """

    kind: str
    schedule: Schedule
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        """The number that gains most, of those that win if any does."""
        return max(self.points, key=lambda point: (point.wins, point.gain.mean))


def compare(
    kept: Sequence[Trajectories],
    reward: str,
    schedules: Sequence[Schedule],
    n: int = 0,
    *,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    kinds: Sequence[Kind] = (RISK, PRICE),
    seed: int = 0,
) -> tuple[Comparison, ...]:
    """A comparison per kind and schedule; the fixed settings are those of all schedules together.

    Requests have `n` candidates (0: all), and each prompt as many requests as its candidates give.

    Raises:
        ValueError: there are fewer than 3 prompts, or too few answers to learn from.
    """
    if len(kept) < 3:
        raise ValueError("a policy is learnt from other prompts: there must be 3 at least")
    blocks = [_blocks(each, n) for each in kept]
    asked = [Setting(0, alpha, each, reward) for each in schedules for alpha in alphas]
    hull = lower_hull(_joined([sweep(of_one, asked) for of_one in blocks]))
    draws = drawn(len(kept), _RESAMPLES, seed)
    forecasts = [fit([*kept[:out], *kept[out + 1 :]], reward) for out in range(len(kept))]
    tried = {
        (kind.name, schedule, knob): _tried(
            blocks, Setting(0, 0.5, schedule, reward), [kind.make(each, knob) for each in forecasts]
        )
        for kind, schedule in itertools.product(kinds, schedules)
        for knob in kind.knobs
    }
    return against(hull, tried, draws)


def _blocks(kept: Trajectories, n: int) -> list[Trajectories]:
    """As many requests of n candidates as there can be without one candidate in two of them."""
    size = n or kept.n
    if size > kept.n:
        raise ValueError(f"{size} candidates of {kept.n} that were written")
    starts = range(0, kept.n - size + 1, size)
    return [kept.take(range(start, start + size)) for start in starts]


def _tried(
    blocks: Sequence[Sequence[Trajectories]], setting: Setting, policies: Sequence[Policy]
) -> Swept:
    """Every prompt under the policy that has not seen it."""
    by_prompt = [
        sweep(of_one, [setting], policy) for of_one, policy in zip(blocks, policies, strict=True)
    ]
    return _joined(by_prompt)[0]


def _joined(by_prompt: Sequence[Sequence[Swept]]) -> list[Swept]:
    """Sweeps of single prompts as one of them all: the means of each prompt's requests."""
    return [_mean(column) for column in zip(*by_prompt, strict=True)]


def _mean(column: Sequence[Swept]) -> Swept:
    def means(of: Callable[[Swept], FloatArray]) -> FloatArray:
        return np.array([of(each).mean() for each in column])

    return Swept(
        column[0].setting,
        scores=means(lambda each: each.scores),
        tokens=means(lambda each: each.tokens),
        regrets=means(lambda each: each.regrets),
        costs=means(lambda each: each.costs),
        complete=means(lambda each: each.complete),
    )


def lower_hull(swept: Sequence[Swept]) -> tuple[Swept, ...]:
    """The settings that no other, and no two by turns, beat at their mean cost; by cost."""
    hull: list[Swept] = []
    for each in sorted(swept, key=lambda each: (each.costs.mean(), each.regrets.mean())):
        if hull and each.regrets.mean() >= hull[-1].regrets.mean():
            continue  # dearer, and no better
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], each):
            hull.pop()
        hull.append(each)
    return tuple(hull)


def at_cost(hull: Sequence[Swept], cost: float) -> FloatArray | None:
    """[P] regrets of the hull at a mean cost; None where no setting is as cheap.

    Dearer than the dearest that is on it, which is the best there is: that one.
    """
    costs = [float(each.costs.mean()) for each in hull]
    if cost < costs[0]:
        return None
    right = int(np.searchsorted(costs, cost))
    if right == len(hull):
        return hull[-1].regrets
    if right == 0 or costs[right] == cost:
        return hull[right].regrets
    part = (cost - costs[right - 1]) / (costs[right] - costs[right - 1])
    return hull[right - 1].regrets * (1 - part) + hull[right].regrets * part


def as_table(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """A row per point; the best one of each comparison is marked."""
    return [
        {
            "policy": each.kind,
            "schedule": schedule_text(each.schedule),
            "knob": point.knob,
            "cost": float(point.adaptive.costs.mean()),
            "regret": float(point.adaptive.regrets.mean()),
            "fixed_regret": point.fixed_regret,
            "gain": point.gain.mean,
            "gain_low": point.gain.low,
            "gain_high": point.gain.high,
            "best": point is each.best,
            "wins": point.wins,
        }
        for each in comparisons
        for point in each.points
    ]


def against(hull: Sequence[Swept], tried: Tried, draws: IntArray) -> tuple[Comparison, ...]:
    """A comparison per kind and schedule that was tried.

    Raises:
        ValueError: no fixed setting makes as few tokens as any number of one.
    """
    fixed = {key: at_cost(hull, float(each.costs.mean())) for key, each in tried.items()}
    known = {key: regrets for key, regrets in fixed.items() if regrets is not None}
    if {key[:2] for key in known} != {key[:2] for key in tried}:
        raise ValueError("no fixed setting makes as few tokens as the policy")
    gains = np.array([regrets - tried[key].regrets for key, regrets in known.items()])
    points = {
        key: Point(key[2], tried[key], float(known[key].mean()), gain)
        for key, gain in zip(known, together(gains, draws), strict=True)
    }
    kinds = list(dict.fromkeys(key[:2] for key in known))
    return tuple(
        Comparison(*kind, tuple(each for key, each in points.items() if key[:2] == kind))
        for kind in kinds
    )


def together(values: FloatArray, draws: IntArray) -> tuple[Estimate, ...]:
    """Means of each row of [rows, prompts], with 95 % intervals that hold for all rows at once.

    Of each draw of prompts, the largest deviation of any row counts, in the draw's own standard
    errors: rows that go together cost less than a share of Bonferroni's each (Westfall and Young,
    1993), and few prompts make it wider, as Student's t does.
    """
    means, root = values.mean(axis=1), np.sqrt(values.shape[1])
    errors = values.std(axis=1, ddof=1) / root
    again = values[:, draws]  # [rows, draws, prompts]
    least = np.where(errors > 0, _LEAST_ERROR * errors, 1.0)
    of_draws = np.maximum(again.std(axis=2, ddof=1) / root, least[:, None])
    away = np.abs(again.mean(axis=2) - means[:, None]) / of_draws
    reach = float(np.quantile(away.max(axis=0), _CONFIDENCE)) * errors
    return tuple(
        Estimate(float(mean), float(mean - each), float(mean + each))
        for mean, each in zip(means, reach, strict=True)
    )


def _is_above(left: Swept, middle: Swept, right: Swept) -> bool:
    """Whether the middle one lies on or above the line between the others."""
    x = [float(each.costs.mean()) for each in (left, middle, right)]
    y = [float(each.regrets.mean()) for each in (left, middle, right)]
    return (y[1] - y[0]) * (x[2] - x[0]) >= (y[2] - y[0]) * (x[1] - x[0])
