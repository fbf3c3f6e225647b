"""Growth of a series of measurements: least squares through the minima of time windows.

Temporary use disappears in the minima; leaks remain. The interval accounts for autocorrelation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

NUM_WINDOWS = 20
_MIN_WINDOWS = 8
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour with its 95 % interval, and the growth over the whole measurement."""

    per_hour: float
    low: float
    high: float
    rise: float = 0.0

    def is_flat(self, bound: float = math.inf, step: float = 0.0) -> bool:
        """Return whether zero is within the interval and the interval is below `bound`.

        `bound` is growth per hour: a measurement too noisy to exclude more is not flat. `step` is
        the smallest possible growth of the measured quantity; a total growth up to it is no trend.
        """
        return (self.low <= 0 or self.rise <= step) and self.high <= bound

    def without(self, growth: float, measured_s: float) -> Slope:
        """Subtract the growth of a known cause, given for the whole measurement."""
        known = growth * _HOUR_S / measured_s
        return replace(
            self,
            per_hour=self.per_hour - known,
            low=self.low - known,
            high=self.high - known,
            rise=self.rise - growth,
        )


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the slope of the window minima.

    The correlation r of neighbouring values widens the variance by the factor (1 + r) / (1 - r).

    Raises:
        ValueError: there are fewer than 8 windows with a sample.
    """
    times, measured = _floors(seconds, values)
    if len(times) < _MIN_WINDOWS:
        raise ValueError(f"samples in {len(times)} windows, {_MIN_WINDOWS} are needed")
    fit = stats.linregress(times, measured)
    rise, inflation = fit.slope, _inflation(measured - fit.slope * times - fit.intercept)
    error = stats.t.ppf(0.975, len(times) - 2) * fit.stderr * inflation**0.5
    low, high = rise - error, rise + error
    measured_s = float(times[-1] - times[0])
    return Slope(rise * _HOUR_S, low * _HOUR_S, high * _HOUR_S, rise * measured_s)


def _floors(seconds: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the middle and the minimum of each window with samples."""
    times, measured = np.asarray(seconds, dtype=float), np.asarray(values, dtype=float)
    if not len(times):
        return times, measured
    width = (times[-1] - times[0]) / NUM_WINDOWS or 1.0
    windows = np.minimum((times - times[0]) // width, NUM_WINDOWS - 1)
    occupied = np.unique(windows)
    middles = times[0] + (occupied + 0.5) * width
    return middles, np.array([measured[windows == window].min() for window in occupied])


def _inflation(residuals: np.ndarray) -> float:
    power = float(residuals @ residuals)
    if power == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / power
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)
