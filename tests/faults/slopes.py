"""Whether a series of measurements grows: least squares, with an interval that knows of memory.

What a process takes for a moment comes and goes; what it never gives back is in the floor. So the
line is drawn through the least values of windows of time. Standard library and numpy only; knows no
service.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

NUM_WINDOWS = 20
_MIN_WINDOWS = 8
_HOUR_S = 3600.0
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, its 95 % interval, and the growth in all that was measured."""

    per_hour: float
    low: float
    high: float
    rise: float = 0.0

    def is_flat(self, bound: float = math.inf, step: float = 0.0) -> bool:
        """Whether zero is within the interval, and all that the interval allows within `bound`.

        `bound` is growth per hour: a measurement too noisy to exclude more than that shows nothing
        flat. `step` is the growth in all that shows no trend: the least that the measured thing
        grows by at a time, if it grows.
        """
        return (self.low <= 0 or self.rise <= step) and self.high <= bound

    def without(self, growth: float, measured_s: float) -> Slope:
        """What is left once growth of a known cause, so much in all that was measured, is taken
        away; the interval is no narrower for it."""
        known = growth * _HOUR_S / measured_s
        return replace(
            self,
            per_hour=self.per_hour - known,
            low=self.low - known,
            high=self.high - known,
            rise=self.rise - growth,
        )


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of the floors.

    What was measured just before says something of what is measured now: neighbours' correlation
    widens the interval by the usual factor (1 + r) / (1 - r) of the variance.

    Raises:
        ValueError: there are fewer than 8 windows with a sample.
    """
    times, measured = _floors(seconds, values)
    if len(times) < _MIN_WINDOWS:
        raise ValueError(f"samples in {len(times)} windows, {_MIN_WINDOWS} are needed")
    centred = times - times.mean()
    spread = float(centred @ centred)
    around = measured - measured.mean()
    rise = float(centred @ around) / spread
    residuals = around - rise * centred
    degrees = len(times) - 2
    variance = float(residuals @ residuals) / degrees / spread
    error = _student_95(degrees) * (variance * _inflation(residuals)) ** 0.5
    low, high = rise - error, rise + error
    measured_s = float(times[-1] - times[0])
    return Slope(rise * _HOUR_S, low * _HOUR_S, high * _HOUR_S, rise * measured_s)


def _floors(seconds: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The least value of each window, at the window's middle; windows without samples left out."""
    times, measured = np.asarray(seconds, dtype=float), np.asarray(values, dtype=float)
    if not len(times):
        return times, measured
    width = (times[-1] - times[0]) / NUM_WINDOWS or 1.0
    windows = np.minimum((times - times[0]) // width, NUM_WINDOWS - 1)
    there = np.unique(windows)
    middles = times[0] + (there + 0.5) * width
    return middles, np.array([measured[windows == window].min() for window in there])


def _student_95(degrees: int) -> float:
    """Student's t for a 95 % interval, to the first term of Cornish and Fisher's series."""
    return _NORMAL_95 + (_NORMAL_95**3 + _NORMAL_95) / (4 * degrees)


def _inflation(residuals: np.ndarray) -> float:
    power = float(residuals @ residuals)
    if power == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / power
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)
