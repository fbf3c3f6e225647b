"""Improvement score against relative compute: tokens, FLOPs, and seconds if there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import BLUE, GREEN, ORANGE, PURPLE, Picture
from experiments.studies.improvement import FAST, FULL, Improvement

_COLORS = (BLUE, GREEN, PURPLE)
_TIMED = "seconds"
_LEAST_SPAN = 10.0  # of scores, a tenth of the base's range: less is not to look like much


def draw(result: Improvement, name: str) -> tuple[Picture, ...]:
    """A chart per way to count; of FLOPs if it is known whose."""
    pictures = [
        _picture(result, name, "tokens", result.points, lambda point: point.tokens),
    ]
    if result.model:
        pictures.append(_picture(result, name, "FLOPs", result.points, lambda point: point.flops))
    if result.timed:
        pictures.append(_picture(result, name, _TIMED, result.timed, lambda point: point.seconds))
    return tuple(pictures)


def _picture(
    result: Improvement,
    name: str,
    unit: str,
    points: Sequence[Any],
    compute: Callable[[Any], float],
) -> Picture:
    def chart(axes: Axes) -> None:
        ns = sorted({point.n for point in points if point.method == FAST}, reverse=True)
        for n, color in zip(ns, _COLORS, strict=False):
            cloud = [point for point in points if point.method == FAST and point.n == n]
            x, y = [compute(each) for each in cloud], [each.score.value for each in cloud]
            axes.plot(x, y, "o", color=color, markersize=3, alpha=0.75, label=f"Rejection, N = {n}")
        full = [point for point in points if point.method == FULL]
        x, y = [compute(each) for each in full], [each.score.value for each in full]
        axes.plot(x, y, "o-", color=ORANGE, label=FULL)
        plotting.log2_axis(axes, f"relative {unit}; Best-of-{result.base_n} is 1")
        plotting.least_span_up(axes, _LEAST_SPAN)
        axes.set_ylabel("improvement score")

    left_out = f"; {result.left_out}" if unit == _TIMED and result.left_out else ""
    heading = f"Score against {unit}: {result.reward}{left_out}"
    title = f"Improvement score against relative {unit}, by {result.reward}{left_out}"
    return plotting.picture(f"{name}-improvement-{unit.lower()}", heading, title, chart)
