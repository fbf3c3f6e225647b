"""Pictures of what answers are worth against what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.statistics import Estimate

Groups = Mapping[str, Sequence[tuple[object, float, Estimate]]]


def draw(
    path: Path, title: str, worth: str, costs: Mapping[str, Groups], *, joined: bool = False
) -> None:
    """Write an SVG file, with axes for each cost: each group's points of (name, cost, worth), with
    their intervals; if `joined`, as a curve of named points."""
    import matplotlib  # only here: to import it takes seconds
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(max(8, 5 * len(costs)), 4.5), layout="constrained")
    figure.suptitle(title)
    (all_axes,) = figure.subplots(1, len(costs), sharey=True, squeeze=False)
    for axes, (cost, groups) in zip(all_axes, costs.items(), strict=True):
        for number, (group, points) in enumerate(groups.items()):
            names, xs, worths = zip(*points, strict=True)
            color, kind = f"C{number}", "o-" if joined else "o"
            axes.plot(xs, [one.value for one in worths], color + kind, label=group, markersize=4)
            bounds = ([one.low for one in worths], [one.high for one in worths])
            axes.vlines(xs, *bounds, color, linewidth=1, alpha=0.5)
            for name, x, one in zip(names, xs, worths, strict=True) if joined else ():
                axes.annotate(f" {name}", (x, one.value), color=color, va="top")
        if joined:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(f"{cost} per answer")
        axes.grid(alpha=0.3)
        axes.legend()
    all_axes[0].set_ylabel(worth)
    path.parent.mkdir(parents=True, exist_ok=True)
    style: Any = {"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        figure.savefig(path, metadata={"Date": None})
