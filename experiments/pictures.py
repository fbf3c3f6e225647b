"""Pictures of what answers are worth against their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.statistics import Estimate


def draw(
    path: Path, title: str, worth: str, groups: Mapping[str, Sequence[tuple[str, float, Estimate]]]
) -> None:
    """Write an SVG file: each group's points of (name, tokens, worth), with their intervals."""
    import matplotlib  # only here: to import it takes seconds
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (group, points) in enumerate(groups.items()):
        tokens = [point[1] for point in points]
        axes.plot(tokens, [p[2].value for p in points], f"C{number}o", label=group, markersize=4)
        bounds = ([p[2].low for p in points], [p[2].high for p in points])
        axes.vlines(tokens, *bounds, f"C{number}", linewidth=1, alpha=0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("tokens per answer")
    axes.set_ylabel(worth)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    style: Any = {"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        figure.savefig(path, metadata={"Date": None})
