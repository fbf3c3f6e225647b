"""Where the assumption fails: similar scores, early ends, misleading prefixes."""

from __future__ import annotations

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import BLUE, GREEN, ORANGE, Picture
from experiments.studies.failures import Failures


def draw(result: Failures, name: str) -> tuple[Picture, ...]:
    """A point per prompt, and lines over decision tokens."""
    positions = [each.position for each in result.early]

    def similar(axes: Axes) -> None:
        x, y = ([getattr(s, field) for s in result.similar] for field in ("spread", "regret"))
        axes.plot(x, y, "o", color=BLUE, alpha=0.75, label="a prompt each")
        axes.set_xlabel(f"spread of scores at token {result.first}, over the final one")
        axes.set_ylabel("run's regret, over final spread")

    def early(axes: Axes) -> None:
        ended = [each.ended_share for each in result.early]
        plotting.band(axes, positions, ended, "answers over by then", ORANGE)
        best = [each.best_share for each in result.early]
        axes.plot(positions, best, "o-", color=GREEN, label="best one over by then")
        misled = [share for _, share in result.misled_share]
        plotting.band(axes, positions, misled, "best one in lower half", BLUE)
        plotting.log2_axis(axes, "decision token", positions)
        axes.set_ylabel("share")
        axes.set_ylim(0, 1.03)

    by = result.reward
    return (
        plotting.picture(
            f"{name}-similar", "Similar scores", f"Regret against spread of scores by {by}", similar
        ),
        plotting.picture(
            f"{name}-early",
            "Early ends and misleading prefixes",
            f"Answers over, and best answers misjudged by {by}, by decision token",
            early,
        ),
    )
