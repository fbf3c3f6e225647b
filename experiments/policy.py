"""Alpha from what is known at a decision token: the paper's open question.

Learnt, per position, from other prompts: how a prefix's score predicts the answer's (a line through
the prompt's mean) and how far off it is (the deviation of what is left). So every live candidate
has a forecast, and a chance of becoming the best. By these, `RiskPolicy` and `PricePolicy` reject
many where scores are far apart and prefixes tell much, few where they are alike or tell little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.replay import Seen
from experiments.trajectories import FloatArray, Trajectories

_REACH = 4.0  # deviations to either side of a forecast that count
_STEPS = 64  # of the integral over what the best answer's score may be
_LEAST_CANDIDATES = 8  # that a prompt must have at a position to tell anything


@dataclass(frozen=True, slots=True)
class Outlook:
    """What prefixes of one length tell: final = mean + drift + slope * (partial - mean) +- rest."""

    slope: float
    drift: float
    deviation: float
    correlation: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Outlooks at ascending positions; between them, in proportion."""

    positions: tuple[int, ...]
    outlooks: tuple[Outlook, ...]

    def at(self, position: int) -> Outlook:
        """The outlook there; beyond the ends, that of the end."""

        def between(name: str) -> float:
            values = [getattr(outlook, name) for outlook in self.outlooks]
            return float(np.interp(position, self.positions, values))

        return Outlook(*(between(name) for name in Outlook.__slots__))


def fit(kept: Sequence[Trajectories], reward: str) -> Forecast:
    """From the prompts' candidates that are still being written at each position of the grid.

    Raises:
        ValueError: there are too few of them everywhere.
    """
    positions = sorted({int(position) for each in kept for position in each.positions})
    known = {position: _outlook(kept, reward, position) for position in positions}
    there = {position: outlook for position, outlook in known.items() if outlook}
    if not there:
        raise ValueError("too few answers to learn from")
    return Forecast(tuple(there), tuple(there.values()))


def _outlook(kept: Sequence[Trajectories], reward: str, position: int) -> Outlook | None:
    """Pooled over prompts, each around its own mean."""
    partials, finals, drifts = [], [], []
    for each in kept:
        if position not in each.positions:
            continue
        live = each.num_tokens > position
        if live.sum() < _LEAST_CANDIDATES:
            continue
        partial, final = each.partial_at(reward, position)[live], each.scores(reward).final[live]
        drifts.append(final.mean() - partial.mean())
        partials.append(partial - partial.mean())
        finals.append(final - final.mean())
    if not drifts:
        return None
    return _line(np.concatenate(partials), np.concatenate(finals), float(np.mean(drifts)))


def _line(partial: FloatArray, final: FloatArray, drift: float) -> Outlook:
    """The least squares' line through the origin."""
    together, own = float(partial @ final), float(partial @ partial)
    slope = together / own if own else 0.0
    rest = final - slope * partial
    spread = math.sqrt(own * float(final @ final))
    correlation = together / spread if spread else 0.0
    return Outlook(slope, drift, math.sqrt(float(rest @ rest) / len(rest)), correlation)


class RiskPolicy:
    """Rejects the lowest as long as the chance that the best is among them is at most `risk`."""

    def __init__(self, forecast: Forecast, risk: float) -> None:
        """Raises ValueError: the risk is not from 0 to less than 1."""
        if not 0 <= risk < 1:
            raise ValueError("risk must be at least 0 and less than 1")
        self._forecast = forecast
        self._risk = risk

    def alpha(self, seen: Seen) -> float:
        live = np.sort(seen.live)
        chances = best_chances(live, self._forecast.at(seen.decision_token), seen.best_finished)
        return _alpha(seen, live, int((np.cumsum(chances) <= self._risk).sum()))


class PricePolicy:
    """Rejects whoever's chance of becoming the best is not worth the tokens of another round.

    price: the chance that a whole answer's tokens must buy at least.
    """

    def __init__(self, forecast: Forecast, price: float) -> None:
        """Raises ValueError: the price is below 0."""
        if price < 0:
            raise ValueError("price must be at least 0")
        self._forecast = forecast
        self._price = price

    def alpha(self, seen: Seen) -> float:
        live = np.sort(seen.live)
        chances = best_chances(live, self._forecast.at(seen.decision_token), seen.best_finished)
        part = (seen.next_token - seen.decision_token) / seen.max_tokens
        return _alpha(seen, live, int((chances < self._price * part).sum()))


def _alpha(seen: Seen, live: FloatArray, num_rejected: int) -> float:
    """The fraction of the ranked that rejects so many of the live, which ascend, but not the last.

    Somebody goes on: a forecast is no answer.
    """
    least_kept = live[min(num_rejected, len(live) - 1)]
    return round(int((seen.ranked < least_kept).sum()) / len(seen.ranked), 9)


def best_chances(live: FloatArray, outlook: Outlook, best_finished: float) -> FloatArray:
    """[N] chances of becoming the best of all, from scores of live prefixes.

    Finals are taken to be normal and independent around their forecasts. The best answer that is
    complete already is one that must be beaten, so the chances add up to 1 at most.
    """
    forecast = live.mean() + outlook.drift + outlook.slope * (live - live.mean())
    deviation = max(outlook.deviation, 1e-12)
    top = float(forecast.max()) + _REACH * deviation
    # Whoever is below the worst that the likeliest best may become has no chance.
    bottom = max(best_finished, float(forecast.max()) - _REACH * deviation)
    if bottom >= top:
        return np.zeros(len(live))
    edges = np.linspace(bottom, top, _STEPS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    away = (middles[None, :] - forecast[:, None]) / deviation  # [N, steps]
    below = np.maximum(_normal_cdf(away), 1e-300)
    everybody_below = np.exp(np.log(below).sum(axis=0))
    density = np.exp(-(away**2) / 2) / math.sqrt(2 * math.pi) / deviation
    chances: FloatArray = (density * everybody_below / below).sum(axis=1) * (edges[1] - edges[0])
    return chances


def _normal_cdf(values: FloatArray) -> FloatArray:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17: within 7.5e-8."""
    distance = np.abs(values)
    t = 1 / (1 + 0.2316419 * distance)
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi) * series
    return np.where(values >= 0, 1 - tail, tail)
