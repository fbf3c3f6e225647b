"""One prompt: slots, live answers and rewards against length."""

from __future__ import annotations

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import BLUE, GREY, ORANGE, Picture
from experiments.studies.anatomy import Anatomy


def draw(result: Anatomy, name: str) -> tuple[Picture, ...]:
    """The paper's first figure, as three."""
    lengths = [moment.length for moment in result.moments]

    def slots(axes: Axes) -> None:
        axes.plot(lengths, [m.full_slots for m in result.moments], color=ORANGE, label="Best-of-N")
        axes.plot(
            lengths, [m.slots for m in result.moments], color=BLUE, label="Speculative Rejection"
        )
        axes.axhline(result.slots, color=GREY, linestyle=":", label="capacity")
        plotting.log_axis_up(axes, "slots held")
        axes.set_xlabel("tokens written of each answer")

    def live(axes: Axes) -> None:
        full = [moment.full_live for moment in result.moments]
        axes.plot(lengths, full, color=ORANGE, label="Best-of-N")
        axes.plot(
            lengths, [m.live for m in result.moments], color=BLUE, label="Speculative Rejection"
        )
        axes.set_ylabel("answers growing")
        axes.set_xlabel("tokens written of each answer")
        axes.set_ylim(bottom=0)

    of = f"prompt {result.prompt_id}, N = {result.n}, alpha {result.alpha:g}"
    return (
        plotting.picture(f"{name}-slots", "Memory", f"Slots held against length, {of}", slots),
        plotting.picture(f"{name}-live", "Batch size", f"Growing against length, {of}", live),
        plotting.picture(
            f"{name}-rewards",
            f"Rewards at the cuts: {result.reward}",
            f"Quantiles of partial rewards at each cut, {of}",
            lambda axes: _rewards(axes, result),
        ),
    )


def _rewards(axes: Axes, result: Anatomy) -> None:
    x = [each.length for each in result.rounds]
    low, quarter, middle, upper, high = zip(*(r.quantiles for r in result.rounds), strict=True)
    axes.fill_between(x, low, high, color=BLUE, alpha=0.12, linewidth=0, label="all ranked")
    axes.fill_between(x, quarter, upper, color=BLUE, alpha=0.25, linewidth=0, label="middle half")
    axes.plot(x, middle, "o-", color=BLUE, label="median")
    kept = [(r.length, r.kept_quantiles[2]) for r in result.rounds if r.kept_quantiles]
    if kept:
        axes.plot(*zip(*kept, strict=True), "o--", color=ORANGE, label="median of the kept")
    plotting.log2_axis(axes, "tokens written of each answer")
    axes.set_ylabel(result.reward)
