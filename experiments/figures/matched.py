"""Compute for equal reward: the ratio by alpha, beside what lengths alone would give."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import GREY, PALETTE, Picture
from experiments.studies.matched import EXPECTED, Match, Matched


def draw(result: Matched, name: str) -> tuple[Picture, ...]:
    """Of the largest N; a line per schedule, dotted what a rejection that ignores length saves."""
    n = max(each.n for each in result.matches)
    matches = [each for each in result.matches if each.n == n]

    def chart(axes: Axes) -> None:
        schedules = dict.fromkeys(each.schedule for each in matches)
        for i, schedule in enumerate(schedules):
            _line(axes, [m for m in matches if m.schedule == schedule], i, schedule)
        plotting.log_axis_up(axes, "times fewer tokens")
        axes.set_xlabel(f"alpha (dotted: {EXPECTED})")
        axes.axhline(1, color=GREY, linewidth=0.8)

    title = (
        f"Tokens that Best-of-N needs for equal {result.reward}, over those of Speculative "
        f"Rejection with N = {n}, by alpha; answers of at most {result.max_tokens:,} tokens"
    )
    heading = f"Equal {result.reward}, fewer tokens: N = {n}"
    return (plotting.picture(f"{name}-matched", heading, title, chart),)


def _line(axes: Axes, matches: Sequence[Match], index: int, schedule: str) -> None:
    color = PALETTE[index % len(PALETTE)]
    known = [each for each in matches if math.isfinite(each.ratio.value)]
    # Beside each other, so that intervals can be told apart.
    x = [each.alpha + 0.012 * (index - 2) for each in known]
    y = [each.ratio.value for each in known]
    axes.plot(x, y, "o-", color=color, markersize=3, label=schedule)
    for at, each in zip(x, known, strict=True):
        if math.isfinite(each.ratio.low) and math.isfinite(each.ratio.high):
            axes.plot([at, at], [each.ratio.low, each.ratio.high], color=color, linewidth=0.8)
    planned = [each for each in matches if not math.isnan(each.expected)]
    if planned:
        expected = [each.expected for each in planned]
        axes.plot([each.alpha for each in planned], expected, ":", color=color, linewidth=1)
