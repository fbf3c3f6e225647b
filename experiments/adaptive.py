"""Does an alpha of its own for every round beat the best fixed one, for the same tokens?

The policy learns from all prompts but the one it is tried on. What it is held against is the lower
hull of all fixed settings' means: the least regret that any of them, or two of them by turns, gives
for as many tokens. That hull is chosen on the very prompts it is measured on, so the comparison
leans towards the fixed ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.policy import Forecast, PricePolicy, RiskPolicy, fit
from experiments.recommend import Estimate, drawn, estimate
from experiments.replay import Policy, Setting
from experiments.sweep import Swept, sweep
from experiments.trajectories import FloatArray, IntArray, Trajectories
from specrej.cli import schedule_text
from specrej.contracts import Schedule

DEFAULT_ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DEFAULT_RISKS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
DEFAULT_PRICES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_RESAMPLES = 2000


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

    gain: by how much its regret is lower, above 0: it is better.
    """

    knob: float
    adaptive: Swept
    fixed_regret: float
    gain: Estimate


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of policy under one schedule against all fixed settings.

    gain: the mean over all numbers at which fixed settings make as few tokens.
    """

    kind: str
    schedule: Schedule
    points: tuple[Point, ...]
    gain: Estimate

    @property
    def wins(self) -> bool:
        """Whether the policy is better beyond chance."""
        return self.gain.low > 0


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
    found = []
    for kind, schedule in itertools.product(kinds, schedules):
        setting = Setting(0, 0.5, schedule, reward)
        tried = [
            (knob, _tried(blocks, setting, [kind.make(each, knob) for each in forecasts]))
            for knob in kind.knobs
        ]
        found.append(Comparison(kind.name, schedule, *_against(hull, tried, draws)))
    return tuple(found)


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
    def means(name: str) -> FloatArray:
        return np.array([getattr(each, name).mean() for each in column])

    return replace(
        column[0],
        scores=means("scores"),
        tokens=means("tokens"),
        regrets=means("regrets"),
        costs=means("costs"),
        complete=means("complete"),
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
    """A row per point, and one over all points of each comparison, which has no knob."""
    rows: list[dict[str, Any]] = []
    for each in comparisons:
        name = {"policy": each.kind, "schedule": schedule_text(each.schedule)}
        rows += [name | _row(point) for point in each.points]
        rows.append(name | {"knob": None} | _interval(each.gain) | {"wins": each.wins})
    return rows


def _row(point: Point) -> dict[str, Any]:
    return {
        "knob": point.knob,
        "cost": float(point.adaptive.costs.mean()),
        "regret": float(point.adaptive.regrets.mean()),
        "fixed_regret": point.fixed_regret,
        **_interval(point.gain),
    }


def _interval(gain: Estimate) -> dict[str, float]:
    return {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}


def _against(
    hull: Sequence[Swept], tried: Sequence[tuple[float, Swept]], draws: IntArray
) -> tuple[tuple[Point, ...], Estimate]:
    """Each number's point and the gain over all of them.

    Raises:
        ValueError: no fixed setting makes as few tokens as any of them.
    """
    points, gains = [], []
    for knob, adaptive in tried:
        fixed = at_cost(hull, float(adaptive.costs.mean()))
        if fixed is None:
            continue
        gains.append(fixed - adaptive.regrets)
        points.append(Point(knob, adaptive, float(fixed.mean()), estimate(gains[-1], draws)))
    if not gains:
        raise ValueError("no fixed setting makes as few tokens as the policy")
    return tuple(points), estimate(np.mean(gains, axis=0), draws)


def _is_above(left: Swept, middle: Swept, right: Swept) -> bool:
    """Whether the middle one lies on or above the line between the others."""
    x = [float(each.costs.mean()) for each in (left, middle, right)]
    y = [float(each.regrets.mean()) for each in (left, middle, right)]
    return (y[1] - y[0]) * (x[2] - x[0]) >= (y[2] - y[0]) * (x[1] - x[0])
