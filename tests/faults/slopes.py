"""Whether a series of measurements grows: least squares, with an interval that knows of memory.

Standard library and numpy only; knows no service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 1 / 3  # the part at the beginning that does not count
_HOUR_S = 3600.0
_NORMAL_95 = 1.96
_MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, its 95 % interval, and the growth in all that was measured."""

    per_hour: float
    low: float
    high: float
    rise: float = 0.0

    def is_flat(self, bound: float, step: float = 0.0) -> bool:
        """Whether no growth is shown: the interval reaches down to zero, or growth is too small.

        `bound` is the growth per hour that is nobody's concern; `step` the growth at all that shows
        no trend yet, such as one connection more at the end of a short measurement.
        """
        return self.low <= 0 or self.per_hour <= bound or self.rise <= step


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope after the warm-up.

    What was measured just before says something of what is measured now: neighbours' correlation
    widens the interval by the usual factor (1 + r) / (1 - r) of the variance.

    Raises:
        ValueError: fewer than 8 samples after the warm-up.
    """
    times, measured = _after_warm_up(seconds, values)
    if len(times) < _MIN_SAMPLES:
        raise ValueError(f"{len(times)} samples after the warm-up, {_MIN_SAMPLES} are needed")
    centred = times - times.mean()
    spread = float(centred @ centred)
    rise = float(centred @ measured) / spread
    residuals = measured - measured.mean() - rise * centred
    variance = float(residuals @ residuals) / (len(times) - 2) / spread
    error = _NORMAL_95 * (variance * _inflation(residuals)) ** 0.5
    low, high = rise - error, rise + error
    measured_s = float(times[-1] - times[0])
    return Slope(rise * _HOUR_S, low * _HOUR_S, high * _HOUR_S, rise * measured_s)


def _after_warm_up(
    seconds: Sequence[float], values: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    times, measured = np.asarray(seconds, dtype=float), np.asarray(values, dtype=float)
    if not len(times):
        return times, measured
    counts = times >= times[0] + WARM_UP * (times[-1] - times[0])
    return times[counts], measured[counts]


def _inflation(residuals: np.ndarray) -> float:
    power = float(residuals @ residuals)
    if power == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / power
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)
