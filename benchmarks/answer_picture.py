"""The picture of `make bench-answer`: reward against seconds and tokens, one curve per system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.answer_points import Point


def write_picture(path: Path, points: Sequence[Point], title: str) -> None:
    """Write an SVG file: means with 95 % intervals over prompts; every point has its N."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "specrej", "svg.fonttype": "path"})
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    figure.suptitle(title)
    by_seconds, by_tokens = figure.subplots(1, 2, sharey=True)
    systems = dict.fromkeys(point.system for point in points)
    for axes, cost in ((by_seconds, "seconds"), (by_tokens, "tokens")):
        for number, system in enumerate(systems):
            curve = sorted((p for p in points if p.system == system), key=lambda point: point.n)
            costs, rewards = [getattr(p, cost) for p in curve], [p.reward for p in curve]
            lows = [p.reward if p.reward_low is None else p.reward_low for p in curve]
            highs = [p.reward if p.reward_high is None else p.reward_high for p in curve]
            axes.plot(costs, rewards, f"C{number}o-", markersize=4, label=system)
            axes.vlines(costs, lows, highs, f"C{number}", linewidth=1, alpha=0.6)
            for p in curve:
                axes.annotate(f" {p.n}", (getattr(p, cost), p.reward), color=f"C{number}", va="top")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel(f"{cost} per answer")
        axes.grid(alpha=0.3)
    by_seconds.set_ylabel("reward of the answer")
    if systems:
        by_tokens.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
