"""Best-of-N: reward against N."""

from __future__ import annotations

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import Picture
from experiments.studies.best_of_n import BestOfN


def draw(result: BestOfN, name: str) -> tuple[Picture, ...]:
    """One chart."""
    ns = [point.n for point in result.points]

    def reward(axes: Axes) -> None:
        estimates = [point.reward for point in result.points]
        plotting.band(axes, ns, estimates, "Best-of-N (shaded: 95 %)", plotting.ORANGE)
        plotting.log2_axis(axes, "N, answers per prompt", ns)
        axes.set_ylabel(result.reward)

    heading = f"What doubling N buys: {result.reward}"
    title = f"Mean {result.reward} of the best of N answers, by N"
    return (plotting.picture(f"{name}-best-of-n", heading, title, reward),)
