"""The most probable answers: perplexity against speed-up."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import BLUE, GREY, Picture
from experiments.studies.perplexity import Perplexity


def draw(result: Perplexity, name: str) -> tuple[Picture, ...]:
    """A point per alpha, and levels of Best-of-N."""
    fast = [row for row in result.rows if not math.isnan(row.alpha)]
    full = [row for row in result.rows if math.isnan(row.alpha) and row.n > 1]

    def chart(axes: Axes) -> None:
        x = [row.speed_up.value for row in fast]
        axes.plot(x, [row.perplexity.value for row in fast], "o-", color=BLUE, label=_named(result))
        # Room for the level's name above the first points.
        axes.margins(y=0.15)
        for row in fast:
            place = (row.speed_up.value, row.perplexity.value)
            axes.annotate(
                f"{row.alpha:g}",
                place,
                (0, -11),
                textcoords="offset points",
                fontsize=8.5,
                ha="center",
            )
        for row in full:
            axes.axhline(row.perplexity.value, color=GREY, linestyle=":")
            text = f"Best-of-{row.n}"
            axes.annotate(
                text,
                (0, row.perplexity.value),
                (3, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                fontsize=8.5,
            )
        plotting.log2_axis(axes, "times fewer tokens than Best-of-N, same N")
        axes.set_ylabel("perplexity (lower is better)")

    title = "Perplexity of the best answer against speed-up, a point per alpha"
    return (plotting.picture(f"{name}-perplexity", "Probable answers, sooner", title, chart),)


def _named(result: Perplexity) -> str:
    n = max((row.n for row in result.rows if not math.isnan(row.alpha)), default=0)
    return f"Speculative Rejection, N = {n}, by alpha"
