"""Partial against final rewards: clouds, correlations, and who survives."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from experiments.figures import plotting
from experiments.figures.plotting import BLUE, GREEN, ORANGE, PURPLE, Drawing, Picture
from experiments.studies.correlation import Correlation, DecisionToken

_CLOUDS = 4


def draw(result: Correlation, name: str) -> tuple[Picture, ...]:
    """Clouds at four decision tokens, and lines over all of them."""
    if not result.decision_tokens:
        return ()
    positions = [each.position for each in result.decision_tokens]

    def correlations(axes: Axes) -> None:
        estimates = [each.pearson for each in result.decision_tokens]
        plotting.band(axes, positions, estimates, "Pearson", BLUE)
        estimates = [each.kendall for each in result.decision_tokens]
        plotting.band(axes, positions, estimates, "Kendall tau", ORANGE)
        plotting.log2_axis(axes, "decision token", positions)
        axes.set_ylabel("correlation with the final reward")
        axes.set_ylim(top=1)

    of = f"{result.reward}"
    return (
        plotting.picture(
            f"{name}-clouds",
            f"Partial against final {of}",
            f"Partial against final {of} at {_CLOUDS} decision tokens",
            [_cloud(each) for each in _spread(result.decision_tokens)],
            height=3.6,
        ),
        plotting.picture(
            f"{name}-correlation",
            "How much a prefix tells",
            f"Correlation of partial with final {of}, by decision token",
            correlations,
        ),
        plotting.picture(
            f"{name}-survival",
            "Does the best answer survive?",
            f"Share of prompts whose best answer by {of} survives one cut, by decision token",
            lambda axes: _survival(axes, result, positions),
        ),
    )


def _survival(axes: Axes, result: Correlation, positions: Sequence[int]) -> None:
    first = result.decision_tokens[0]
    for i, color in zip(range(len(first.survivals)), (GREEN, PURPLE), strict=False):
        alpha = first.survivals[i].alpha
        estimates = [each.survivals[i].share for each in result.decision_tokens]
        plotting.band(axes, positions, estimates, f"alpha {alpha:g}", color)
        axes.axhline(1 - alpha, color=color, linestyle=":", label=f"alpha {alpha:g}, by chance")
    plotting.log2_axis(axes, "decision token", positions)
    axes.set_ylabel("share of prompts")
    axes.set_ylim(0, 1.03)


def _spread(decision_tokens: Sequence[DecisionToken]) -> list[DecisionToken]:
    """Some from the first to the last."""
    last = len(decision_tokens) - 1
    chosen = {round(i * last / (_CLOUDS - 1)) for i in range(_CLOUDS)}
    return [decision_tokens[i] for i in sorted(chosen)]


def _cloud(token: DecisionToken) -> Drawing:
    def draw_cloud(axes: Axes) -> None:
        # As pixels: hundreds of points would be most of the file otherwise.
        axes.scatter(token.partial, token.final, s=5, color=BLUE, alpha=0.5, rasterized=True)
        axes.set_title(f"token {token.position}: r = {token.pearson.value:.2f}", fontsize=9)
        axes.set_xlabel("partial", fontsize=9)
        axes.set_ylabel("final", fontsize=9)
        axes.tick_params(labelsize=8.5)

    return draw_cloud
