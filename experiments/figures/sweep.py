"""Speculative Rejection by alpha: what it loses, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import PALETTE, Picture
from experiments.studies.sweep import Point, Sweep


def draw(result: Sweep, name: str) -> tuple[Picture, ...]:
    """Regret and saving, of the largest N; a line per schedule."""
    n = max(point.n for point in result.points)
    points = [point for point in result.points if point.n == n]

    def regret(axes: Axes) -> None:
        _lines(axes, points, lambda point: 100 * point.regret_share)
        axes.set_ylabel("regret, % of N's gain")
        axes.set_ylim(bottom=0)

    def saving(axes: Axes) -> None:
        _lines(axes, points, lambda point: point.saving.value)
        plotting.log_axis_up(axes, "times fewer tokens, same N")

    of = f"{result.reward}, N = {n}"
    return (
        plotting.picture(f"{name}-regret", f"What is lost: {of}", f"Regret by alpha, {of}", regret),
        plotting.picture(
            f"{name}-saving", f"What is saved: {of}", f"Tokens saved by alpha, {of}", saving
        ),
    )


def _lines(axes: Axes, points: Sequence[Point], value: Callable[[Point], float]) -> None:
    schedules = dict.fromkeys(point.schedule for point in points)
    for schedule, color in zip(schedules, PALETTE, strict=False):
        line = [point for point in points if point.schedule == schedule]
        alphas = [point.alpha for point in line]
        axes.plot(alphas, [value(point) for point in line], "o-", color=color, label=schedule)
    axes.set_xlabel("alpha, the part rejected each time")
